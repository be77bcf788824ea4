"""How many drafts a step checks, or none: whatever yields the most tokens a second by what was measured here.

    rate(k) = (rows + guesses of length k expected to be right) / (time of a step with so many tokens + of looking)

Drafting must promise to beat plain steps by `MARGIN` to begin and by `STAY` to go on. What really came of it is watched
besides: promises that were not kept lower the trust in later ones, so that more must be promised; trust comes back
slowly while nothing is drafted. And an account is kept (`engine.speculation.account`), from which looking for guesses
is paid too, and what a device that runs ahead of its results stands idle for that: nothing is checked, and nobody
looks, where it would not bear that `DOUBT` times as many guesses are wrong as are expected to be.

All times are measured here, those of steps without the looking before them: a plain step needs none.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.speculation.acceptance import Rates
from engine.speculation.account import SURPRISE, Account
from engine.speculation.branching import Branching, fitting
from engine.speculation.lengths import NO_NEEDS, Candidate, Chooser, Offer
from engine.speculation.model_lengths import ModelCandidate, ModelLengths
from engine.speculation.opening import Openings, worth
from engine.speculation.step_times import WAITING, StepTimes
from engine.step_costs import size_class

LENGTHS: Final = (1, 3, 7, 15)
"""Lengths of drafts: rows of 2, 4, 8 and 16 tokens, so that a step's rows fall into few shapes."""
PRICED: Final = (1, 2, 3, 5, 7, 11, 15)
"""Numbers of guesses a row for which prices are made, those between being on straight lines: about as many as there are
figures of what steps take.
"""
MARGIN: Final = 1.1
STAY: Final = 1.04
LEAST_RATE: Final = 0.2
"""Guesses that are right less often than this are not even considered."""
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
DEAR_LOOK: Final = 0.1
"""Before a look it is not taken to be dearer than this part of a plain step: only looks tell what they take."""
LOOKING: Final = 0.006
"""Part of the time of steps that looking for guesses may take while none is found to be worth checking: less than the
account's allowance, so that something is left for what is found.
"""
WAITS: Final = 0.005
"""Part of the time of steps that a device may stand idle so that guesses can be looked for while none is found to be
worth checking: less than the account's allowance, for the same reason.
"""
PLENTY: Final = 4.0
"""With so many plain steps in the account waiting is free to be dearer."""
LONG_REST: Final = 256
"""So many steps lie between two that wait where nothing could pay, were all guesses right, or could not be borne."""
FIRST_CREDIT: Final = 8.0
MOST_CREDIT: Final = 32.0
SHARE: Final = 0.25
"""See `Account`. Many guesses are tried before all credit is gone."""
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
DOUBT: Final = 2.0
"""The account must bear so many times the part of a step's guesses that is expected to be wrong, all of it at most."""
LEAST_DOUBT: Final = 0.1
NOTHING: Final = Offer(NO_NEEDS, NO_NEEDS, 0.0, 0.0, 0.0, math.inf)
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


class _Prices(NamedTuple):
    """Of steps of one row count, in seconds: a plain one, what one draft adds, and by number of drafts as for a
    `Chooser`; `Lengths.needs` to begin and to go on; whether any check could pay, were all guesses right.
    """

    version: int
    plain_s: float
    draft_s: float
    steps: array[float]
    to_begin: array[float]
    to_stay: array[float]
    may_pay: bool


class Controller:
    """See `Lengths`.

    Args:
        model_cost, late_cost: See `Drafter.cost`; None where no model guesses. See `Drafter.late_cost`; None: the same.
        waits: See `StepTimes`.
    """

    def __init__(self, model_cost: float | None = None, late_cost: float | None = None, *, waits: bool = False) -> None:
        self.times = StepTimes(waits=waits)
        self._branching = Branching(self.times, LENGTHS)
        self.models = None
        if model_cost is not None:
            self.models = ModelLengths(self.times, model_cost, model_cost if late_cost is None else late_cost)
        self._account = Account(FIRST_CREDIT, MOST_CREDIT, SHARE)
        self._openings = Openings(self.times)
        self._looking_s = 0.0
        self._saved = 0.0
        self._unpaid = 0
        self._unstaked = self._stake_every = STAKE_EVERY
        self._priced: dict[int, _Prices] = {}
        self._watches: dict[int, _Watch] = {}

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
        plain_s, account = prices.plain_s, self._account
        self._pay_in(plain_s)
        watch = self._watches.get(size_class(rows))
        if watch is None:
            watch = self._watches[size_class(rows)] = _Watch()
        needs, least = (prices.to_stay, STAY) if watch.is_drafting else (prices.to_begin, MARGIN)
        offer = Offer(needs, prices.steps, plain_s, self._looking_s, 0.0, math.inf)
        if is_expected or self._saved >= 0.0:
            missing = account.steps_until(self._looking_s + prices.draft_s, plain_s)
            if missing and not is_expected:
                self._saved = min(self._saved, -missing)
            if not missing and self.times.plain_age(rows) < _refresh(watch.promise):
                offer.rate = rows * least / (plain_s * watch.trust)
                offer.credit_s = account.stake_s(plain_s)
        return offer

    def answered(self, rows: int, total: int, rate: float, looking_s: float) -> None:
        """See `Lengths.answered`."""
        plain_s, watch = self._priced[rows].plain_s, self._watches[size_class(rows)]
        watch.is_drafting, watch.promise = total > 0, rate * plain_s / rows
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
            watch = self._watches.setdefault(size_class(rows), _Watch())
            # Not what a busy machine made of it.
            usual = min(max(elapsed_s / plain_s - 1.0, 0.0), 2 * watch.waiting + 0.01)
            watch.waiting += LOOK_LEARNING * (usual - watch.waiting)
            self._account.settle(-usual * plain_s, plain_s)

    def rest(self, rows: int) -> float:
        """See `Lengths.rest`."""
        prices = self._prices(rows)
        if prices is None:
            return 0.0
        plain_s = prices.plain_s
        self._pay_in(plain_s)
        watch = self._watches.get(size_class(rows))
        waiting = WAITING if watch is None else watch.waiting
        cost_s = waiting * plain_s + self._looking_s + prices.draft_s
        if not prices.may_pay or self._account.steps_until(cost_s, plain_s):
            return LONG_REST
        return 0.0 if self._account.left_s(plain_s) >= PLENTY * plain_s else min(waiting / WAITS, LONG_REST)

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        """See `Lengths.choose`."""
        none = [0] * len(candidates)
        prices = self._prices(rows)
        watch = self._watches.setdefault(size_class(rows), _Watch())
        if prices is None or self.times.plain_age(rows) >= _refresh(watch.promise):
            return none
        plain_s = prices.plain_s
        best, best_rate = none, rows / plain_s * (STAY if watch.is_drafting else MARGIN) / watch.trust
        tried = none
        for length in LENGTHS:
            lengths = self._lengths(rows, candidates, length)
            if lengths == tried:
                continue
            tried, total = lengths, sum(lengths)
            if total > room:
                break
            step_s = self.times.step_s(rows, rows + total)
            assert step_s is not None
            right = _right(candidates, lengths)
            doubt = min(max(DOUBT * (1.0 - right / total), LEAST_DOUBT), 1.0)
            if not self._account.bears(doubt * (step_s - plain_s), plain_s):
                continue  # more may be cheaper: not every width was measured
            rate = (rows + right) / (step_s + self._looking_s)
            if rate > best_rate:
                best, best_rate = lengths, rate
        watch.is_drafting = best is not none
        if watch.is_drafting:
            shortened = self._without_waste(rows, candidates, best, plain_s, best_rate)
            if shortened != best and (rate := self._rate(rows, candidates, shortened)) > best_rate:
                best, best_rate = shortened, rate
        watch.promise = best_rate * plain_s / rows
        return best

    def choose_by(self, chooser: Chooser, rows: int, room: int) -> bool | None:
        """See `Lengths.choose_by`."""
        prices = self._prices(rows)
        watch = self._watches.setdefault(size_class(rows), _Watch())
        if prices is None or self.times.plain_age(rows) >= _refresh(watch.promise):
            return False
        plain_s = prices.plain_s
        least_rate = rows * (STAY if watch.is_drafting else MARGIN) / (plain_s * watch.trust)
        stake_s = self._account.stake_s(plain_s)
        total, rate = chooser(rows, prices.steps, plain_s, self._looking_s, stake_s, least_rate, room)
        watch.is_drafting, watch.promise = total > 0, rate * plain_s / rows
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
        length = worth(gains, draft_s, min(token_s, AT_ONCE * self._later_s(rows, gains)))
        right, cost_s = sum(gains[:length]), length * draft_s
        if not length or right * token_s < MARGIN * cost_s:
            return 0
        doubt = min(max(DOUBT * (1.0 - right / length), LEAST_DOUBT), 1.0)
        return length if self._account.bears(doubt * cost_s, plain_s) else 0

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

    def _pay_in(self, plain_s: float) -> None:
        """For the steps that went by since it was done last."""
        self._account.pay_in(plain_s, self._unpaid)
        self._unstaked += self._unpaid
        self._unpaid = 0

    def _prices(self, rows: int) -> _Prices | None:
        """What steps of so many rows take; None while that is not known."""
        known = self._priced.get(rows)
        if known is not None and known.version == self.times.version:
            return known
        plain_s, one_s = self.times.plain_s(rows), self.times.step_s(rows, rows + 1)
        if plain_s is None or one_s is None:
            return None
        steps, to_begin, to_stay = array("d"), array("d"), array("d")
        for count in (1, max(rows // 2, 1), *(rows * length for length in PRICED)):
            step_s = self.times.step_s(rows, rows + count)
            assert step_s is not None
            steps.extend((count, step_s))
            times = (step_s + min(self._looking_s, DEAR_LOOK * plain_s)) / plain_s
            to_begin.extend((count, rows * (MARGIN * times - 1.0)))
            to_stay.extend((count, rows * (STAY * times - 1.0)))
        draft_s = max(one_s - plain_s, 0.0)
        may_pay = any(right <= count for count, right in zip(to_begin[::2], to_begin[1::2], strict=True))
        known = self._priced[rows] = _Prices(self.times.version, plain_s, draft_s, steps, to_begin, to_stay, may_pay)
        return known

    def _later_s(self, rows: int, gains: Ordered[float]) -> float:
        """What a token takes at best that comes after the first, where guesses are as right then as `gains` say."""
        right = gains[-1] ** (1.0 / len(gains))
        rates, least = Rates(right, right), float("inf")
        for length in LENGTHS:
            step_s = self.times.step_s(rows, rows + rows * length)
            assert step_s is not None
            least = min(least, (step_s + self._looking_s) / (rows * (1.0 + rates.expected(length))))
        return least

    def _rate(self, rows: int, candidates: Ordered[Candidate | None], lengths: Ordered[int]) -> float:
        """Tokens a second that are expected where so many guesses of each row are checked."""
        step_s = self.times.step_s(rows, rows + sum(lengths))
        assert step_s is not None
        return (rows + _right(candidates, lengths)) / (step_s + self._looking_s)

    def _lengths(self, rows: int, candidates: Ordered[Candidate | None], longest: int) -> list[int]:
        """What each row would check if `longest` were the limit. Alone, a row's length need not fit any other's."""
        lengths = []
        for candidate in candidates:
            if candidate is None or candidate.rates.first < LEAST_RATE:
                lengths.append(0)
            else:
                lengths.append(fitting(candidate.length, longest, LENGTHS, rows))
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
                more = candidate.rates.expected(length) - candidate.rates.expected(shorter)
                if more >= least * (length - shorter):
                    break
                length = shorter
            shortened.append(length)
        return shortened


def _refresh(promise: float) -> float:
    """After so many steps with drafts a plain one is taken."""
    return min(max(10 * (promise - 1.0), 1.0) * OFTEN, REFRESH)


def _right(candidates: Ordered[Candidate | None], lengths: Ordered[int]) -> float:
    """How many of so many guesses are expected to be right."""
    return sum(
        candidate.rates.expected(own)
        for candidate, own in zip(candidates, lengths, strict=True)
        if candidate is not None and own
    )
