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
    """

    name = "replay"

    def __init__(self, answers: Mapping[str, Ordered[int]], accuracy: float, vocab_size: int, seed: int = 0) -> None:
        self.answers = answers
        self.accuracy = accuracy
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        first = len(sequence.output_ids)
        guesses = list(self.answers.get(sequence.request_id, ())[first : first + limit])
        for index, token_id in enumerate(guesses):
            if self._random.random() >= self.accuracy:
                guesses[index] = (token_id + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size
        return Proposal(Kind.REPLAY, guesses) if guesses else None

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""
