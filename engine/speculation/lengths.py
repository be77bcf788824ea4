"""What the speculator asks of whoever decides how much is checked, and the simplest who does.

`engine.speculation.controller` decides by what was measured; `Always`, for tests and benchmarks, takes what there is.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence as Ordered
from typing import Final, NamedTuple, Protocol

from engine.speculation.acceptance import Rates
from engine.speculation.model_lengths import ModelCandidate

NUM_NEEDS: Final = 9
NO_NEEDS: Final = array("d", (0.0, 0.0) * NUM_NEEDS)


class Candidate(NamedTuple):
    """A row's guesses: how many there are, and how probably they are right."""

    length: int
    rates: Rates


class Offer(NamedTuple):
    """Terms on which a step's guesses are checked or not: see `Lengths.offer`.

    Attributes:
        needs: As of `Lengths.needs`.
        steps: `NUM_NEEDS` pairs: so many guesses of all together, rising, and what a step takes that checks them.
        plain_s, looking_s: What a plain step takes, and a look.
        credit_s: What may be lost.
        rate: Tokens a second that must be promised; infinite where nothing may be checked.
    """

    needs: array[float]
    steps: array[float]
    plain_s: float
    looking_s: float
    credit_s: float = 0.0
    rate: float = math.inf

    @property
    def is_open(self) -> bool:
        """Whether anything may be checked."""
        return self.rate < math.inf


class Chooser(Protocol):
    """Who knows the guesses of a step's sequences."""

    def __call__(self, rows: int, offer: Offer, limit: int) -> tuple[int, float]:
        """Decide on these terms how many guesses of so many sequences to check, `limit` in all at most; says how many
        that are, and tokens a second then. 0 where that is no more than must be promised.
        """
        ...


class Lengths(Protocol):
    """Who decides how much is checked.

    Attributes:
        is_thrifty: Whether an engine that runs ahead looks only where that is free, or was saved for (see `Ahead`).
    """

    is_thrifty: bool

    @property
    def is_drafting(self) -> bool:
        """Whether guesses were worth checking of late, so that the next answer's may be, too."""
        ...

    def knows(self, rows: int) -> bool:
        """Whether it is known what steps of so many rows take: nothing is checked before."""
        ...

    def may_draft(self, rows: int, *, is_expected: bool) -> bool:
        """Whether to look for guesses, or to see whether those that were found pay, before the next step of so many
        rows. `is_expected`: an answer has just begun that may repeat an earlier one.
        """
        ...

    def stake(self, rows: int) -> None:
        """An answer repeats an earlier one, as it seems: something may be risked on it."""
        ...

    def passed(self, num_steps: int) -> None:
        """So many steps have begun before which `may_draft` was not asked: what was found would not pay."""
        ...

    def needs(self, rows: int) -> array[float]:
        """`NUM_NEEDS` pairs: so many guesses of all rows together, rising, pay only if so many of them are right."""
        ...

    def offer(self, rows: int, num_steps: int, *, is_expected: bool) -> Offer | None:
        """`passed`, `may_draft` and what `choose` goes by in one, `num_steps` after that was asked last, for one call
        that looks and chooses. None: those shall be asked.
        """
        ...

    def answered(self, rows: int, total: int, rate: float, looking_s: float) -> None:
        """On the terms of an open offer so many guesses are checked, which promise so many tokens a second. Looking for
        them took so long, as of `looked`.
        """
        ...

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Looking for guesses took so long; `found`: some are checked now."""
        ...

    def spent(self, rows: int, elapsed_s: float) -> None:
        """Something else took so long that nobody would do who does not guess. `rows`: of the step in question."""
        ...

    def may_remember(self, rows: int) -> bool:
        """Whether to keep what is said, so that later answers can be guessed: not while more was lost than may be."""
        ...

    def waited(self, rows: int, elapsed_s: float) -> None:
        """An engine that runs ahead waited for results, so that guesses could be looked for; nothing was checked, and
        the plain step of so many rows took so long then, without looking.
        """
        ...

    def waiting(self, rows: int) -> float:
        """How long the device stands idle where results are waited for, in plain steps of so many rows."""
        ...

    def may_wait(self, rows: int, *, is_expected: bool, is_renewing: bool) -> bool:
        """Whether drafts could be checked in the next step of an engine that runs ahead, if it waits for results first.
        `is_expected`: as of `may_draft`; `is_renewing`: the step in flight tells what plain ones take now.
        """
        ...

    def promised(self, rows: int, candidates: Ordered[Candidate | None]) -> float:
        """Tokens a second if the best of these guesses were checked, by those of plain steps; 1: none should be.
        Nothing is decided by that.
        """
        ...

    def promised_by(self, chooser: Chooser, rows: int) -> float | None:
        """The same by whoever knows the guesses; None: `promised` shall be asked."""
        ...

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """Drafts of each row, at most as many as it has and `room` in all."""
        ...

    def choose_by(self, chooser: Chooser, rows: int, room: int) -> bool | None:
        """Let whoever knows the guesses of a step's sequences choose; whether any are checked. None: `choose` shall be
        asked.
        """
        ...

    def may_branch(self, rows: int) -> bool:
        """Whether to make trees of what was guessed, where `choose` has found chains worth checking."""
        ...

    def made_trees(self, rows: int, elapsed_s: float) -> None:
        """That took so long, before it is known whether they are checked."""
        ...

    def branch(
        self,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        gains: Ordered[Ordered[float] | None],
        room: int,
    ) -> list[int] | None:
        """Drafts of each row if trees pay more than chains of these `lengths`, else None.

        `gains`: how probably each guess of a row's tree stands, falling; None where the row has only its chain.
        """
        ...

    def may_ask_model(self, rows: int, rates: Rates) -> bool:
        """Whether to see what a model could guess before this step, where it is right with `rates`."""
        ...

    def choose_model(
        self,
        rows: int,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        models: Ordered[ModelCandidate | None],
        room: int,
    ) -> list[int]:
        """How many tokens a model guesses for each row in the place of the `lengths` that were chosen; 0: those stay.
        All in all at most `room` are checked then.
        """
        ...

    @property
    def most_late(self) -> int:
        """Tokens that the model catches up with at most before it guesses what was chosen last: where that is not
        enough, it guesses nothing.
        """
        ...

    def guessed(self, rows: int, late: int, num_forwards: int, first_s: float, others_s: float) -> None:
        """A model has guessed. See `DraftTimes.add`."""
        ...

    def prompts(self, tokens: int, elapsed_s: float) -> None:
        """A step computed so many tokens of prompts and nothing else."""
        ...

    def may_open(self, rows: int) -> bool:
        """Whether to look for guesses of an answer's first tokens, before its prompt is computed to the end. `rows`:
        how many will decode then.
        """
        ...

    def open(self, rows: int, prompt: int, gains: Ordered[float], looking_s: float) -> int:
        """How many of them to check beside the last `prompt` tokens. `gains`: how probably each stands, falling;
        `looking_s`: what it took to find them.
        """
        ...

    def opened(self, rows: int, tokens: int, guesses: int, gained: int, elapsed_s: float | None) -> None:
        """A step of `tokens`, most of them of prompts, checked `guesses` of first tokens besides, and `gained` of those
        were right; without any, what it took tells what prompts take. None: it was not measured.
        """
        ...

    def stepped(
        self,
        rows: int,
        tokens: int,
        gained: int,
        elapsed_s: float,
        drafting_s: float = 0.0,
        *,
        has_trees: bool = False,
    ) -> None:
        """A step of nothing but decoding checked `tokens`; `gained` of them were right guesses, for which a model had
        taken `drafting_s` before. Neither that nor looking for guesses is part of `elapsed_s`.
        """
        ...

    def drafted_beside_prompts(self, rows: int, tokens: int, gained: int, drafting_s: float) -> None:
        """The same of a step that computed other things too, so that its time tells nothing. Without guesses of a model
        (`drafting_s` 0) some were checked that a source had made.
        """
        ...


class Always:
    """As many as there are, up to `length`."""

    is_thrifty = False
    is_drafting = True
    most_late = sys.maxsize

    def __init__(self, length: int) -> None:
        self._length = length

    def knows(self, rows: int) -> bool:
        """It need not be."""
        return True

    def may_draft(self, rows: int, *, is_expected: bool) -> bool:
        """See `Lengths.may_draft`."""
        return self._length > 0

    def stake(self, rows: int) -> None:
        """Everything may be risked."""

    def passed(self, num_steps: int) -> None:
        """Nothing is learnt."""

    def needs(self, rows: int) -> array[float]:
        """None need be right."""
        return NO_NEEDS

    def offer(self, rows: int, num_steps: int, *, is_expected: bool) -> Offer | None:
        """See `Lengths.offer`."""
        return None

    def answered(self, rows: int, total: int, rate: float, looking_s: float) -> None:
        """Nothing is offered."""

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Looking is never too dear."""

    def spent(self, rows: int, elapsed_s: float) -> None:
        """Nor is anything else."""

    def may_remember(self, rows: int) -> bool:
        """See `Lengths.may_remember`."""
        return True

    def waited(self, rows: int, elapsed_s: float) -> None:
        """Nor is waiting."""

    def waiting(self, rows: int) -> float:
        """See `Lengths.waiting`."""
        return 0.0

    def may_wait(self, rows: int, *, is_expected: bool, is_renewing: bool) -> bool:
        """See `Lengths.may_wait`."""
        return self._length > 0

    def promised(self, rows: int, candidates: Ordered[Candidate | None]) -> float:
        """More than nothing wherever there are some."""
        return 2.0 if any(candidates) else 1.0

    def promised_by(self, chooser: Chooser, rows: int) -> float | None:
        """See `Lengths.promised_by`."""
        return None

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """See `Lengths.choose`."""
        chosen = []
        for candidate in candidates:
            length = 0 if candidate is None else min(candidate.length, self._length, room)
            room -= length
            chosen.append(length)
        return chosen

    def choose_by(self, chooser: Chooser, rows: int, room: int) -> bool | None:
        """See `Lengths.choose_by`."""
        return None

    def may_branch(self, rows: int) -> bool:
        """Wherever proposals differ."""
        return True

    def made_trees(self, rows: int, elapsed_s: float) -> None:
        """They are checked anyway."""

    def branch(
        self,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        gains: Ordered[Ordered[float] | None],
        room: int,
    ) -> list[int] | None:
        """See `Lengths.branch`."""
        room -= sum(lengths)
        widths = list(lengths)
        for index, own in enumerate(gains):
            if own is not None:
                widths[index] = min(len(own), self._length, lengths[index] + room)
                room += lengths[index] - widths[index]
        return widths

    def may_ask_model(self, rows: int, rates: Rates) -> bool:
        """See `Lengths.may_ask_model`."""
        return self._length > 0

    def choose_model(
        self,
        rows: int,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        models: Ordered[ModelCandidate | None],
        room: int,
    ) -> list[int]:
        """For rows in which nothing else is checked. See `Lengths.choose_model`."""
        room -= sum(lengths)
        chosen = []
        for length, model in zip(lengths, models, strict=True):
            own = 0 if length or model is None else min(model.length, self._length, room)
            room -= own
            chosen.append(own)
        return chosen

    def guessed(self, rows: int, late: int, num_forwards: int, first_s: float, others_s: float) -> None:
        """Nothing is learnt."""

    def prompts(self, tokens: int, elapsed_s: float) -> None:
        """Nothing is learnt."""

    def may_open(self, rows: int) -> bool:
        """See `Lengths.may_open`."""
        return self._length > 0

    def open(self, rows: int, prompt: int, gains: Ordered[float], looking_s: float) -> int:
        """See `Lengths.open`."""
        return min(len(gains), self._length)

    def opened(self, rows: int, tokens: int, guesses: int, gained: int, elapsed_s: float | None) -> None:
        """Nothing is learnt."""

    def stepped(
        self,
        rows: int,
        tokens: int,
        gained: int,
        elapsed_s: float,
        drafting_s: float = 0.0,
        *,
        has_trees: bool = False,
    ) -> None:
        """Nothing is learnt."""

    def drafted_beside_prompts(self, rows: int, tokens: int, gained: int, drafting_s: float) -> None:
        """Nothing is learnt."""
