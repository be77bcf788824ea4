"""How many drafts a step checks, or none: whatever yields the most tokens a second by what was measured here.

    rate(k) = (rows + guesses of length k expected to be right) / measured time of a step with so many tokens

Drafting must beat plain steps by `MARGIN` to begin and by `STAY` to go on. What really came of it is watched besides:
where verifying steps gave fewer tokens a second than plain ones would have, drafting rests, longer each time.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, Protocol

from engine.speculation.acceptance import expected_tokens
from engine.speculation.step_times import StepTimes, row_class

LENGTHS: Final = (1, 3, 7, 15)
"""Lengths of drafts: rows of 2, 4, 8 and 16 tokens, so that a step's rows fall into few shapes."""
MARGIN: Final = 1.06
STAY: Final = 1.02
LEAST_RATE: Final = 0.2
"""Guesses that are right less often than this are not even considered."""
REFRESH: Final = 128
"""After so many verifying steps one without drafts is taken, to know what that costs now."""
WATCHED: Final = 8
"""So many verifying steps are judged together."""
LOOKING: Final = 0.01
"""Part of a step that looking for guesses may take while none is found to be worth checking."""
LONGEST_PAUSE: Final = 8
FIRST_REST: Final = 128
LONGEST_REST: Final = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row's guesses: how many there are, and how probably each is right."""

    length: int
    rate: float


class Lengths(Protocol):
    """Who decides how much is checked."""

    def may_draft(self, rows: int, *, are_new: bool) -> bool:
        """Whether to look for guesses before the next step of so many rows; `are_new`: some have just begun."""
        ...

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Looking for guesses took so long; `found`: some are checked now."""
        ...

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """Drafts of each row, at most as many as it has and `room` in all."""
        ...

    def stepped(self, rows: int, tokens: int, gained: int, elapsed_s: float) -> None:
        """A step of nothing but decoding checked `tokens`; `gained` of them were right guesses."""
        ...


class Always:
    """As many as there are, up to `length`: for tests."""

    def __init__(self, length: int) -> None:
        self._length = length

    def may_draft(self, rows: int, *, are_new: bool) -> bool:
        """See `Lengths.may_draft`."""
        return self._length > 0

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Looking is never too dear."""

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """See `Lengths.choose`."""
        chosen = []
        for candidate in candidates:
            length = 0 if candidate is None else min(candidate.length, self._length, room)
            room -= length
            chosen.append(length)
        return chosen

    def stepped(self, rows: int, tokens: int, gained: int, elapsed_s: float) -> None:
        """Nothing is learnt."""


@dataclass(slots=True)
class _Watch:
    """What verifying steps of one row count brought lately."""

    is_drafting: bool = False
    steps: int = 0
    spent_s: float = 0.0
    worth_s: float = 0.0  # what plain steps would have taken for the same tokens
    resting: int = 0
    next_rest: int = FIRST_REST


class Controller:
    """See `Lengths`."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._looking_s = 0.0
        self._pause = 0
        self._next_pause = 1
        self._watches: dict[int, _Watch] = {}

    def may_draft(self, rows: int, *, are_new: bool) -> bool:
        """See `Lengths.may_draft`."""
        watch = self._watches.get(row_class(rows))
        if self.times.plain_s(rows) is None or (watch is not None and watch.resting):
            return False
        self._pause = max(self._pause - 1, 0)
        return are_new or not self._pause

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Look more rarely where looking takes a good part of a step and finds nothing."""
        self._looking_s += 0.2 * (elapsed_s - self._looking_s)
        plain_s = self.times.plain_s(rows)
        if found or plain_s is None or self._looking_s < LOOKING * plain_s:
            self._next_pause = 1
            return
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self._pause = self._next_pause

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """See `Lengths.choose`."""
        none = [0] * len(candidates)
        plain_s = self.times.plain_s(rows)
        watch = self._watches.setdefault(row_class(rows), _Watch())
        if plain_s is None or watch.resting or self.times.plain_age(rows) >= REFRESH:
            return none
        best, best_rate = none, rows / plain_s * (STAY if watch.is_drafting else MARGIN)
        for length in LENGTHS:
            lengths = self._lengths(rows, candidates, length)
            total = sum(lengths)
            if not total or total > room:
                break
            step_s = self.times.step_s(rows, rows + total)
            assert step_s is not None
            right = sum(
                expected_tokens(candidate.rate, own)
                for candidate, own in zip(candidates, lengths, strict=True)
                if candidate is not None and own
            )
            if (rows + right) / step_s > best_rate:
                best, best_rate = lengths, (rows + right) / step_s
        watch.is_drafting = best is not none
        return self._without_waste(rows, candidates, best, plain_s, best_rate)

    def stepped(self, rows: int, tokens: int, gained: int, elapsed_s: float) -> None:
        """See `Lengths.stepped`."""
        if elapsed_s <= 0.0:
            return
        plain_s = self.times.plain_s(rows)
        watch = self._watches.setdefault(row_class(rows), _Watch())
        watch.resting = max(watch.resting - 1, 0)
        if tokens > rows and plain_s is not None:
            watch.steps += 1
            watch.spent_s += min(elapsed_s, 8 * plain_s)  # a machine that was busy elsewhere is no reason to rest
            watch.worth_s += plain_s * (rows + gained) / rows
            if watch.steps >= WATCHED:
                self._judge(watch)
        self.times.add(rows, tokens, elapsed_s)

    def _judge(self, watch: _Watch) -> None:
        if watch.spent_s > watch.worth_s:
            watch.resting = watch.next_rest
            watch.next_rest = min(2 * watch.next_rest, LONGEST_REST)
            watch.is_drafting = False
        elif watch.spent_s * MARGIN < watch.worth_s:
            watch.next_rest = FIRST_REST
        watch.steps, watch.spent_s, watch.worth_s = 0, 0.0, 0.0

    def _lengths(self, rows: int, candidates: Ordered[Candidate | None], longest: int) -> list[int]:
        """What each row would check if `longest` were the limit. Alone, a row's length need not fit any other's."""
        lengths = []
        for candidate in candidates:
            if candidate is None or candidate.rate < LEAST_RATE:
                lengths.append(0)
            elif rows == 1 or candidate.length >= longest:
                lengths.append(min(candidate.length, longest))
            else:
                lengths.append(max(length for length in (0, *LENGTHS) if length <= candidate.length))
        return lengths

    def _without_waste(
        self, rows: int, candidates: Ordered[Candidate | None], lengths: list[int], plain_s: float, rate: float
    ) -> list[int]:
        """Shorten drafts whose last tokens cost more time than they bring."""
        total = sum(lengths)
        step_s = self.times.step_s(rows, rows + total)
        if not total or step_s is None:
            return lengths
        least = max(step_s - plain_s, 0.0) / total * rate  # right guesses that one more draft must bring
        shortened = []
        for candidate, length in zip(candidates, lengths, strict=True):
            while candidate is not None and length > 0:
                shorter = max((other for other in (0, *LENGTHS) if other < length), default=0)
                more = expected_tokens(candidate.rate, length) - expected_tokens(candidate.rate, shorter)
                if more >= least * (length - shorter):
                    break
                length = shorter
            shortened.append(length)
        return shortened
