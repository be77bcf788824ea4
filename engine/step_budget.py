"""How much prefill and encoding a step takes beside decoding: as much as keeps running streams steady.

    │◀──────── decode ────────▶│◀─ room ─▶│   target: --itl-target-ms, or `STEADY` × the decode step and `UNSEEN_S`
    │ one token for each stream│ slices of a picture, chunks of prompts

The target binds while one request waits for its first token, and that for less than `--ttft-target-ms`. From then on
the room grows with its waiting, and steeply with how many wait, since then the queue is what costs. So it moves under
load and little throughput is given away. One who comes while the last one is nearly served makes no crowd: each counts
by how long he has waited. A step begins one new picture at most. Where nobody decodes it takes everything at once.

Time here is what the costs say that the steps so far take, no clock: for one table of costs the same requests in the
same order give the same batches.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.step_costs import Costs, Load

STEADY: Final = 1.3
"""A step may take so many times as long as its decoding alone, where nobody names a target."""
STEADY_AHEAD: Final = 1.35
"""The same where steps overlap, as on a GPU: ten pictures a second, 25 ms each, beside steps of 5 ms need a third."""
UNSEEN_S: Final = 0.02
"""And so long at least: nobody sees a stream stand still for less, and pictures in small pieces cost throughput."""
UNSEEN_AHEAD_S: Final = 0.005
"""The same where steps overlap, as on a GPU: there pieces of 2 or 3 ms cost none."""
GROWS: Final = 8
"""By how many times itself the room has grown when a request has waited for twice as long as the target says."""
CROWDING: Final = 3
"""Two that wait get so many doublings of the room."""
SHARE: Final = 0.25
"""Who has waited for this part of the longest time counts in full."""
NEW_PICTURES: Final = 1
"""A step beside decoding begins no more, whatever the room."""
LEAST_CHUNK: Final = 16
"""Tokens of a prompt that a step takes even where no time is left, if it takes nothing else, and as many more as cost
no more: work always goes on.
"""


@dataclass(slots=True, eq=False)
class Room:
    """What a step may still take beside decoding. Something always fits first: a slice, or some tokens.

    Attributes:
        load: What it takes so far.
        target_s: How long it should take; infinite where nobody decodes.
        left_s: Of that.
        pictures: How many more may be begun.
    """

    costs: Costs | None
    load: Load
    target_s: float = math.inf
    left_s: float = math.inf
    pictures: int = sys.maxsize

    @property
    def is_bounded(self) -> bool:
        """Whether a target binds."""
        return self.left_s < math.inf

    @property
    def is_spent(self) -> bool:
        """Whether not even one token fits."""
        return self.is_bounded and not self.tokens(1)

    def tokens(self, most: int) -> int:
        """How many more tokens of prompts fit, `most` at most."""
        costs, taken = self.costs, self.load.prompt_tokens
        if not self.is_bounded or costs is None or most <= 0:
            return most
        until_s = costs.prompt_s(taken) + self.left_s
        if not self._has_taken:
            until_s = max(until_s, costs.prompt_s(LEAST_CHUNK))
        return bisect_right(range(1, most + 1), until_s, key=lambda more: costs.prompt_s(taken + more))

    def slices(self, size: float, most: int) -> int:
        """How many more slices of a picture fit; `size`: its vision tokens a slice. One of a new size comes first, to
        be measured.
        """
        if not self.is_bounded or self.costs is None:
            return most
        if not self.costs.knows_slice(size):
            return 0 if self._has_taken else 1
        slice_s = self.costs.slice_s(size)
        fitting = most if slice_s <= 0 else int(min(self.left_s / slice_s, most))
        return max(fitting, 0) if self._has_taken else max(fitting, 1)

    def take_tokens(self, count: int) -> None:
        """Tokens of prompts are part of the step."""
        if self.costs is not None:
            before_s = self.costs.prompt_s(self.load.prompt_tokens)
            self.left_s -= self.costs.prompt_s(self.load.prompt_tokens + count) - before_s
        self.load.prompt_tokens += count

    def take_slices(self, size: float, count: int) -> None:
        """Slices of a picture are part of the step."""
        if self.costs is not None:
            self.left_s -= self.costs.slice_s(size) * count
        self.load.slices.append((size, count))

    @property
    def _has_taken(self) -> bool:
        return bool(self.load.prompt_tokens or self.load.slices)


class StepBudget:
    """Decides how large the room of each step is, and learns from what steps took.

    Args:
        costs: How long parts of steps take; None: nobody knows, so that steps are bounded by tokens alone, and one new
            picture comes with a step beside decoding.
        itl_target_s: How long a step with rows that decode should take; 0: `STEADY` times its decoding alone, and
            at least `UNSEEN_S`.
        ttft_target_s: How long the target binds; 0: never, as without costs.
        overlaps: Whether steps overlap, so that `STEADY_AHEAD` and `UNSEEN_AHEAD_S` hold.

    Attributes:
        now_s: How long all steps so far took, by the costs.
        steps_over_target: Steps beside decoding that took longer than their target.
        encoder_slices: Slices of pictures that ran beside decoding.
    """

    def __init__(
        self, costs: Costs | None, itl_target_s: float = 0.0, ttft_target_s: float = 0.3, *, overlaps: bool = False
    ) -> None:
        self.costs = costs if ttft_target_s > 0 else None
        self.now_s = 0.0
        self.steps_over_target = 0
        self.encoder_slices = 0
        self._itl_target_s = itl_target_s
        self._ttft_target_s = ttft_target_s
        self._steady, self._unseen_s = (STEADY_AHEAD, UNSEEN_AHEAD_S) if overlaps else (STEADY, UNSEEN_S)

    @property
    def is_timed(self) -> bool:
        """Whether steps are bounded by time."""
        return self.costs is not None

    def pace(self, rows: int) -> tuple[float, float] | None:
        """Seconds of a step in which so many rows decode, alone and at most with others' work; None: not bounded."""
        if self.costs is None:
            return None
        decode_s = self.costs.decode_s(rows, rows)
        return decode_s, max(self._target_s(decode_s), decode_s)

    def open(self, rows: int, tokens: int, arrivals_s: Sequence[float]) -> Room:
        """The room of a step in which `rows` decode, checking `tokens`. `arrivals_s`: by `now_s`, of the requests that
        wait for their first token.
        """
        load = Load(rows, tokens)
        if not rows:
            return Room(self.costs, load)
        if self.costs is None:
            return Room(None, load, pictures=NEW_PICTURES)
        decode_s = self.costs.decode_s(rows, tokens)
        target_s = self._target_s(decode_s)
        left_s = max(target_s - decode_s, 0.0)
        waited_s = [self.now_s - arrival_s for arrival_s in arrivals_s]
        late = max(waited_s, default=0.0) / self._ttft_target_s - 1.0
        growth = _crowd(waited_s) ** CROWDING * (1.0 + GROWS * max(late, 0.0))
        if growth > 1.0:
            left_s = max(left_s, (self._steady - 1.0) * decode_s) * growth
        return Room(self.costs, load, target_s, left_s, NEW_PICTURES)

    def _target_s(self, decode_s: float) -> float:
        return self._itl_target_s or max(self._steady * decode_s, self._unseen_s)

    def planned(self, load: Load) -> None:
        """A step was planned; its time passes."""
        if self.costs is None:
            return
        self.now_s += self.costs.prompt_s(load.prompt_tokens)
        self.now_s += sum(self.costs.slice_s(size) * count for size, count in load.slices)
        if load.rows:
            self.now_s += self.costs.decode_s(load.rows, load.tokens)

    def encoded(self, size: float, num_slices: int, elapsed_s: float) -> None:
        """So many slices of a picture took so long; see `Costs.encoded`."""
        if self.costs is not None:
            self.costs.encoded(size, num_slices, elapsed_s)

    def stepped(self, room: Room, elapsed_s: float, encoding_s: float | None, drafting_s: float = 0.0) -> None:
        """A step took so long; see `Costs.stepped`. What a model took to guess before it is no part of what is learnt
        of the step.
        """
        if self.costs is None:
            return
        self.costs.stepped(room.load, elapsed_s - drafting_s, encoding_s)
        if room.load.rows:
            self.steps_over_target += elapsed_s > room.target_s
            self.encoder_slices += sum(count for _, count in room.load.slices)


def _crowd(waited_s: Sequence[float]) -> float:
    """How many wait, at least 1. Who has waited for less than `SHARE` of the longest time counts in part."""
    whole_s = SHARE * max(waited_s, default=0.0)
    return max(sum(min(own_s / whole_s, 1.0) for own_s in waited_s) if whole_s > 0 else len(waited_s), 1.0)
