"""What a step took and what came of its guesses, as whoever decides how much is checked wants to know it.

Called by `Speculator` when a step's results are there. Plain steps alike come by the thousand: most are not reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.scheduler import Plan
    from engine.speculation.lengths import Lengths

UNTIMED: Final = 7
"""Of plain steps alike so many in a row are not timed, since timing them costs as well."""
MOSTLY: Final = 0.75
"""Of a step's tokens so many must be of prompts, that its time may tell what those take."""


@dataclass(slots=True)
class Outcome:
    """Of the step that is under way.

    Attributes:
        gained, opened: Guesses that were right, in rows that decode and of answers' first tokens.
        drafting_s: What a model took to guess before it.
        looking_s: What looking took before it, and what ended with it.
    """

    gained: int = 0
    opened: int = 0
    drafting_s: float = 0.0
    looking_s: float = 0.0


class StepReports:
    """See above."""

    def __init__(self) -> None:
        self._timed_rows = 0
        self._untimed = 0

    def is_known(self, plan: Plan) -> bool:
        """Whether a step was plain, as the last ones were, so that its time need not be learnt."""
        rows = len(plan.chunks)
        if is_plain(plan) and rows == self._timed_rows and self._untimed < UNTIMED:
            self._untimed += 1
            return True
        self._timed_rows, self._untimed = rows if is_plain(plan) else 0, 0
        return False

    def report(self, plan: Plan, outcome: Outcome, elapsed_s: float, to: Lengths) -> bool:
        """A usual step took so long, without looking. Whether at least a third of what it checked was right, but for
        first tokens.
        """
        drafting_s, gained = outcome.drafting_s, outcome.gained
        rows, tokens = plan.room.load.rows, plan.room.load.tokens
        if rows < len(plan.chunks):
            _report_prompts(plan, rows, tokens, outcome, elapsed_s, to)
        if not plan.encodings and rows == len(plan.chunks):
            has_trees = tokens > rows and any(chunk.parents is not None for chunk in plan.chunks)
            to.stepped(rows, tokens, gained, elapsed_s - drafting_s, drafting_s, has_trees=has_trees)
        elif not rows and plan.chunks and not plan.encodings:
            to.prompts(sum(chunk.count for chunk in plan.chunks), elapsed_s)
        elif drafting_s > 0.0 or tokens > rows:
            to.drafted_beside_prompts(rows, tokens, gained, drafting_s)
        return 3 * gained >= tokens - rows > 0


def is_plain(plan: Plan) -> bool:
    """Whether it decodes one token of each row, and nothing else."""
    load = plan.room.load
    return load.rows == load.tokens == len(plan.chunks) and not plan.encodings


def _report_prompts(plan: Plan, rows: int, tokens: int, outcome: Outcome, elapsed_s: float, to: Lengths) -> None:
    """A step computed prompts beside `rows` that checked `tokens`; what encoding took is no part of what is learnt."""
    opening = [chunk for chunk in plan.chunks if chunk.opens]
    guesses = sum(len(chunk.drafts) for chunk in opening)
    others = sum(chunk.count for chunk in plan.chunks) - guesses
    taken_s = None
    if plan.encoding_s is not None and others - tokens >= MOSTLY * others and outcome.drafting_s == 0.0:
        taken_s = elapsed_s - plan.encoding_s
    if opening or (taken_s is not None and tokens == rows):
        to.opened(rows + len(opening), others, guesses, outcome.opened, taken_s)
