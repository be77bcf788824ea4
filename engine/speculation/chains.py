"""How many of the guesses that were found a step checks: the twin in Python of choice.h, for sources in Python, and
where a model may guess as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from engine.speculation.branching import fitting

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from engine.speculation.account import Account
    from engine.speculation.lengths import Candidate
    from engine.speculation.step_times import StepTimes

LENGTHS: Final = (1, 3, 7, 15)
"""Lengths of drafts: rows of 2, 4, 8 and 16 tokens, so that a step's rows fall into few shapes."""
LEAST_RATE: Final = 0.2
"""Guesses that are right less often than this are not even considered."""
DOUBT: Final = 2.0
"""The account must bear so many times the part of a step's guesses that is expected to be wrong, all of it at most."""
LEAST_DOUBT: Final = 0.1


class Terms(NamedTuple):
    """What steps take, a plain one, and a look; what may be lost; tokens a second that must be promised."""

    times: StepTimes
    account: Account
    plain_s: float
    looking_s: float
    rate: float


def best(terms: Terms, rows: int, candidates: Ordered[Candidate | None], room: int) -> tuple[list[int], float]:
    """Drafts of each row, `room` in all at most, and tokens a second then; without any, what was to be promised."""
    none = [0] * len(candidates)
    plain_s = terms.plain_s
    chosen, promised = none, terms.rate
    tried = none
    for length in LENGTHS:
        lengths = _lengths(rows, candidates, length)
        if lengths == tried:
            continue
        tried, total = lengths, sum(lengths)
        if total > room:
            break
        step_s = terms.times.step_s(rows, rows + total)
        assert step_s is not None
        right = _right(candidates, lengths)
        if not terms.account.bears(doubt(right, total) * (step_s - plain_s), plain_s):
            continue  # more may be cheaper: not every width was measured
        rate = (rows + right) / (step_s + terms.looking_s)
        if rate > promised:
            chosen, promised = lengths, rate
    if chosen is not none:
        shortened = _without_waste(terms, rows, candidates, chosen, promised)
        if shortened != chosen and (rate := _rate(terms, rows, candidates, shortened)) > promised:
            chosen, promised = shortened, rate
    return chosen, promised


def _rate(terms: Terms, rows: int, candidates: Ordered[Candidate | None], lengths: Ordered[int]) -> float:
    """Tokens a second that are expected where so many guesses of each row are checked."""
    step_s = terms.times.step_s(rows, rows + sum(lengths))
    assert step_s is not None
    return (rows + _right(candidates, lengths)) / (step_s + terms.looking_s)


def _lengths(rows: int, candidates: Ordered[Candidate | None], longest: int) -> list[int]:
    """What each row would check if `longest` were the limit. Alone, a row's length need not fit any other's."""
    lengths = []
    for candidate in candidates:
        if candidate is None or candidate.rates.first < LEAST_RATE:
            lengths.append(0)
        else:
            lengths.append(fitting(candidate.length, longest, LENGTHS, rows))
    return lengths


def _without_waste(
    terms: Terms, rows: int, candidates: Ordered[Candidate | None], lengths: list[int], rate: float
) -> list[int]:
    """Shorten drafts whose last tokens cost more time than they bring."""
    total = sum(lengths)
    step_s = terms.times.step_s(rows, rows + total)
    if not total or step_s is None:
        return lengths
    least = max(step_s - terms.plain_s, 0.0) / total * rate  # right guesses that one more draft must bring
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


def doubt(right: float, total: int) -> float:
    """Which part of what a step takes longer the account must bear, where so many of its guesses will be right."""
    return min(max(DOUBT * (1.0 - right / total), LEAST_DOUBT), 1.0)


def _right(candidates: Ordered[Candidate | None], lengths: Ordered[int]) -> float:
    """How many of so many guesses are expected to be right."""
    return sum(
        candidate.rates.expected(own)
        for candidate, own in zip(candidates, lengths, strict=True)
        if candidate is not None and own
    )
