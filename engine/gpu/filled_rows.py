"""Where the tokens of rows stand that are as wide as the widest: each is filled up in front, so that all end alike.

    width 4    │ – │ – │ a │ b │ – │ c │ d │ e │     rows of 2 and 3 tokens

Called by `engine.gpu.verify_graphs` and `engine.gpu.guess_layout` for the inputs of their graphs, and by
`engine.gpu.tree_parts` where there is no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.speculation.tree import seen_bits

_ALL: Final = 0xFFFFFFFF
"""A token that sees its row's last position sees all: see `engine.gpu.decode_attention.DecodeRows`."""


@dataclass(frozen=True, slots=True)
class FilledSize:
    """So many rows, all of `width` tokens. Attention reads a row as several of `queries` tokens each, where that is
    less than its width.
    """

    rows: int
    width: int
    queries: int

    @property
    def tokens(self) -> int:
        """Of all rows, padding included."""
        return self.rows * self.width

    @property
    def parts(self) -> int:
        """Rows as attention reads them."""
        return self.tokens // self.queries

    def lengths(self, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """(parts,) of positions (tokens,): how long attention finds each of its rows."""
        return positions[self.queries - 1 :: self.queries] + 1

    def let_see(self, into: NDArray[np.int32], trees: Iterable[tuple[int, Sequence[int], int]] = ()) -> None:
        """Write what each token sees, (tokens,), as `DecodeRows` wants it: in a chain itself and all before it.

        `trees` are rows of other shapes: where each begins, its `parents` as of `engine.batch.Row`, how many tokens it
        has.
        """
        bits = into.view(np.uint32)
        bits.reshape(-1, self.queries)[:] = _chain(self.queries)
        for first, parents, count in trees:
            own = seen_bits(parents, count)
            for begin in range(first - first % self.queries, first + count, self.queries):  # attention's rows
                end = begin + self.queries
                lowest = 32 - (end - first)  # the bit of the tree's first token; what is below is text
                text = (1 << lowest) - 1
                start, stop = max(begin, first), min(end, first + count)
                bits[start:stop] = [one << lowest & _ALL | text for one in own[start - first : stop - first]]


@cache
def _chain(queries: int) -> NDArray[np.uint32]:
    """What each token of one of attention's rows sees in a chain."""
    return np.full(queries, _ALL, np.uint32) >> np.arange(queries - 1, -1, -1, dtype=np.uint32)


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
        stops = counts.cumsum()
        firsts = width * np.arange(1, len(counts) + 1) - counts
        ordinals = np.arange(stops[-1]) - (stops - counts).repeat(counts)  # within its row
        return cls(counts, firsts, firsts.repeat(counts) + ordinals, starts.repeat(counts) + ordinals)

    def each(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values (rows,) for each token of its row, (tokens,)."""
        return values.repeat(self.counts)


class TextRow(Protocol):
    """Of a target's step or of a drafter's: see `engine.batch.Row` and `engine.speculation.drafter.DraftRow`."""

    @property
    def table_row(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def position_delta(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FilledTexts(FilledRows):
    """Rows of texts; all int64.

    Attributes:
        starts: (rows,) position of each one's first token.
        table_rows: (rows,) of the slot table.
        deltas: (rows,) what rotary positions are more than those in the text.
    """

    starts: NDArray[np.int64]
    table_rows: NDArray[np.int64]
    deltas: NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: Sequence[TextRow], width: int, *, has_axes: bool) -> FilledTexts:
        """Of rows of `width` tokens at most. Models that rotate by one position know no deltas."""
        of_rows = [(row.start, len(row.token_ids), row.table_row, row.position_delta * has_axes) for row in rows]
        starts, counts, table_rows, deltas = np.array(of_rows).T
        filled = FilledRows.of(starts, counts, width)
        return cls(filled.counts, filled.firsts, filled.at, filled.positions, starts, table_rows, deltas)
