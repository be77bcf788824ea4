"""Drafts of any shape: trees whose guesses are right or wrong, siblings alike or not, whatever no source would make."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Ordered

from hypothesis import strategies as st

from engine.core import Engine
from engine.sequence import Sequence
from engine.speculation.tree import NO_DRAFTS, Drafts


@st.composite
def shapes(draw: st.DrawFn, most: int = 15) -> tuple[int, ...]:
    """Parents of some drafts."""
    return tuple(draw(st.integers(0, index)) for index in range(draw(st.integers(1, most))))


class RandomTrees:
    """Takes the place of `Speculator.propose`.

    Args:
        answers: Output ids by request id.
        accuracy: How probably a guess is right where those that lead to it are.
        vocab_size: Wrong guesses are below it.
        size: Most guesses in a row.
        seed: Of shapes and guesses.

    Attributes:
        num_branching: Trees so far that were no chain.
    """

    def __init__(
        self, answers: Mapping[str, Ordered[int]], accuracy: float, vocab_size: int, size: int = 15, seed: int = 0
    ) -> None:
        self.answers = answers
        self.accuracy = accuracy
        self.size = size
        self.num_branching = 0
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def guide(self, engine: Engine) -> RandomTrees:
        """Have an engine check these trees from now on."""
        engine.scheduler.speculator = engine.speculator
        engine.speculator.propose = self.propose  # type: ignore[method-assign]
        return self

    def propose(self, sequences: Ordered[Sequence], room: int) -> list[Drafts]:
        """See `Speculator.propose`."""
        drafts = []
        for sequence in sequences:
            made = self.tree(sequence, min(room, self.size, sequence.max_tokens - len(sequence.output_ids) - 1))
            room -= len(made.token_ids)
            drafts.append(made)
        return drafts

    def tree(self, sequence: Sequence, limit: int) -> Drafts:
        """Up to `limit` guesses of what follows a sequence."""
        known = self.answers.get(sequence.request_id, ())[len(sequence.output_ids) :]
        count = self._random.randint(0, max(limit, 0))
        if not count:
            return NO_DRAFTS
        straight = self._random.random()  # from bushes to chains
        depths, is_right = [0], [True]
        token_ids: list[int] = []
        parents: list[int] = []
        for index in range(count):
            parent = index if self._random.random() < straight else self._random.randint(0, index)
            depth = depths[parent]
            token_id = self._random.randrange(self._vocab_size)
            if is_right[parent] and depth < len(known) and self._random.random() < self.accuracy:
                token_id = known[depth]
            token_ids.append(token_id)
            parents.append(parent)
            depths.append(depth + 1)
            is_right.append(is_right[parent] and depth < len(known) and token_id == known[depth])
        self.num_branching += parents != list(range(count))
        return Drafts(tuple(token_ids), tuple(parents))
