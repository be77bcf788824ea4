"""Drafts from the grammar: tokens that it leaves no choice about, such as the names of a form's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.speculation.drafting import Drafting, Kind, Proposal

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Forced:
    """See `Source`. They are still only guesses: the same text can be spelled by other tokens."""

    name = "grammar"

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        if sequence.grammar is None:
            return None
        guesses = sequence.grammar.forced_tokens()[:limit]
        return Proposal(Kind.GRAMMAR, guesses) if guesses else None

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""
