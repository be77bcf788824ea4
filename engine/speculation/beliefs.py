"""What came of guesses: how often each kind was right, in one answer and in general. Whoever chooses believes that.

Sources that guess but are not checked are judged all the same, by whether the token that came was their first guess; so
a source that has become good is noticed while nothing is drafted, and costs the model nothing. One proposal at a time
is watched further, for how often later guesses are right. But who agrees with the best one is not judged: often right
where everybody is, it may be wrong whenever a guess hangs on it.

Native sources keep the same in answer.h; what is here is of those in Python, of scripts and of models.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Final

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.drafting import Drafting, Kind, Proposal, agreement
from engine.speculation.tree import path

SEQUENCE_MEMORY: Final = 24
SOURCE_MEMORY: Final = 256
PRIOR_WEIGHT: Final = 3.0
"""What other sequences' guesses are worth, in trials of a sequence's own."""
RESCUE: Final = 0.5
"""Where others have guessed wrongly, a source is believed so much less at first."""
MAX_BRANCHES: Final = 3
"""Proposals that a tree takes in beside the best one."""


class Beliefs:
    """See above."""

    def __init__(self) -> None:
        self._acceptance = {kind: Acceptance(SOURCE_MEMORY) for kind in Kind}
        self._rescues = {kind: Acceptance(SOURCE_MEMORY) for kind in Kind}  # where those asked before are wrong
        self._general: dict[Kind, Rates] = {}  # until something is learnt of the kind: all rows of a step ask

    def general(self, kind: Kind) -> Rates:
        """In all answers."""
        rates = self._general.get(kind)
        if rates is None:
            rates = self._general[kind] = self._acceptance[kind].rates(kind.prior, PRIOR_WEIGHT)
        return rates

    def rates(self, drafting: Drafting, kind: Kind) -> Rates:
        """In this one, of which others tell something too."""
        general, own = self.general(kind), drafting.acceptance.get(kind)
        return general if own is None else own.rates(general, PRIOR_WEIGHT)

    def rescue_rates(self, kind: Kind) -> Rates:
        """Where those that were asked before are wrong."""
        return self._rescues[kind].rates(Rates(RESCUE * kind.prior.first, kind.prior.later), PRIOR_WEIGHT)

    def learn(self, drafting: Drafting, kind: Kind, right: int, guessed: int) -> None:
        """Of so many guesses in a row the first `right` were right."""
        self._acceptance[kind].add(right, guessed)
        self._general.pop(kind, None)
        own = drafting.acceptance.get(kind)
        if own is None:
            own = drafting.acceptance[kind] = Acceptance(SEQUENCE_MEMORY)
        own.add(right, guessed)

    def learn_chain(self, drafting: Drafting, chosen: Proposal, said: Ordered[int], checked: int) -> None:
        """So many of what was chosen were checked. Where all were right, what came behind them tells of one guess more:
        else nobody would know how right longer chains are where only short ones seem to pay.
        """
        guessed = min(checked + (len(said) - 1 == checked), len(chosen.token_ids))
        self.learn(drafting, chosen.kind, agreement(chosen.token_ids[:guessed], said), guessed)

    def judge(self, drafting: Drafting, said: Ordered[int], *, is_best_known: bool) -> None:
        """What was proposed before these tokens came. `is_best_known`: of the best of it that was learnt."""
        if is_best_known:
            drafting.watched = ()
        else:
            self.watch(drafting, said)
        best = drafting.proposed[0]
        for proposal in drafting.proposed:
            # On the guess of who says what the best does anyway nothing hung.
            is_known = is_best_known if proposal is best else proposal.token_ids[0] == best.token_ids[0]
            if not is_known:
                self.learn(drafting, proposal.kind, int(proposal.token_ids[0] == said[0]), 1)
        if len(drafting.proposed) > 1:
            self._learn_rescues(drafting, said)

    def watch(self, drafting: Drafting, said: Ordered[int]) -> None:
        """Of one proposal at a time of which nothing is checked, and whose first guess was right: do those behind it go
        on being right?
        """
        if not drafting.watched:
            if drafting.proposed and drafting.proposed[0].token_ids[0] == said[0]:
                best = drafting.proposed[0]
                drafting.watched_kind, drafting.watched = best.kind, best.token_ids[1:]
            return
        kind, guesses = drafting.watched_kind, drafting.watched
        is_right = guesses[0] == said[0]
        self._acceptance[kind].add_later(is_right)
        self._general.pop(kind, None)
        if kind in drafting.acceptance:
            drafting.acceptance[kind].add_later(is_right)
        drafting.watched = guesses[1:] if is_right else ()

    def _learn_rescues(self, drafting: Drafting, said: Ordered[int]) -> None:
        """Where those asked before were wrong, were those behind them right?"""
        proposed = drafting.proposed[: 1 + MAX_BRANCHES]
        if agreement(proposed[0].token_ids, said) == len(said):
            return
        for index, proposal in enumerate(proposed[1:], start=1):
            guesses = proposal.token_ids
            right = agreement(guesses, said)
            if right < agreement(guesses, proposed[0].token_ids):
                continue  # it was wrong before it left the others
            shared = [agreement(guesses, earlier.token_ids) for earlier in proposed[:index]]
            at = max(shared)  # here it leaves them
            if at >= min(len(guesses), len(said)) or right < at:
                continue
            tried = [
                earlier.token_ids[at]
                for earlier, length in zip(proposed, shared, strict=False)
                if length == at < len(earlier.token_ids)
            ]
            if tried and said[at] not in tried:
                checked = max(len(path(*drafting.drafts, guesses)) - at, 1) if drafting.tree is not None else 1
                self._rescues[proposal.kind].add(min(right - at, checked), checked)
