"""Several proposals become one tree: what they share once, and a branch where they part.

The best proposal is the trunk. How often another one is right where those before it were wrong is measured for itself
(`Branch.rates`). So each guess has a probability of being right given that what leads to it is,

    trunk        first, later, later, …                    branch       (1 - what is guessed there already) × first,
                                                                        later, later, …

the product of these on the way to a guess is how probably it stands, and their sum is what the tree yields.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Final, NamedTuple

from engine.speculation.acceptance import MOST, Rates
from engine.speculation.drafting import Proposal
from engine.speculation.tree import Drafts

ROOT: Final = -1


class Branch(NamedTuple):
    """A proposal, and how probably it is right: its first guess that nobody has made before, given that those who
    guessed there are wrong, and each later one given those before it.
    """

    proposal: Proposal
    rates: Rates


class DraftTree:
    """Guesses of one row.

    Args:
        branches: Those who guess, the trunk first.

    Attributes:
        gains: How probably each guess stands, falling: the sum of the first n is what the n likeliest yield.
    """

    def __init__(self, branches: Ordered[Branch]) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._owners: list[Proposal] = []
        self._likely: list[float] = []
        self._left = [1.0]  # how probably nobody's guess is right, at the root and behind each guess
        self._places: dict[tuple[int, int], int] = {}  # (parent, token) → guess
        for branch in branches:
            self._add(branch)
        # A guess is never likelier than its parent, and of equals the parent came first.
        self._order = sorted(range(len(self._tokens)), key=lambda guess: -self._likely[guess])
        self.gains = [self._likely[guess] for guess in self._order]

    def best(self, count: int) -> Drafts:
        """The `count` likeliest guesses, what follows a guess right behind it, the likelier first."""
        children: dict[int, list[int]] = {}
        for guess in self._order[:count]:
            children.setdefault(self._parents[guess], []).append(guess)
        token_ids: list[int] = []
        parents: list[int] = []
        numbers = {ROOT: 0}  # of each guess among the row's tokens
        stack = children.get(ROOT, [])[::-1]
        while stack:
            guess = stack.pop()
            token_ids.append(self._tokens[guess])
            parents.append(numbers[self._parents[guess]])
            numbers[guess] = len(token_ids)
            stack += children.get(guess, [])[::-1]
        is_chain = parents == list(range(len(parents)))
        return Drafts(tuple(token_ids), None if is_chain else tuple(parents))

    def owner(self, token_ids: Ordered[int]) -> Proposal:
        """Whose guess the last of `token_ids` is, which lead to it from the root."""
        guess = ROOT
        for token_id in token_ids:
            guess = self._places[guess, token_id]
        return self._owners[guess]

    def _add(self, branch: Branch) -> None:
        proposal, rates = branch
        guess = ROOT
        for token_id in proposal.token_ids:
            known = self._places.get((guess, token_id))
            if known is None:
                known = self._places[guess, token_id] = len(self._tokens)
                left = self._left[guess + 1]
                is_end = left == 1.0 and guess != ROOT  # where a guess ends, another may go on
                right = min(rates.later if is_end else left * rates.first, MOST)
                self._left[guess + 1] -= right
                self._tokens.append(token_id)
                self._parents.append(guess)
                self._owners.append(proposal)
                self._likely.append(right * (1.0 if guess == ROOT else self._likely[guess]))
                self._left.append(1.0)
            guess = known
