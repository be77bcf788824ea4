"""Positions of three axes, time, row and column (M-RoPE, Qwen2-VL, arXiv:2409.12191, section 2.1).

Text has one number on all axes. The tokens of a picture stand at its rows and columns, those of a clip also at its
times, all counted from where the picture begins; what follows goes on from the largest of them + 1:

    text  text │ picture of 2 × 3 tokens │ text  text
    time    0     1 │   2   2   2   2   2   2 │   5     6
    row     0     1 │   2   2   2   3   3   3 │   5     6
    column  0     1 │   2   3   4   2   3   4 │   5     6

So says the paper. `get_rope_index` of transformers 5.17 goes on from the larger side of a picture instead, which is the
same but for clips that take more time than their frames have rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from preprocess.media import Item


def positions(items: Sequence[Item], spans: Sequence[Sequence[tuple[int, int]]]) -> npt.NDArray[np.int32]:
    """int32 (3, n) for the n tokens of a prompt up to the end of its last item.

    Args:
        items: What the prompt shows, in order.
        spans: For each, the (start, length) runs of its tokens in the prompt.
    """
    total = max((start + length for runs in spans for start, length in runs), default=0)
    placed = np.empty((3, total), np.int32)
    end = following = base = 0
    for item, runs in zip(items, spans, strict=True):
        seen = 0
        for start, length in runs:
            if start > end:
                placed[:, end:start] = np.arange(following, following + start - end)
                following += start - end
            if start > end or not item.index:  # else the clip goes on
                base = following
            run = placed[:, start : start + length]
            run[0] = item.time
            run[1], run[2] = np.divmod(np.arange(seen, seen + length), item.layout.token_columns)
            run += base
            following = max(following, int(run.max()) + 1)
            end, seen = start + length, seen + length
    return placed
