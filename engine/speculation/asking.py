"""Asks sources in Python what follows, one sequence after the other: where there are no native ones, and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.speculation.drafting import Drafting, Kind, Proposal, Source
from engine.speculation.echo import Echo
from engine.speculation.habit import Habit
from engine.speculation.lengths import Candidate
from engine.speculation.tree import NO_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from engine.sequence import Sequence
    from engine.speculation.acceptance import Rates
    from engine.speculation.beliefs import Beliefs

SURE: Final = 0.5
"""Where so much of the most that can be guessed is expected to be right, nobody else is asked."""


def asked(
    sources: Ordered[Source], sequence: Sequence, drafting: Drafting, limit: int, beliefs: Beliefs, vocab_size: int
) -> Candidate | None:
    """The best of what the sources guess, `limit` tokens at most. All of it is what `drafting` has proposed then."""
    proposed: list[Proposal] = []
    right: list[float] = []  # of each, how many guesses are expected to be
    known: dict[Kind, Rates] = {}
    echo = next((source for source in sources if isinstance(source, Echo)), None)
    for source in sources if limit > 0 else ():
        if right and max(right) >= SURE * limit:
            break  # nobody else could guess much more
        answer = source.propose(sequence, drafting, limit)
        for made in (answer, *answer.others) if answer is not None else ():
            proposal = allowed(sequence, made, vocab_size)
            if proposal is not None:
                proposed.append(proposal)
        if source.name == Habit.name and echo is not None:
            proposed, right = echo.weighed(drafting, proposed), []
        for proposal in proposed[len(right) :]:
            kind = proposal.kind
            if kind not in known:
                known[kind] = beliefs.rates(drafting, kind)
            right.append(known[kind].expected(len(proposal.token_ids)))
    best, best_at = None, 0
    if right and (most := max(right)):
        best_at = right.index(most)
        best = Candidate(len(proposed[best_at].token_ids), known[proposed[best_at].kind])
    if best_at:
        proposed.insert(0, proposed.pop(best_at))
    drafting.proposed, drafting.chosen, drafting.tree, drafting.drafts = proposed, None, None, NO_DRAFTS
    return best


def allowed(sequence: Sequence, proposal: Proposal, vocab_size: int) -> Proposal | None:
    """A proposal up to what can never be said."""
    guesses = proposal.token_ids
    if max(guesses) >= vocab_size:
        guesses = guesses[: next(index for index, guess in enumerate(guesses) if guess >= vocab_size)]
    if sequence.grammar is not None and guesses:
        guesses = guesses[: sequence.grammar.count_allowed(guesses)]
    if len(guesses) == len(proposal.token_ids):
        return proposal
    return Proposal(proposal.kind, guesses) if guesses else None
