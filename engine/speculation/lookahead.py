"""Which ids a grammar lets come after guesses: for models that draft, so that they guess nothing that cannot be said.

Works on a copy of the sequence's matcher, which never learns of it. What this says decides guesses only: what may be
said is decided by the masks of the step that checks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.grammar import GrammarState


class Lookahead:
    """See `engine.batch.TokenMask`. Stands behind the guesses so far.

    Attributes:
        is_over: Nothing can follow, or the library does not know what.
    """

    def __init__(self, state: GrammarState, vocab_size: int) -> None:
        matcher = state.matcher()
        self._matcher = None if matcher is None or state.failure is not None else matcher.deep_copy()
        self._words: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)
        self.is_over = False
        self._look()

    def advance(self, token_id: int) -> None:
        """Take the next guess."""
        if self._matcher is not None and not self._matcher.try_consume_tokens([token_id]):
            self._matcher = None
        self._look()

    def words(self) -> NDArray[np.int32]:
        """See `engine.batch.TokenMask.words`."""
        return self._words

    def _look(self) -> None:
        matcher = self._matcher
        if matcher is None or matcher.is_stopped() or matcher.is_error():
            self.is_over = True
            return
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self.is_over = matcher.is_error() or not self._words.any()
