"""Where the tokens of rows stand that are as wide as the widest: each is filled up in front, so that all end alike.

    width 4    │ – │ – │ a │ b │ – │ c │ d │ e │     rows of 2 and 3 tokens

Called by `engine.gpu.verify_graphs` and `engine.gpu.guess_graphs` for the inputs of their graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FilledRows:
    """See above; all int64.

    Attributes:
        counts: (rows,) tokens of each.
        firsts: (rows,) where each begins.
        at: (tokens,) where each token stands.
        positions: (tokens,) of each token in its sequence.
    """

    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    at: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(cls, starts: NDArray[np.int64], counts: NDArray[np.int64], width: int) -> FilledRows:
        """Rows of `counts` tokens, `width` at most, that follow one another from the positions `starts`."""
        firsts = width * np.arange(1, len(counts) + 1) - counts
        ordinals = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # within its row
        return cls(counts, firsts, np.repeat(firsts, counts) + ordinals, np.repeat(starts, counts) + ordinals)

    def each(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values (rows,) for each token of its row, (tokens,)."""
        return np.repeat(values, self.counts)
