"""What steps of one row count take, and what guesses must bring there: made anew when something new was measured."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from engine.speculation.step_times import StepTimes

PRICED: Final = (1, 2, 3, 5, 7, 11, 15)
"""Numbers of guesses a row for which prices are made, those between being on straight lines: about as many as there are
figures of what steps take.
"""
MARGIN: Final = 1.1
"""Drafting must promise so many times the tokens a second of plain steps to begin, and `STAY` to go on."""
STAY: Final = 1.04
DEAR_LOOK: Final = 0.1
"""Before a look it is not taken to be dearer than this part of a plain step: only looks tell what they take."""


class Prices(NamedTuple):
    """Of steps of one row count, in seconds: a plain one, what one draft adds, and by number of drafts as of an
    `Offer`; `Lengths.needs` to begin and to go on; whether any check could pay, were all guesses right.
    """

    version: int
    plain_s: float
    draft_s: float
    steps: array[float]
    to_begin: array[float]
    to_stay: array[float]
    may_pay: bool


def prices_of(times: StepTimes, rows: int, looking_s: float) -> Prices | None:
    """None while it is not known what such steps take. `looking_s`: what a look takes."""
    plain_s, one_s = times.plain_s(rows), times.step_s(rows, rows + 1)
    if plain_s is None or one_s is None:
        return None
    steps, to_begin, to_stay = array("d"), array("d"), array("d")
    for count in (1, max(rows // 2, 1), *(rows * length for length in PRICED)):
        step_s = times.step_s(rows, rows + count)
        assert step_s is not None
        steps.extend((count, step_s))
        by_plain = (step_s + min(looking_s, DEAR_LOOK * plain_s)) / plain_s
        to_begin.extend((count, rows * (MARGIN * by_plain - 1.0)))
        to_stay.extend((count, rows * (STAY * by_plain - 1.0)))
    may_pay = any(right <= count for count, right in zip(to_begin[::2], to_begin[1::2], strict=True))
    return Prices(times.version, plain_s, max(one_s - plain_s, 0.0), steps, to_begin, to_stay, may_pay)
