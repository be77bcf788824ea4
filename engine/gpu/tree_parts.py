"""Attention of trees of drafts in a step that is no graph: it is too large for one, or there was no memory.

    query    │ a │ b │ c │ d │ e │   ─▶   │ – │ – │ a │ b │ – │ c │ d │ e │   ─▶   attention of decode rows   ─▶   back

FlashInfer's kernels know chains only, which is what all other rows of a step are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.backend import Segment
from engine.gpu.decode_attention import DecodeAttention, DecodeRows, part_keys
from engine.gpu.filled_rows import FilledRows, FilledSize
from engine.gpu.step_sizes import MOST_CHECKED, WIDTHS


@dataclass(frozen=True, slots=True, eq=False)
class TreePart:
    """See `engine.attention.flashinfer_backend.Part`. `at`: int64 (count,), where its tokens stand among those of rows
    that are filled up.
    """

    first: int
    count: int
    attention: DecodeAttention
    rows: DecodeRows
    at: torch.Tensor

    def read(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """See `Part.read`."""
        filled = query.new_zeros((len(self.rows.positions), *query.shape[1:]))
        filled.index_copy_(0, self.at, query)
        found = torch.empty_like(filled)
        self.attention.read(layer, self.rows, filled, found)
        torch.index_select(found, 0, self.at, out=out)


def tree_parts(segments: Sequence[Segment], first: int, attention: DecodeAttention) -> list[TreePart]:
    """The parts of trees, whose tokens are a step's from `first` on: as many as one launch of `attention` has room for.

    Raises:
        ValueError: A row has more tokens than one before its drafts, and more than a row with drafts may have.
    """
    parts = []
    longest = max((segment.length for segment in segments), default=1)
    width = next((width for width in WIDTHS if width >= longest), None)
    if width is None:
        raise ValueError(f"a tree of {longest} tokens; expected {WIDTHS[-1]} at most")
    at_once = MOST_CHECKED // width
    for index in range(0, len(segments), at_once):
        part = _part(segments[index : index + at_once], first, width, attention)
        first += part.count
        parts.append(part)
    return parts


def _part(segments: Sequence[Segment], first: int, width: int, attention: DecodeAttention) -> TreePart:
    size = FilledSize(len(segments), width, min(width, attention.most_queries))
    filled = FilledRows.of(
        np.array([segment.start for segment in segments]),
        np.array([segment.length for segment in segments]),
        width,
    )
    inputs = np.zeros((3, size.tokens), np.int32)
    places, positions, seen = inputs
    places[:] = np.repeat([segment.table_row for segment in segments], width)
    positions[filled.at] = filled.positions
    trees = (
        (first_token, segment.parents, segment.length)
        for first_token, segment in zip(filled.firsts.tolist(), segments, strict=True)
        if segment.parents is not None
    )
    size.let_see(seen, trees)
    cuts = part_keys(size.lengths(positions), attention.num_kv_heads)
    packed = torch.from_numpy(np.concatenate((inputs.reshape(-1), cuts))).pin_memory()
    places_of, positions_of, seen_by, cut = torch.split(
        packed.to(attention.device, non_blocking=True), [size.tokens] * 3 + [size.parts]
    )
    at = torch.from_numpy(filled.at).pin_memory().to(attention.device, non_blocking=True)
    rows = DecodeRows(places_of, positions_of, cut, seen_by, size.queries)
    return TreePart(first, len(filled.at), attention, rows, at)
