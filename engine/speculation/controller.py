"""How many drafts a step checks, or none: whatever yields the most tokens a second by what was measured here.

    rate(k) = (rows + guesses of length k expected to be right) / (time of a step with so many tokens + of looking)

Drafting must promise to beat plain steps by `MARGIN` to begin and by `STAY` (see `prices`) to go on. What
really came of it is watched besides: promises that were not kept lower the trust in later ones, so that more must be
promised; trust comes back slowly while nothing is drafted. And an account is kept (`engine.speculation.account`), from
which looking for guesses is paid too, and what a device that runs ahead of its results stands idle for that: nothing is
checked, and nobody looks, where it would not bear that `chains.DOUBT` times as many guesses are wrong as are expected
to be.

All times are measured here, those of steps without the looking before them: a plain step needs none.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from engine.speculation.acceptance import Rates
from engine.speculation.account import SURPRISE, Account
from engine.speculation.branching import Branching
from engine.speculation.chains import LENGTHS, Terms, best, doubt
from engine.speculation.lengths import NO_NEEDS, Candidate, Chooser, Offer
from engine.speculation.model_lengths import ModelCandidate, ModelLengths
from engine.speculation.opening import Openings, worth
from engine.speculation.prices import MARGIN, STAY, Prices, prices_of
from engine.speculation.step_times import WAITING, StepTimes
from engine.step_costs import size_class

REFRESH: Final = 128
"""After so many verifying steps one without drafts is taken, to know what that costs now."""
MODEL_REFRESH: Final = 24
"""The same where a model guesses, which gains less by a step: what a machine made of plain steps a while ago must not
have it guess for long.
"""
OFTEN: Final = 16
"""The same for each tenth that is promised above plain steps: where little is, an old figure soon is too old."""
LEARNING: Final = 0.03
"""What one verifying step counts in trust: little, as right guesses come in runs."""
FORGIVING: Final = 1 / 512
"""What one step without drafts gives back of it."""
LEAST_TRUST: Final = 0.25
LOOK_LEARNING: Final = 0.3
"""What one look counts in how long the next is expected to take."""
COLD_S: Final = 5e-5
"""So much longer steps with drafts of one sequence take at first, while the processor's caches know nothing of what
checking them needs; else short steps would seem to pay too little for ever being taken again.
"""
LOOKING: Final = 0.006
"""Part of the time of steps that looking for guesses may take while none is found to be worth checking: less than the
account's allowance, so that something is left for what is found.
"""
FIRST_CREDIT: Final = 8.0
MOST_CREDIT: Final = 32.0
SHARE: Final = 0.25
"""See `Account`. Many guesses are tried before all credit is gone."""
LEAST: Final = 1.0
LEAST_AHEAD: Final = 4.0
"""See `Account`; the latter where plain steps run ahead. A check of all rows takes several of those there, as they hide
what the host does: were it not borne, a few rows would be checked at a time, for nearly as much.
"""
STAKE: Final = 1.0
STAKE_EVERY: Final = 64
"""So much, in plain steps, an answer may lose that may repeat an earlier one, whatever was lost before: a camera that
stands still is noticed in the first answer that repeats. Once in so many steps, and in `MOST_STAKE_EVERY` at last where
that was in vain.
"""
MOST_STAKE_EVERY: Final = 512
SAVED: Final = 256
"""Of so many steps at most, where nobody looked: credit is counted in steps."""
AT_ONCE: Final = 1.25
"""What a token is worth that comes with the first of its answer, in the time that it would take at best later: no step
of others keeps it waiting.
"""
DECIDING: Final = 0.15
MOSTLY: Final = 0.3
"""What one decision counts in whether guesses have been checked of late, and which part of them must have been."""
NOTHING: Final = Offer(NO_NEEDS, NO_NEEDS, 0.0, 0.0)
"""Where it is not known what steps take."""
FREE_LOOKS: Final = 2
"""Where guesses were checked just now, so many looks in vain are free: a text seldom departs for long."""


@dataclass(slots=True)
class _Watch:
    """How far promises hold at one row count, and what the last one was: tokens a second over those of plain steps.
    `waiting`: how long the device stands idle where results are waited for, in plain steps.
    """

    is_drafting: bool = False
    promise: float = 1.0
    trust: float = 1.0
    waiting: float = WAITING


class Controller:
    """See `Lengths`.

    Args:
        model_cost, late_cost: See `Drafter.cost`; None where no model guesses. See `Drafter.late_cost`; None: the same.
        waits: See `StepTimes`.
    """

    is_thrifty = True

    def __init__(self, model_cost: float | None = None, late_cost: float | None = None, *, waits: bool = False) -> None:
        self.times = StepTimes(waits=waits)
        self._branching = Branching(self.times, LENGTHS)
        self.models = None
        if model_cost is not None:
            self.models = ModelLengths(self.times, model_cost, model_cost if late_cost is None else late_cost)
        self._account = Account(FIRST_CREDIT, MOST_CREDIT, SHARE, LEAST_AHEAD if waits else LEAST)
        self._openings = Openings(self.times)
        self._looking_s = 0.0
        self._drafting = 0.0  # part of the newest decisions that were for guesses
        self._saved = 0.0
        self._unpaid = 0
        self._unstaked = self._stake_every = STAKE_EVERY
        self._priced: dict[int, Prices] = {}
        self._watches: dict[int, _Watch] = {}

    def knows(self, rows: int) -> bool:
        """See `Lengths.knows`."""
        return self._prices(rows) is not None

    def may_draft(self, rows: int, *, is_expected: bool) -> bool:
        """See `Lengths.may_draft`."""
        self.passed(1)
        if not is_expected and self._saved < 0.0:
            return False
        prices = self._prices(rows)
        if prices is None:
            return False
        self._pay_in(prices.plain_s)
        if self.models is not None and self.models.is_drafting and self.times.plain_age(rows) >= MODEL_REFRESH:
            return False  # nobody need look before a plain step that is taken for its time
        return self._is_borne(prices, is_expected=is_expected)

    def _is_borne(self, prices: Prices, *, is_expected: bool) -> bool:
        """Whether the account bears a look and what it finds; if not, nobody need ask before it does."""
        cost_s = self._looking_s + prices.draft_s  # what cannot be checked is looked for in vain
        missing = self._account.steps_until(cost_s, prices.plain_s)
        if missing and not is_expected:
            self._saved = min(self._saved, -missing)
        return not missing

    def stake(self, rows: int) -> None:
        """See `Lengths.stake`."""
        prices = self._prices(rows)
        if prices is not None and self._unstaked >= self._stake_every:
            is_lost = self._account.left_s(prices.plain_s) < 0.0
            self._stake_every = min(2 * self._stake_every, MOST_STAKE_EVERY) if is_lost else STAKE_EVERY
            self._unstaked = 0
            self._account.stake(STAKE, prices.plain_s)

    def passed(self, num_steps: int) -> None:
        """See `Lengths.passed`."""
        self._saved = min(self._saved + num_steps, SAVED)
        self._unpaid += num_steps

    def needs(self, rows: int) -> array[float]:
        """See `Lengths.needs`."""
        prices, watch = self._prices(rows), self._watches.get(size_class(rows))
        if prices is None:
            return NO_NEEDS
        return prices.to_stay if watch is not None and watch.is_drafting else prices.to_begin

    def offer(self, rows: int, num_steps: int, *, is_expected: bool) -> Offer | None:
        """See `Lengths.offer`."""
        self.passed(num_steps)
        prices = self._prices(rows)
        if prices is None:
            return NOTHING
        self._pay_in(prices.plain_s)
        watch = self._watch(rows)
        is_borne = (is_expected or self._saved >= 0.0) and self._is_borne(prices, is_expected=is_expected)
        is_open = is_borne and self.times.plain_age(rows) < _refresh(watch.promise)
        return self._offer(rows, prices, watch, is_open=is_open)

    def _offer(self, rows: int, prices: Prices, watch: _Watch, *, is_open: bool = True) -> Offer:
        needs = prices.to_stay if watch.is_drafting else prices.to_begin
        if not is_open:
            return Offer(needs, prices.steps, prices.plain_s, self._looking_s)
        credit_s = self._account.stake_s(prices.plain_s)
        rate = self._least_rate(rows, prices.plain_s, watch)
        return Offer(needs, prices.steps, prices.plain_s, self._looking_s, credit_s, rate)

    def answered(self, rows: int, total: int, rate: float, looking_s: float) -> None:
        """See `Lengths.answered`."""
        plain_s, watch = self._priced[rows].plain_s, self._watches[size_class(rows)]
        watch.is_drafting = self._decided(is_drafting=total > 0)
        watch.promise = rate * plain_s / rows
        self._pay_look(plain_s, rows, looking_s, found=total > 0)

    def spent(self, rows: int, elapsed_s: float) -> None:
        """See `Lengths.spent`."""
        plain_s = self.times.plain_s(rows) or self.times.plain_s(1)
        if plain_s is not None:
            self._account.settle(-elapsed_s, plain_s)

    def may_remember(self, rows: int) -> bool:
        """See `Lengths.may_remember`."""
        prices = self._prices(rows) or self._prices(1)
        if prices is None:
            return True
        self._pay_in(prices.plain_s)
        return self._account.left_s(prices.plain_s) >= 0.0

    def looked(self, rows: int, elapsed_s: float, *, found: bool) -> None:
        """See `Lengths.looked`."""
        self._pay_look(self.times.plain_s(rows), rows, elapsed_s, found=found)

    def _pay_look(self, plain_s: float | None, rows: int, elapsed_s: float, *, found: bool) -> None:
        """Looks in vain are made only as often as steps have saved their time."""
        usual_s = min(elapsed_s, 2 * self._looking_s + 1e-5 * rows)  # not what a busy machine made of it
        self._looking_s += LOOK_LEARNING * (usual_s - self._looking_s)
        if plain_s is None:
            return
        self._account.settle(-usual_s, plain_s)
        price = self._looking_s / (LOOKING * plain_s)  # so many steps save as much
        self._saved = max(self._saved, FREE_LOOKS * price) if found else max(self._saved - price, -price)

    def waited(self, rows: int, elapsed_s: float) -> None:
        """See `Lengths.waited`."""
        plain_s = self.times.plain_s(rows)
        if plain_s is not None:
            watch = self._watch(rows)
            # Not what a busy machine made of it.
            usual = min(max(elapsed_s / plain_s - 1.0, 0.0), 2 * watch.waiting + 0.01)
            watch.waiting += LOOK_LEARNING * (usual - watch.waiting)
            self._account.settle(-usual * plain_s, plain_s)

    def may_wait(self, rows: int, *, is_expected: bool, is_renewing: bool) -> bool:
        """See `Lengths.may_wait`."""
        prices, watch = self._prices(rows), self._watch(rows)
        if prices is None or not prices.may_pay or (self._saved < -1.0 and not is_expected):
            return False
        if not is_renewing and self.times.plain_age(rows) >= _refresh(watch.promise):
            return False  # a plain step is due, and this one runs ahead
        self._pay_in(prices.plain_s)
        cost_s = watch.waiting * prices.plain_s + self._looking_s + prices.draft_s
        return not self._account.steps_until(cost_s, prices.plain_s)

    def waiting(self, rows: int) -> float:
        """See `Lengths.waiting`."""
        return self._watch(rows).waiting

    def promised(self, rows: int, candidates: Ordered[Candidate | None]) -> float:
        """See `Lengths.promised`."""
        prices, watch = self._prices(rows), self._watch(rows)
        if prices is None:
            return 1.0
        lengths, rate = self._best(rows, candidates, sys.maxsize, prices, watch)
        return rate * prices.plain_s / rows * watch.trust * self._branching.lift(rows) if any(lengths) else 1.0

    def promised_by(self, chooser: Chooser, rows: int) -> float | None:
        """See `Lengths.promised_by`."""
        prices, watch = self._prices(rows), self._watch(rows)
        if prices is None:
            return 1.0
        total, rate = chooser(rows, self._offer(rows, prices, watch), rows * LENGTHS[-1])
        return rate * prices.plain_s / rows * watch.trust * self._branching.lift(rows) if total else 1.0

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """See `Lengths.choose`."""
        prices, watch = self._prices(rows), self._watch(rows)
        if prices is None or self.times.plain_age(rows) >= _refresh(watch.promise):
            return [0] * len(candidates)
        chosen, rate = self._best(rows, candidates, room, prices, watch)
        watch.is_drafting = self._decided(is_drafting=any(chosen))
        watch.promise = rate * prices.plain_s / rows
        return chosen

    def _best(
        self, rows: int, candidates: Ordered[Candidate | None], room: int, prices: Prices, watch: _Watch
    ) -> tuple[list[int], float]:
        """Drafts of each row, and tokens a second then."""
        rate = self._least_rate(rows, prices.plain_s, watch)
        terms = Terms(self.times, self._account, prices.plain_s, self._looking_s, rate)
        return best(terms, rows, candidates, room)

    def choose_by(self, chooser: Chooser, rows: int, room: int) -> bool | None:
        """See `Lengths.choose_by`."""
        prices, watch = self._prices(rows), self._watch(rows)
        if prices is None or self.times.plain_age(rows) >= _refresh(watch.promise):
            return False
        total, rate = chooser(rows, self._offer(rows, prices, watch), room)
        watch.is_drafting = self._decided(is_drafting=total > 0)
        watch.promise = rate * prices.plain_s / rows
        return watch.is_drafting

    def may_ask_model(self, rows: int, rates: Rates) -> bool:
        """See `Lengths.may_ask_model`."""
        return (
            self.models is not None and self.times.plain_age(rows) < MODEL_REFRESH and self.models.may_ask(rows, rates)
        )

    def choose_model(
        self,
        rows: int,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        models: Ordered[ModelCandidate | None],
        room: int,
    ) -> list[int]:
        """See `Lengths.choose_model`."""
        if self.models is None:
            return [0] * len(models)
        free = [
            0.0 if candidate is None or not length else candidate.rates.expected(length)
            for candidate, length in zip(candidates, lengths, strict=True)
        ]
        return self.models.choose(rows, free, lengths, models, room)

    @property
    def most_late(self) -> int:
        """See `Lengths.most_late`."""
        return sys.maxsize if self.models is None else self.models.most_late

    def guessed(self, rows: int, late: int, num_forwards: int, first_s: float, others_s: float) -> None:
        """See `Lengths.guessed`."""
        if self.models is not None:
            self.models.drafts.add(rows, late, num_forwards, first_s, others_s)

    def prompts(self, tokens: int, elapsed_s: float) -> None:
        """See `Lengths.prompts`."""
        if self.models is not None:
            self.models.drafts.add_prompt(tokens, elapsed_s)

    def may_open(self, rows: int) -> bool:
        """See `Lengths.may_open`."""
        prices = self._prices(rows) or self._prices(1)
        return prices is not None and self._account.left_s(prices.plain_s) > 0.0

    def open(self, rows: int, prompt: int, gains: Ordered[float], looking_s: float) -> int:
        """See `Lengths.open`."""
        rows = rows if self._prices(rows) is not None else 1
        prices, draft_s = self._prices(rows), self._openings.draft_s(prompt)
        if prices is None:
            return 0
        plain_s = prices.plain_s
        self._account.settle(-looking_s, plain_s)
        if draft_s is None or not gains:
            return 0
        token_s = plain_s / rows
        length = worth(gains, draft_s, min(token_s, AT_ONCE * self._openings.later_s(rows, gains, self._looking_s)))
        right, cost_s = sum(gains[:length]), length * draft_s
        if not length or right * token_s < MARGIN * cost_s:
            return 0
        return length if self._account.bears(doubt(right, length) * cost_s, plain_s) else 0

    def opened(self, rows: int, tokens: int, guesses: int, gained: int, elapsed_s: float | None) -> None:
        """See `Lengths.opened`."""
        if not guesses:
            if elapsed_s is not None:
                self._openings.add_prompt(tokens, elapsed_s)
            return
        if elapsed_s is not None:
            self._openings.add(tokens, guesses, elapsed_s)
        rows = rows if self.times.plain_s(rows) is not None else 1
        plain_s, draft_s = self.times.plain_s(rows), self._openings.draft_s(tokens)
        if plain_s is not None and draft_s is not None:
            self._account.settle(gained * plain_s / rows - guesses * draft_s, plain_s)

    def may_branch(self, rows: int) -> bool:
        """See `Lengths.may_branch`."""
        return self._branching.may_branch(rows)

    def made_trees(self, rows: int, elapsed_s: float) -> None:
        """See `Lengths.made_trees`."""
        self._branching.made(rows, elapsed_s)

    def branch(
        self,
        candidates: Ordered[Candidate | None],
        lengths: Ordered[int],
        gains: Ordered[Ordered[float] | None],
        room: int,
    ) -> list[int] | None:
        """See `Lengths.branch`."""
        rows = len(lengths)
        chains = [
            candidate.rates.expected(length) if candidate is not None and length else 0.0
            for candidate, length in zip(candidates, lengths, strict=True)
        ]
        chosen, plain_s = self._branching.choose(lengths, chains, gains, room), self.times.plain_s(rows)
        if chosen is None or plain_s is None:
            return None
        widths, rate = chosen
        self._watches[size_class(rows)].promise = rate * plain_s / rows
        return widths

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
        """See `Lengths.stepped`."""
        if elapsed_s <= 0.0:
            return
        if self.models is not None:
            self.models.stepped(rows, tokens, gained, elapsed_s, drafting_s, is_pure=True)
        plain_s = self.times.plain_s(rows)
        if drafting_s > 0.0:  # what had been promised without the model is not what came
            if plain_s is not None:  # looking was paid from this account; what a model loses is counted in its own
                saved_s = (rows + gained) / rows * plain_s - elapsed_s - drafting_s
                self._account.settle(max(saved_s, 0.0), plain_s)
            self.times.add(rows, tokens, elapsed_s)
            return
        if tokens == rows or plain_s is None:
            self.times.add(rows, tokens, elapsed_s)
            watch = self._watches.get(size_class(rows))
            if watch is not None:
                watch.trust += FORGIVING * (1.0 - watch.trust)
        else:
            self._checked(rows, tokens, gained, elapsed_s, plain_s, has_trees=has_trees)

    def _checked(
        self, rows: int, tokens: int, gained: int, elapsed_s: float, plain_s: float, *, has_trees: bool
    ) -> None:
        """A step has checked guesses of sources."""
        worth_s = (rows + gained) / rows * plain_s
        is_known = self.times.is_known_well(rows, tokens)
        if has_trees:
            self.times.add_tree(rows, tokens, elapsed_s)
        elif rows == 1 and not is_known:
            self.times.add(rows, tokens, max(elapsed_s - COLD_S, plain_s))
        else:
            self.times.add(rows, tokens, elapsed_s)
        # By the medians of both: what a busy machine adds to a step is no fault of its drafts.
        usual_s = self.times.tree_s(rows, tokens) if has_trees else self.times.step_s(rows, tokens)
        assert usual_s is not None
        watch = self._watches.get(size_class(rows))
        if watch is not None:
            kept = worth_s / elapsed_s / watch.promise
            watch.trust = min(max(watch.trust + LEARNING * (min(kept, 2.0) - watch.trust), LEAST_TRUST), 1.0)
        is_measured = is_known or self.times.is_measured(rows, tokens)
        taken_s = usual_s if is_measured else min(elapsed_s, SURPRISE * usual_s)
        self._account.settle(worth_s - taken_s, plain_s)

    def drafted_beside_prompts(self, rows: int, tokens: int, gained: int, drafting_s: float) -> None:
        """See `Lengths.drafted_beside_prompts`."""
        plain_s, step_s = self.times.plain_s(rows), self.times.step_s(rows, tokens)
        if drafting_s > 0.0:
            if self.models is not None:
                self.models.stepped(rows, tokens, gained, 0.0, drafting_s, is_pure=False)
        elif plain_s is not None and step_s is not None:
            self._account.settle((rows + gained) / rows * plain_s - step_s, plain_s)

    def _least_rate(self, rows: int, plain_s: float, watch: _Watch) -> float:
        """Tokens a second that chains must promise."""
        margin = STAY if watch.is_drafting else MARGIN
        return rows * margin / (plain_s * watch.trust * self._branching.lift(rows))

    @property
    def is_drafting(self) -> bool:
        """See `Lengths.is_drafting`."""
        return self._drafting >= MOSTLY

    def _decided(self, *, is_drafting: bool) -> bool:
        self._drafting += DECIDING * (is_drafting - self._drafting)
        return is_drafting

    def _watch(self, rows: int) -> _Watch:
        watch = self._watches.get(size_class(rows))
        if watch is None:
            watch = self._watches[size_class(rows)] = _Watch()
        return watch

    def _pay_in(self, plain_s: float) -> None:
        """For the steps that went by since it was done last."""
        self._account.pay_in(plain_s, self._unpaid)
        self._unstaked += self._unpaid
        self._unpaid = 0

    def _prices(self, rows: int) -> Prices | None:
        """What steps of so many rows take; None while that is not known."""
        known = self._priced.get(rows)
        if known is not None and known.version == self.times.version:
            return known
        found = prices_of(self.times, rows, self._looking_s)
        if found is not None:
            self._priced[rows] = found
        return found


def _refresh(promise: float) -> float:
    """After so many steps with drafts a plain one is taken."""
    return min(max(10 * (promise - 1.0), 1.0) * OFTEN, REFRESH)
