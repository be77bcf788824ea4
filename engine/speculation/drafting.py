"""What the sources of drafts share: a proposal, and what each source keeps for one sequence.

A `Drafting` lives and dies with its sequence, so all of it is bounded by what a sequence may be.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.tree import NO_DRAFTS, Drafts

if TYPE_CHECKING:
    from engine.sequence import Sequence
    from engine.speculation.merge import DraftTree
    from engine.speculation.told import Told


class Kind(enum.Enum):
    """Who guesses, and how sure that one is: kinds are believed apart. Rates are what is believed at first."""

    NGRAM_SHORT = 0.30, 0.60, "ngram"
    """Two or three tokens stood before it the last time too."""
    NGRAM_LONG = 0.60, 0.80, "ngram"
    """Four or more."""
    NGRAM_OLDER = 0.20, 0.60, "ngram"
    """The time before that it went on otherwise."""
    ECHO = 0.80, 0.90, "echo"
    """The answer has followed an earlier one up to here."""
    ECHO_ASTRAY = 0.30, 0.80, "echo"
    """It has left the earlier one just now, or nobody else says so."""
    GRAMMAR = 0.90, 0.90, "grammar"
    """The grammar leaves no choice."""
    HABIT = 0.70, 0.70, "habit"
    """Nearly every time so far it went on like this."""
    DRAFT_MODEL = 0.60, 0.70, "draft-model"
    """A smaller model says so."""
    HEAD = 0.80, 0.80, "head"
    """A head trained for the model says so."""
    REPLAY = 0.50, 0.50, "replay"
    """A script says so."""
    REPLAY_SECOND = 0.30, 0.50, "replay"
    """The script's second guess."""

    def __init__(self, first: float, later: float, source: str) -> None:
        self.prior = Rates(first, later)
        self.source = source

    __hash__ = object.__hash__  # an enum's own is Python, which asking for guesses would feel


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses of the next tokens of a sequence, at least one. `others`: what the same source guesses besides."""

    kind: Kind
    token_ids: Ordered[int]
    others: tuple[Proposal, ...] = ()


@dataclass(slots=True)
class Drafting:
    """One sequence, seen by speculation.

    Attributes:
        states: What each source keeps, by the source's name.
        told: What native sources keep in the place of `states`, `acceptance` and what was `proposed` and not chosen.
        acceptance: How often this sequence's guesses were right, by kind.
        proposed: What was guessed before the step that runs, the best first.
        chosen: The best of them where the step checks guesses.
        tree: What the step's drafts were taken from where they are more than `chosen`.
        drafts: Those drafts.
        opens: They were guesses of the answer's first tokens.
        watched: What is left of a proposal of which nothing was checked, and all was right so far; of `watched_kind`.
        is_followed: Whether anything is guessed of it or remembered.
        question: The end of the text that asked for it, once somebody wanted to know.
    """

    states: dict[str, object] = field(default_factory=dict)
    told: Told | None = None
    acceptance: dict[Kind, Acceptance] = field(default_factory=dict)
    proposed: list[Proposal] = field(default_factory=list)
    chosen: Proposal | None = None
    tree: DraftTree | None = None
    drafts: Drafts = NO_DRAFTS
    opens: bool = False
    watched: Ordered[int] = ()
    watched_kind: Kind = Kind.REPLAY
    is_followed: bool = True
    question: tuple[int, ...] | None = None

    def forget(self) -> None:
        """What was proposed: a step has shown what came of it, or will never."""
        self.proposed, self.chosen, self.tree, self.drafts, self.opens = [], None, None, NO_DRAFTS, False


class Source(Protocol):
    """Somebody who guesses. `name` is how options and figures call it."""

    name: str

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """At most `limit` guesses of what follows the sequence's output, of which there is at least one token."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """The sequence's answer is complete."""
        ...


def agreement(one: Ordered[int], other: Ordered[int]) -> int:
    """How many tokens two texts share from their begin."""
    length = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        length += 1
    return length
