"""The waiting queue: who may come in next. Bounded in requests and in prompt tokens.

Order: by priority class; inside it retracted sequences first, then the longest cached prefix. A request that later ones
have overtaken `AGED_AFTER` times goes before the others of its class, and after `OVERDUE_AFTER` times before every
class: nobody waits for ever.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from engine.sequence import Sequence

AGED_AFTER: Final = 8
OVERDUE_AFTER: Final = 64
WINDOW: Final = 64
"""Cached prefixes are compared among that many candidates at most, so that a long queue stays cheap."""
_YOUNG: Final = 2


class WaitingQueue:
    """Sequences that are not admitted, or were retracted, by serial (order of arrival)."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._sequences: dict[int, Sequence] = {}
        self._admissions: deque[tuple[float, int]] = deque(maxlen=64)  # (time, prompt tokens), for `retry_after_s`

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def has_room(self, num_tokens: int) -> bool:
        """Whether one more request fits. An empty queue takes any: a bound smaller than one request must not lock it
        out.
        """
        return not self._sequences or (
            len(self._sequences) < self.max_requests and self.num_tokens + num_tokens <= self.max_tokens
        )

    def retry_after_s(self, num_tokens: int, now_s: float) -> float:
        """When the queue will probably have room, at the rate of recent admissions; whole seconds, 1 to 60."""
        if len(self._admissions) < 2:
            return 1.0
        elapsed_s = max(now_s - self._admissions[0][0], 1e-3)
        requests_per_s = len(self._admissions) / elapsed_s
        tokens_per_s = sum(tokens for _, tokens in self._admissions) / elapsed_s
        excess_requests = len(self._sequences) + 1 - self.max_requests
        excess_tokens = self.num_tokens + num_tokens - self.max_tokens
        wait_s = max(excess_requests / requests_per_s, excess_tokens / max(tokens_per_s, 1e-3))
        return float(min(max(math.ceil(wait_s), 1), 60))

    def push(self, sequence: Sequence) -> None:
        """A new request, or one that was retracted."""
        if not self._sequences:
            self._admissions.clear()  # the time that nobody waited says nothing about how fast a queue moves
        self._sequences[sequence.serial] = sequence
        self.num_tokens += sequence.num_prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        """It was admitted or it ended. Raises KeyError when it does not wait."""
        del self._sequences[sequence.serial]
        self.num_tokens -= sequence.num_prompt_tokens

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """It comes in: whoever came earlier and still waits has been overtaken."""
        self.remove(sequence)
        if not sequence.num_retracted:
            self._admissions.append((now_s, sequence.num_prompt_tokens))
        for other in self._sequences.values():
            other.num_overtaken += other.serial < sequence.serial

    def candidates(self, cached_length: Callable[[Sequence], int]) -> list[Sequence]:
        """Who may come in, best first."""
        sequences = heapq.nsmallest(WINDOW, self._sequences.values(), key=_urgency)
        if len(sequences) < 2:
            return sequences
        return sorted(sequences, key=lambda sequence: _order(sequence, cached_length(sequence)))


def _urgency(sequence: Sequence) -> tuple[int, int, int, int]:
    if sequence.num_overtaken >= OVERDUE_AFTER:
        return (0, 0, 0, sequence.serial)
    if sequence.num_retracted:
        return (1, -sequence.request.priority, 0, sequence.serial)
    return (1, -sequence.request.priority, 1 if sequence.num_overtaken >= AGED_AFTER else _YOUNG, sequence.serial)


def _order(sequence: Sequence, cached: int) -> tuple[int, int, int, int, int]:
    overdue, priority, age, serial = _urgency(sequence)
    return (overdue, priority, age, -cached if age == _YOUNG else 0, serial)
