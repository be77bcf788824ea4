"""Drafts from a script: the known continuation of a request, right with a given probability. For tests and benchmarks.

Random weights say nothing that anybody could guess; a script lets the mechanism be measured at any acceptance.
"""

from __future__ import annotations

import math
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
        guesses = self._guesses(known)
        if not self.branches:
            return Proposal(Kind.REPLAY, guesses)
        others = []
        for index, token_id in enumerate(known[: self.branches]):
            is_wrong = guesses[index] != token_id
            other = token_id if is_wrong and self._random.random() < self.second else self._wrong(token_id)
            others.append(Proposal(Kind.REPLAY_SECOND, [*guesses[:index], other, *self._guesses(known[index + 1 :])]))
        return Proposal(Kind.REPLAY, guesses, tuple(others))

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _guesses(self, known: Ordered[int]) -> list[int]:
        """Each with the accuracy. A source takes little time, and so must this: it draws how many are right until the
        next wrong one, and nothing where none is.
        """
        accuracy = self.accuracy
        if not 0.0 < accuracy < 1.0:
            return list(known) if accuracy else [(token_id + 1) % self._vocab_size for token_id in known]
        guesses, at = list(known), 0
        while True:
            # n or more are right before the next wrong one with probability accuracy ** n
            at += int(math.log(1.0 - self._random.random()) / math.log(accuracy))
            if at >= len(guesses):
                return guesses
            guesses[at] = self._wrong(guesses[at])
            at += 1

    def _wrong(self, token_id: int) -> int:
        return (token_id + 1 + int(self._random.random() * (self._vocab_size - 1))) % self._vocab_size
