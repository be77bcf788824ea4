"""Drafts from a script: the known continuation of a request, right with a given probability. For tests and benchmarks.

Random weights say nothing that anybody could guess; a script lets the mechanism be measured at any acceptance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING

from engine.speculation.drafting import Drafting, Kind, Proposal

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Replay:
    """See `Source`.

    Args:
        answers: Output ids by request id.
        accuracy: How probably a guess is right, given that those before it are.
        vocab_size: Wrong guesses are below it.
        seed: Of the wrong guesses.
        branches: So many tokens from the first on are guessed a second time, and what follows them too.
        second: How probably such a second guess is right where the first is wrong.
    """

    name = "replay"

    def __init__(
        self,
        answers: Mapping[str, Ordered[int]],
        accuracy: float,
        vocab_size: int,
        seed: int = 0,
        *,
        branches: int = 0,
        second: float = 0.5,
    ) -> None:
        self.answers = answers
        self.accuracy = accuracy
        self.branches = branches
        self.second = second
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        first = len(sequence.output_ids)
        known = self.answers.get(sequence.request_id, ())[first : first + limit]
        if not known:
            return None
        guesses = [self._guess(token_id, self.accuracy) for token_id in known]
        others = []
        for index, token_id in enumerate(known[: self.branches]):
            other = self._guess(token_id, self.second if guesses[index] != token_id else 0.0)
            behind = [self._guess(later, self.accuracy) for later in known[index + 1 :]]
            others.append(Proposal(Kind.REPLAY_SECOND, [*guesses[:index], other, *behind]))
        return Proposal(Kind.REPLAY, guesses, tuple(others))

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _guess(self, token_id: int, accuracy: float) -> int:
        """The token with that probability, else another one."""
        if self._random.random() < accuracy:
            return token_id
        return (token_id + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size
