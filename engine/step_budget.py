"""How much prefill and encoding a step takes beside decoding: as much as keeps running streams steady.

    │◀──────── decode ────────▶│◀─ room ─▶│   target: --itl-target-ms, or `STEADY` × the decode step and `UNSEEN_S`
    │ one token for each stream│ slices of a picture, chunks of prompts

The target binds while one request waits for its first token, and that for less than `--ttft-target-ms`. From then on
the room grows with its waiting.

Where several wait, steps give prompts and pictures that part of the time which has all of them served within `QUEUE`,
and sooner the more they are, and at least as much as they gave of late. So room grows smoothly with the work that
waits, from none to nearly all that there is; a queue that comes at a steady rate is served at that rate, and little
throughput is given away.

    work that waits, of the time in which it is to be done    0     1/4    1/3    1/2    `MOST_SHARE`
    a step, by its decoding                                   1     4/3    3/2     2     10

One who comes while the last one is nearly served makes no queue: each counts by how long he has waited.

Where steps overlap prompts are spread besides. A device reads its weights for each step, and a chunk of some hundred
tokens beside decoding costs little more than that; a whole prompt costs its products. Clients that were answered
together ask together, and if all their prompts were taken first, all would decode alone afterwards, and so on:

    a prompt a step     │ d+P │ d+P │ d+P │ d+P │ d │ d │ d │ d │      d: decoding, P: a prompt, p: half of one
    spread              │ d+p │ d+p │ d+p │ d+p │ d+p │ d+p │ …        as often as a row ends and another one comes

Faster than that they would leave steps that decode alone again, once in the time of an answer, for good.

A step begins one new picture at most. Where nobody decodes it takes everything at once.

Time here is what the costs say that the steps so far take, no clock: for one table of costs the same requests in the
same order give the same batches.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.step_costs import Costs, Load

STEADY: Final = 1.3
"""A step may take so many times as long as its decoding alone, where nobody names a target."""
STEADY_AHEAD: Final = 1.4
"""The same where steps overlap, as on a GPU: ten pictures a second, 24 ms each, beside steps of 6 ms need 0.3, and
parts do not fill a step to the brim. Nobody is to see 1.5.
"""
UNSEEN_S: Final = 0.02
"""And so long at least: nobody sees a stream stand still for less, and pictures in small pieces cost throughput."""
UNSEEN_AHEAD_S: Final = 0.005
"""The same where steps overlap, as on a GPU: there pieces of 2 or 3 ms cost none."""
GROWS: Final = 8
"""By how many times itself the room has grown when a request has waited for twice as long as the target says."""
QUEUE: Final = 0.4
"""Two are to be served within this part of it; more of them as much sooner as they are more."""
MOST_SHARE: Final = 0.9
"""Of the time; decoding gets the rest, however long the queue."""
HARDLY: Final = 0.75
"""Steps whose prompts take so many times as long as their decoding serve a queue hardly later than longer ones."""
NEARLY: Final = 0.97
"""Of the prompts that come while rows end a step may take so many, if more would have to be filled up."""
USUAL_STEPS: Final = 128
"""So many steps tell how much work comes beside decoding."""
NEWEST_ANSWERS: Final = 64
"""So many requests tell how long prompts and answers are."""
SHARE: Final = 0.25
"""Who has waited for this part of the longest time counts in full."""
NEW_PICTURES: Final = 1
"""A step beside decoding begins no more, whatever the room."""
MANY: Final = 256
"""Tokens of a prompt whose cost tells what one takes."""
LOOK: Final = 16
"""One of so many steps beside a queue holds as little as can be, where decoding is in doubt: from steps that are all
filled alike nobody can tell what took long in them, and the room follows from what decoding takes.
"""
LEAST_CHUNK: Final = 16
"""Tokens of a prompt that a step takes even where no time is left, if it takes nothing else, and as many more as cost
no more: work always goes on.
"""


@dataclass(slots=True)
class Queue:
    """Who waits for a first token, or to be resumed, and for what.

    Attributes:
        arrivals_s: When each came, by `StepBudget.now_s`.
        prompt_tokens: Of all, that are not computed yet; some may be cached.
        pairs: Of one of them and one before it in its text.
        encoding_s: What encoding the rest of their pictures takes, by the costs; or of some, if that is
            `StepBudget.enough_s`.
        rows: That will decode when all have been served, as far as there is room for them.
    """

    arrivals_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    encoding_s: float = 0.0
    rows: int = 0
    pairs: float = 0.0


@dataclass(slots=True, eq=False)
class Room:
    """What a step may still take beside decoding. Something always fits first: a slice, or some tokens.

    Attributes:
        load: What it takes so far.
        target_s: How long it should take; infinite where nobody decodes.
        left_s: Of that.
        pictures: How many more may be begun.
        most_tokens: Of prompts, whatever the time.
    """

    costs: Costs | None
    load: Load
    target_s: float = math.inf
    left_s: float = math.inf
    pictures: int = sys.maxsize
    most_tokens: int = sys.maxsize

    @property
    def is_bounded(self) -> bool:
        """Whether a target binds."""
        return self.left_s < math.inf

    @property
    def is_spent(self) -> bool:
        """Whether not even one token fits."""
        return self.is_bounded and not self.tokens(1)

    def tokens(self, most: int, behind: int = 0) -> int:
        """How many more tokens of a prompt fit, `most` at most, which read `behind` that are computed."""
        costs, taken = self.costs, self.load.prompt_tokens
        most = min(most, self.most_tokens - taken)
        if not self.is_bounded or costs is None or most <= 0:
            return max(most, 0)

        def with_s(more: int) -> float:
            return self._prompt_s(taken + more) + costs.reading_s(more * behind)

        until_s = self._prompt_s(taken) + self.left_s
        if not self._has_taken:
            until_s = max(until_s, with_s(LEAST_CHUNK))
        return bisect_right(range(1, most + 1), until_s, key=with_s)

    def is_cheap(self, tokens: int) -> bool:
        """Whether so many tokens more cost not much more than they would among `MANY`."""
        if not self.is_bounded or self.costs is None:
            return True
        taken, each_s = self.load.prompt_tokens, self._prompt_s(MANY) / MANY
        return self._prompt_s(taken + tokens) - self._prompt_s(taken) <= 2 * tokens * each_s

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

    def take_tokens(self, count: int, behind: int = 0) -> None:
        """Tokens of a prompt are part of the step, and read `behind` that are computed."""
        if self.costs is not None:
            taken = self.load.prompt_tokens
            self.left_s -= self._prompt_s(taken + count) - self._prompt_s(taken) + self.costs.reading_s(count * behind)
        self.load.prompt_tokens += count
        self.load.pairs += count * behind

    def take_slices(self, size: float, count: int) -> None:
        """Slices of a picture are part of the step."""
        if self.costs is not None:
            self.left_s -= self.costs.slice_s(size) * count
        self.load.slices.append((size, count))

    def _prompt_s(self, tokens: int) -> float:
        return 0.0 if self.costs is None else self.costs.prompt_s(tokens, self.load.rows)

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
        self._answers = Answers()
        self._filled = LOOK  # steps beside a queue since the last that was not
        self._usual_s = 0.0  # of others' work beside decoding, a step
        self._overlaps = overlaps
        self._itl_target_s = itl_target_s
        self._ttft_target_s = ttft_target_s
        self._steady, self._unseen_s = (STEADY_AHEAD, UNSEEN_AHEAD_S) if overlaps else (STEADY, UNSEEN_S)

    @property
    def is_timed(self) -> bool:
        """Whether steps are bounded by time."""
        return self.costs is not None

    @property
    def enough_s(self) -> float:
        """Work of a queue beyond which it makes no difference."""
        return 2 * QUEUE * self._ttft_target_s

    def pace(self, rows: int) -> tuple[float, float] | None:
        """Seconds of a step in which so many rows decode, alone and at most with others' work; None: not bounded."""
        if self.costs is None:
            return None
        decode_s = self.costs.decode_s(rows, rows)
        return decode_s, decode_s + self._room_s(decode_s)

    def open(self, rows: int, tokens: int, queue: Queue) -> Room:
        """The room of a step in which `rows` decode, checking `tokens`, while a queue waits."""
        load = Load(rows, tokens)
        if not rows:
            return Room(self.costs, load)
        if self.costs is None:
            return Room(None, load, pictures=NEW_PICTURES)
        decode_s = self.costs.decode_s(rows, tokens)
        target_s = self._target_s(decode_s)
        steady_s = left_s = self._room_s(decode_s)
        if not queue.arrivals_s:
            return Room(self.costs, load, target_s, steady_s, NEW_PICTURES)
        self._filled += 1
        if self._filled >= LOOK and self.costs.doubts_decode:
            self._filled = 0
            return Room(self.costs, load, target_s, 0.0, NEW_PICTURES)
        waited_s = [self.now_s - arrival_s for arrival_s in queue.arrivals_s]
        longest_s, crowd = max(waited_s), _crowd(waited_s)
        if crowd > 1.0:
            needed_s = self._needed_s(rows, decode_s, steady_s, queue, self.enough_s / crowd)
            needed_s = max(needed_s, self._usual_s)
            left_s += min(crowd - 1.0, 1.0) * max(needed_s - steady_s, 0.0)
        late = longest_s / self._ttft_target_s - 1.0
        if late > 0:
            left_s = max(left_s, max(steady_s, (self._steady - 1.0) * decode_s) * (1.0 + GROWS * late))
        return Room(self.costs, load, target_s, left_s, NEW_PICTURES, self._even_tokens(rows, decode_s, queue))

    def answered(self, prompt_tokens: int, answer_tokens: int) -> None:
        """A request ended for which so many tokens of its prompt were computed, and so many of an answer said."""
        self._answers.add(prompt_tokens, answer_tokens)

    def _even_tokens(self, rows: int, decode_s: float, queue: Queue) -> int:
        """Of prompts in a step, however long the queue: as many as spread them over the steps that answers take, as far
        as steps are filled up or nearly so, and at least those that take `HARDLY` times as long as decoding, or
        `LEAST_CHUNK`.
        """
        assert self.costs is not None
        if not self._overlaps:
            return sys.maxsize
        prompt_s, most = partial(self.costs.prompt_s, rows=rows), range(1, queue.prompt_tokens + 1)
        even = math.ceil(queue.rows * self._answers.prompt_tokens_each)
        even_s = prompt_s(even)
        below, above = bisect_left(most, even_s, key=prompt_s), bisect_right(most, even_s, key=prompt_s)
        until_s = max(HARDLY * decode_s, prompt_s(LEAST_CHUNK))
        spread = below if above > even and below > NEARLY * even else above
        return max(spread, bisect_right(most, until_s, key=prompt_s))

    def _target_s(self, decode_s: float) -> float:
        return self._itl_target_s or max(self._steady * decode_s, self._unseen_s)

    def _room_s(self, decode_s: float) -> float:
        """Beside decoding, as far as the target says."""
        return max(self._target_s(decode_s) - decode_s, 0.0)

    def _needed_s(self, rows: int, decode_s: float, room_s: float, queue: Queue, until_s: float) -> float:
        """Room of steps that have the queue served in so much time.

        Args:
            room_s: That one alone gets at most. Short chunks cost less by the token, so what prompts take follows from
                the room, as it does from them: one look at each does.
        """
        needed_s = room_s
        for _ in range(2):
            work_s = queue.encoding_s + self._prompts_s(queue, rows, max(needed_s, room_s))
            share = min(work_s / until_s, MOST_SHARE)
            needed_s = share / (1.0 - share) * decode_s
            if needed_s <= room_s:
                break
        return needed_s

    def _prompts_s(self, queue: Queue, rows: int, room_s: float) -> float:
        """What a queue's tokens take in chunks that fit the room beside so many rows."""
        assert self.costs is not None
        prompt_s, tokens = partial(self.costs.prompt_s, rows=rows), queue.prompt_tokens
        chunk = max(bisect_right(range(1, tokens + 1), room_s, key=prompt_s), LEAST_CHUNK)
        whole_s = prompt_s(tokens)
        within = tokens * min(chunk, tokens) / 2  # of the same chunk, which its own cost knows of
        reading_s = self.costs.reading_s(max(queue.pairs - within, 0.0))
        return reading_s + (min(tokens / chunk * prompt_s(chunk), whole_s) if chunk < tokens else whole_s)

    def planned(self, load: Load) -> None:
        """A step was planned; its time passes."""
        if self.costs is None:
            return
        others_s = self.costs.prompt_s(load.prompt_tokens, load.rows) + self.costs.reading_s(load.pairs)
        others_s += sum(self.costs.slice_s(size) * count for size, count in load.slices)
        self.now_s += others_s
        if load.rows:
            self.now_s += self.costs.decode_s(load.rows, load.tokens)
            self._usual_s += (others_s - self._usual_s) / USUAL_STEPS

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


class Answers:
    """What the newest requests that have ended asked of steps."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, int]] = deque(maxlen=NEWEST_ANSWERS)  # tokens of prompt and answer
        self.prompt_tokens_each = 0.0
        """Tokens of prompts that were computed for one of an answer."""

    def add(self, prompt_tokens: int, answer_tokens: int) -> None:
        """One more."""
        self._newest.append((prompt_tokens, answer_tokens))
        prompts, answers = map(sum, zip(*self._newest, strict=True))
        self.prompt_tokens_each = prompts / max(answers, 1)


def _crowd(waited_s: Sequence[float]) -> float:
    """How many wait, at least 1. Who has waited for less than `SHARE` of the longest time counts in part."""
    whole_s = SHARE * max(waited_s, default=0.0)
    return max(sum(min(own_s / whole_s, 1.0) for own_s in waited_s) if whole_s > 0 else len(waited_s), 1.0)
