"""How much a model guesses before a step, or nothing: its guesses cost time before anybody knows what they are worth.

    rate(k) = (rows + guesses expected to be right) / (time of a step that checks them + time of guessing k, measured)

A model guesses where that beats what the step would yield without it: plain, or with the guesses that cost nothing.

Beside the estimate there is an account (`engine.speculation.account`): a model may guess only while it bears that all
guesses are wrong. So whatever it guesses, and whatever prompts it has to catch up with, it cannot slow a server down by
more than a hundredth; and one that has not paid is tried again now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Ordered
from typing import Final, NamedTuple

from engine.speculation.acceptance import Rates
from engine.speculation.account import SURPRISE, Account
from engine.speculation.draft_times import FEW, DraftTimes
from engine.speculation.step_times import StepTimes

MODEL_LENGTHS: Final = (1, 2, 3, 5, 7, 15)
MARGIN: Final = 1.08
"""A model must promise so much more to begin, and to go on `STAY`."""
STAY: Final = 1.02
FIRST_CREDIT: Final = 12.0
MOST_CREDIT: Final = 64.0
"""What the account begins with, and the most that it holds, in plain steps."""
ROUNDS: Final = 16
"""In a comparison, catching up with a prompt counts as if it served so many steps."""
FIRST_REST: Final = 32
LONGEST_REST: Final = 2048
"""A model that does not promise enough is tried after so many steps, twice as many each time."""
TRIAL: Final = 2
"""Then it guesses so many tokens."""
HELD: Final = 3
"""A decision to guess holds for so many steps more: deciding takes a tenth of a small model's step."""
LEARNING: Final = 0.03
LEAST_TRUST: Final = 0.5
FORGIVING: Final = 1 / 128


class ModelCandidate(NamedTuple):
    """What a model could guess in one row: at most `length` tokens, right with `rates`, having first computed `late`
    tokens that it has not seen.
    """

    length: int
    rates: Rates
    late: int = 0


_Ranked = tuple[int, int, ModelCandidate]
"""A candidate behind its `late` and its row, by which rows come first whose text the model knows best."""


class ModelLengths:
    """See above.

    Args:
        times: Of the target's steps.
        cost, late_cost: See `Drafter`.

    Attributes:
        is_drafting: It was decided last that the model guesses.
        most_late: Tokens that it catches up with at most before the step for which was chosen last.
    """

    def __init__(self, times: StepTimes, cost: float, late_cost: float) -> None:
        self.times = times
        self.drafts = DraftTimes(cost, late_cost)
        self._account = Account(FIRST_CREDIT, MOST_CREDIT)
        self.is_drafting = False
        self.most_late = sys.maxsize
        self._promise = 1.0
        self._expected_s = 0.0
        self._late_s = 0.0
        self._trust = 1.0
        self._held = 0
        self._held_picks: list[int] = []
        self._rest = 0
        self._next_rest = FIRST_REST
        self._num_tried = 0  # rows of a trial that runs

    def may_ask(self, rows: int, rates: Rates) -> bool:
        """Whether to look at what a model could guess before the next step, where its guesses are right with `rates`.
        Called once a step.
        """
        plain_s = self.times.plain_s(rows)
        if plain_s is None:
            return False
        self._rest -= 1
        if self.is_drafting or self._rest <= 0:
            return True
        forward_s = self.drafts.forward_s(rows, plain_s)
        return any(
            (1.0 + rates.expected(length)) * plain_s > MARGIN / self._trust * (plain_s + length * forward_s)
            for length in MODEL_LENGTHS
        )

    def choose(
        self,
        rows: int,
        free: Ordered[float],
        lengths: Ordered[int],
        models: Ordered[ModelCandidate | None],
        room: int,
    ) -> list[int]:
        """How many tokens the model guesses for each row, in the place of what was chosen; 0: that stays.

        Args:
            rows: Sequences that decode.
            free: How many of the guesses that cost nothing are expected to be right, of each row.
            lengths: How many of them are checked.
            models: What a model could guess.
            room: Most guesses in all.
        """
        none = [0] * len(models)
        self.most_late = sys.maxsize
        plain_s = self.times.plain_s(rows)
        if plain_s is None:
            return none
        if (held := self._held_lengths(plain_s, lengths, models, room)) is not None:
            return held
        base_s = self.times.step_s(rows, rows + sum(lengths))
        assert base_s is not None
        base_rate = (rows + sum(free)) / base_s
        least = base_rate * (STAY if self.is_drafting else MARGIN) / self._trust
        best, best_rate, best_s, best_late_s = none, least, 0.0, 0.0
        ranked = sorted((model.late, index, model) for index, model in enumerate(models) if model is not None)
        for length in MODEL_LENGTHS:
            found = self._affordable(rows, plain_s, base_s, free, lengths, ranked, room, length)
            if found is None:
                break
            picked, right, cost_s, late_s = found
            rate = (rows + right) / (base_s + cost_s - late_s + late_s / ROUNDS)
            if rate > best_rate:
                best, best_rate, best_s, best_late_s = picked, rate, base_s + cost_s, late_s
            elif best is not none:
                break  # longer ones promise less still
        self.is_drafting = best is not none
        self._num_tried = 0
        if self.is_drafting:
            self._next_rest = FIRST_REST
            self._rest = FIRST_REST
        elif self._rest <= 0:
            best, best_s = self._trial(rows, plain_s, base_s, free, lengths, ranked, room)
            best_rate = base_rate
        self._promise = best_rate * plain_s / rows
        self._expected_s, self._late_s = best_s, best_late_s
        if self.is_drafting and not any(lengths):
            self._held, self._held_picks = HELD, best
        return best

    def stepped(self, rows: int, tokens: int, gained: int, step_s: float, drafting_s: float, *, is_pure: bool) -> None:
        """A step checked `tokens` for `rows` sequences, of which `gained` guesses were right; the model guessed for
        `drafting_s`, 0 where it did not. `is_pure`: nothing else was computed in `step_s`.
        """
        plain_s = self.times.plain_s(rows)
        if plain_s is None:
            return
        self._account.pay_in(plain_s)
        if drafting_s > 0.0:
            if not is_pure:
                step_s = self.times.step_s(rows, tokens) or plain_s
            total_s = step_s + drafting_s
            if self._expected_s:
                total_s = min(total_s, SURPRISE * self._expected_s)
            self._account.settle((rows + gained) / rows * plain_s - total_s, plain_s)
            if self._num_tried:
                if gained >= self._num_tried:
                    self._rest = self._next_rest = FIRST_REST
            elif tokens > rows:  # else it has only caught up
                counted_s = max(total_s - self._late_s * (1 - 1 / ROUNDS), step_s)
                kept = (rows + gained) / rows * plain_s / counted_s / self._promise
                self._trust += LEARNING * (min(kept, 2.0) - self._trust)
                self._trust = min(max(self._trust, LEAST_TRUST), 1.0)
        else:
            self._trust += FORGIVING * (1.0 - self._trust)

    def _held_lengths(
        self,
        plain_s: float,
        lengths: Ordered[int],
        models: Ordered[ModelCandidate | None],
        room: int,
    ) -> list[int] | None:
        """What was decided a few steps ago, if all is as it was: None where it has to be decided anew."""
        self._held -= 1
        if self._held < 0 or not self.is_drafting or len(models) != len(self._held_picks) or any(lengths):
            return None
        held = []
        for model, own in zip(models, self._held_picks, strict=True):
            if own and (model is None or model.late > FEW):
                return None
            held.append(0 if model is None else min(model.length, own))
        if sum(held) > room or not self._account.bears(self._expected_s - plain_s, plain_s):
            return None
        self._late_s = 0.0
        return held

    def _affordable(
        self,
        rows: int,
        plain_s: float,
        base_s: float,
        free: Ordered[float],
        lengths: Ordered[int],
        ranked: Ordered[_Ranked],
        room: int,
        length: int,
    ) -> tuple[list[int], float, float, float] | None:
        """Guesses of at most `length` for rows in which they promise more than what is there, those first whose text
        the model knows best, as far as the account and `room` go; how many of all rows' are expected to be right then,
        and what the model's cost in seconds, and catching up of it. None where it goes for no row.
        """
        wanted: list[tuple[int, int, float]] = []
        totals, lates = [], []  # of the first rows that are wanted, by how many
        total, late = sum(lengths), 0
        for own_late, index, model in ranked:
            own = model.length if model.length < length else length
            expected = model.rates.expected(own)
            if expected > free[index]:
                total += own - lengths[index]
                if own_late > FEW:
                    late += own_late
                wanted.append((index, own, expected))
                totals.append(total)
                lates.append(late)
        count = len(wanted)
        while count:
            total = totals[count - 1]
            step_s = self.times.step_s(rows, rows + total)
            assert step_s is not None
            late_s = self.drafts.late_s(lates[count - 1], plain_s, rows)
            cost_s = length * self.drafts.forward_s(count, plain_s) + max(step_s - base_s, 0.0) + late_s
            if total <= room and self._account.bears(cost_s, plain_s):
                picked, right = [0] * len(free), list(free)
                for index, own, expected in wanted[:count]:
                    picked[index], right[index] = own, expected
                return picked, sum(right), cost_s, late_s
            count //= 2
        return None

    def _trial(
        self,
        rows: int,
        plain_s: float,
        base_s: float,
        free: Ordered[float],
        lengths: Ordered[int],
        ranked: Ordered[_Ranked],
        room: int,
    ) -> tuple[list[int], float]:
        """A few guesses for rows in which nothing else is checked, to see whether the model has become good. Where it
        would have to catch up with more than the account bears, it catches up with as much as that does, to see whether
        it really takes so long: else one measurement that was far too dear would keep it from ever being tried again.
        """
        idle = [each for each in ranked if not lengths[each[1]]]
        found = self._affordable(rows, plain_s, base_s, free, lengths, idle, room, TRIAL)
        if found is not None:
            picked, _, cost_s, _ = found
        elif idle and sum(lengths) < room and (late := self._affordable_late(rows, plain_s, idle[0][0])):
            picked, cost_s = [0] * len(free), self.drafts.late_s(late, plain_s, rows)
            picked[idle[0][1]] = 1
            self.most_late = late
        else:
            return [0] * len(free), base_s
        self._num_tried = sum(length > 0 for length in picked)
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        return picked, base_s + cost_s

    def _affordable_late(self, rows: int, plain_s: float, late: int) -> int:
        """With how many of so many tokens the account bears to catch up; 0: none, or it is known what that takes."""
        while not self._account.bears(self.drafts.late_s(late, plain_s, rows), plain_s):
            late = late * 3 // 4
            if late <= FEW:
                return 0
        return 0 if late <= FEW + 1 or self.drafts.knows_late(late) else late  # one comes with any guess
