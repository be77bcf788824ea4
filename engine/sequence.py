"""One sequence: a request's prompt and pictures, what has been generated, and how far its KV is computed.

Holds state and answers questions about it; the scheduler and the engine decide what happens to it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.batch import RowSampling, TokenMask, VisionRows
from engine.grammar import GrammarState
from engine.kv.cache import KVHold
from engine.kv.radix import IdArray
from preprocess.wire import EngineRequest, Pixels, SamplingParams

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from engine.speculation.drafting import Drafting

Ids = Ordered[int]
LoadPixels = Callable[[Pixels], "torch.Tensor"]


class State(enum.Enum):
    """waiting ⇄ running (admitted, retracted), and from either to finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions `start` … `start + count - 1` take vision tokens `first` … of their picture."""

    start: int
    count: int
    first: int


@dataclass(slots=True, eq=False)
class Picture:
    """One picture of a prompt. `key` is the base of its vision ids; `held` tells whether the vision cache keeps it for
    us.
    """

    index: int
    key: int
    digest: bytes
    num_tokens: int
    pixels: Pixels
    spans: list[Span]
    held: bool = False

    @property
    def start(self) -> int:
        """Its first position in the prompt."""
        return self.spans[0].start

    @property
    def stop(self) -> int:
        """The position after its last."""
        return self.spans[-1].start + self.spans[-1].count

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether one of its vision tokens lies at positions `start` … `stop - 1`."""
        return any(span.start < stop and start < span.start + span.count for span in self.spans)

    def first_position(self, start: int) -> int:
        """Its first position at or after `start`."""
        return next(max(span.start, start) for span in self.spans if start < span.start + span.count)

    def rows(self, start: int, stop: int, embeddings: torch.Tensor) -> list[VisionRows]:
        """Its part of a row that covers positions `start` … `stop - 1`."""
        rows = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.start + span.count)
            if low < high:
                rows.append(VisionRows(low - start, span.first + low - span.start, high - low, embeddings))
        return rows


@dataclass(slots=True)
class Clock:
    """When things happened to a sequence, in seconds of the engine's clock; 0 is not yet."""

    submitted_s: float
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    vision_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine.

    `prompt_ids` are the ids as sent; `prompt_keys` the same with vision ids in place of placeholders: what the radix
    tree sees. `num_computed` positions have keys and values, or get them in a batch in flight; `num_pending` tokens are
    being drawn there. `hold` is set exactly while running. `max_tokens` is
    bounded by the context. `positions` (3, n) are the rotary positions of the first n tokens where they are not 0, 1,
    2, …; later ones are `position_delta` more than the position in the sequence. `drafting` is what
    `engine.speculation` knows of it; `num_drafted` tokens were guessed, and `num_accepted` of them rightly.
    `arrived_s` is when it came, or was sent back to the queue, in time of `engine.step_budget`.
    """

    request: EngineRequest
    serial: int
    prompt_ids: IdArray
    prompt_keys: IdArray
    pictures: list[Picture]
    load_pixels: LoadPixels
    max_tokens: int
    clock: Clock
    positions: NDArray[np.int32] | None = None
    position_delta: int = 0
    state: State = State.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int | None = None
    hold: KVHold | None = None
    is_aborted: bool = False
    stop_at: int | None = None
    num_retracted: int = 0
    num_overtaken: int = 0
    cached_length: int = 0
    cached_version: int = -1
    grammar: GrammarState | None = None
    drafting: Drafting | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    arrived_s: float = 0.0
    _penalty_prompt: tuple[int, ...] | None = None

    @property
    def request_id(self) -> str:
        """The id the server chose."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length, vision tokens included."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, tokens in flight included."""
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """Whether all but the last token are computed and that one is an output: the next step yields the next
        token.
        """
        return bool(self.output_ids or self.num_pending) and self.num_computed == self.num_tokens - 1

    @property
    def is_ending(self) -> bool:
        """Whether the answer is as long as it may be once tokens in flight have come."""
        return len(self.output_ids) + self.num_pending >= self.max_tokens

    @property
    def needs_results(self) -> bool:
        """Whether its next token can be drawn only when the host knows all before it."""
        params = self.request.sampling
        return self.grammar is not None or has_penalties(params)

    def keys(self, start: int, stop: int) -> IdArray:
        """Radix ids of positions `start` … `stop - 1`; fewer where the last tokens are still being drawn."""
        length = len(self.prompt_keys)
        if stop <= length:
            return self.prompt_keys[start:stop]
        tail = np.array(self.output_ids[max(start - length, 0) : stop - length], dtype=np.int64)
        return tail if start >= length else np.concatenate((self.prompt_keys[start:], tail))

    def ids(self, start: int, stop: int) -> list[int]:
        """Plain ids of positions `start` … `stop - 1`, for the runner."""
        length = len(self.prompt_ids)
        ids: list[int] = self.prompt_ids[start:stop].tolist()
        if stop > length:
            ids.extend(self.output_ids[max(start - length, 0) : stop - length])
        return ids

    def rope_positions(self, start: int, stop: int) -> NDArray[np.int32] | None:
        """Rotary positions (3, stop - start) of positions `start` … `stop - 1`; None where the delta says it."""
        if self.positions is None or start >= self.positions.shape[1]:
            return None
        known = self.positions[:, start:stop]
        first = start + known.shape[1]
        rest = np.arange(first + self.position_delta, stop + self.position_delta, dtype=np.int32)
        return np.concatenate((known, np.broadcast_to(rest, (3, len(rest)))), axis=1)

    def holds(self, keys: Container[int]) -> bool:
        """Whether the vision cache keeps one of these pictures for it."""
        return any(picture.held and picture.key in keys for picture in self.pictures)

    @property
    def is_ready(self) -> bool:
        """Whether it may be admitted: its grammar is compiled."""
        return self.grammar is None or self.grammar.is_ready

    def sampling(self, drafts: Ids = (), allowed: TokenMask | None = None) -> RowSampling:
        """What the runner needs to draw the token that follows the output and `drafts`. `allowed`: what the grammar
        lets come there.
        """
        params = self.request.sampling
        index = len(self.output_ids) + self.num_pending + len(drafts)
        banned = params.stop_token_ids if index < params.min_tokens and allowed is None else ()
        if not has_penalties(params):
            return RowSampling(params, index, (), (), banned, allowed)
        if self._penalty_prompt is None:
            self._penalty_prompt = tuple(self.prompt_ids[self.prompt_ids == self.prompt_keys].tolist())
        return RowSampling(params, index, self._penalty_prompt, (*self.output_ids, *drafts), banned, allowed)


def has_penalties(params: SamplingParams) -> bool:
    """Whether drawing a token takes those before it into account."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
