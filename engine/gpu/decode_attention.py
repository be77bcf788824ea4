"""Attention of decode rows straight from the slot table: nothing but reading keys and values, as fast as possible.

    keys of a row  │ part 0 │ part 1 │ … │ part n │     a program each, for all query heads that share a key head
                        └────────┴───┬───┴─────┘
                                     ▼  whichever ends last puts them together

As FlashDecoding cuts long rows (Hong et al. 2023, arXiv:2311.01282). The numbers of rows and parts are fixed when a
step is captured. How many keys a part has comes with the inputs of each step, so that programs have about the same to
do whatever the lengths are; those beyond a row's end do nothing. A library's kernel is planned on the host for every
step, and has tiles for many queries.

A row's result depends on other rows only by where its keys are cut: sums are float32, but their order differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.gpu import decode_kernels
from engine.gpu.step_sizes import WIDTHS
from preprocess.blocks.fusion import power_of_two

BLOCK_KEYS: Final = 64
PROGRAMS: Final = 264
"""Keys of a block, and about how many programs have something to do: two for each of an H200's 132 multiprocessors.

With these, four warps and two blocks in flight, 1 to 64 rows of five models take 4 % longer on average than with what
is best for each of them.
"""

MOST_PARTS: Final = 32
LEAST_PARTS: Final = 4
"""Of the keys of a row. Least: so that one long row among many short ones does not keep all of them waiting."""

_STAGES: Final = 2
_LEAST_TILE: Final = 16
"""Least rows of a tile of the tensor cores."""
_MOST_VALUES: Final = 128 * 128
"""Of a tile of queries: with more, registers do not do. More than a half of it takes eight warps."""


def num_parts(rows: int, num_kv_heads: int) -> int:
    """Most parts of each of so many rows."""
    return min(MOST_PARTS, max(LEAST_PARTS, 2 * PROGRAMS // (rows * num_kv_heads)))


def part_keys(lengths: NDArray[np.int32], num_kv_heads: int) -> NDArray[np.int32]:
    """How many keys a part has, for each of the rows of these lengths: whole blocks, about the same in all programs."""
    blocks = (lengths + (BLOCK_KEYS - 1)) // BLOCK_KEYS
    wanted = max(1.0, float(blocks.sum()) * num_kv_heads / PROGRAMS)  # blocks of a program
    parts = np.rint(blocks / wanted).astype(np.int32)
    np.minimum(parts, num_parts(len(lengths), num_kv_heads), out=parts)
    np.maximum(parts, 1, out=parts)  # `clip` takes twice as long as both
    return (blocks + (parts - 1)) // parts * BLOCK_KEYS


def most_queries(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Tokens of a row that one program has room for; more of them are read as several rows."""
    return max(1, _MOST_VALUES // (power_of_two(num_heads // num_kv_heads) * head_dim))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Rows of `queries` tokens each, the last ones of their sequences, on the device.

    int32 (rows * queries,): each token's row of the slot table and its position; (rows,): keys of a part, by
    `part_keys` of the rows' lengths. Tokens that fill a row up stand before its own, at any positions of it; nobody
    looks at their results.

    `seen`, int32 (rows * queries,): 32 bits of what each token sees. Bit 31 is the position of the row's last token,
    each bit below it the position before, and bit 0 all that are farther away, too. So chains and trees of drafts are
    read alike: `engine.gpu.filled_rows` makes the bits of both. None: rows are tokens that see all there is.
    """

    table_rows: torch.Tensor
    positions: torch.Tensor
    part_keys: torch.Tensor
    seen: torch.Tensor | None = None
    queries: int = 1


class DecodeAttention:
    """Attention over one KV pool. One step at a time: what parts leave to each other has one place.

    Args:
        pool: (layers, slots, 2, kv_heads, head_dim).
        table: int32 (rows, positions): the slot table.
        num_heads: Query heads.
        most_rows: Of a step.
        most_queries: Tokens of a row.
        most_tokens: Of a step, where that is fewer than all rows with as many tokens as one may have.

    Attributes:
        num_kv_heads: Key heads.
        most_queries: As given.
        device: Of the pool.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        table: torch.Tensor,
        num_heads: int,
        *,
        most_rows: int,
        most_queries: int = 1,
        most_tokens: int | None = None,
    ) -> None:
        self._layers = pool.unbind(0)
        self._table = table
        self.num_kv_heads, self._head_dim = pool.shape[3:]
        self.most_queries = most_queries
        self.device = pool.device
        self._group = num_heads // self.num_kv_heads
        self._scale = math.log2(math.e) / math.sqrt(self._head_dim)
        tokens = most_rows * most_queries if most_tokens is None else most_tokens
        cells = max(
            self._num_cells(rows, min(most_queries, tokens // rows)) for rows in range(1, min(most_rows, tokens) + 1)
        )
        self._part_outs = torch.empty((cells, self._head_dim), dtype=torch.float32, device=pool.device)
        self._part_sums = torch.empty(cells, dtype=torch.float32, device=pool.device)
        self._finished = torch.zeros(most_rows * self.num_kv_heads, dtype=torch.int32, device=pool.device)

    def _num_cells(self, rows: int, queries: int) -> int:
        """Places of what parts of a step leave: one for each query head of a token."""
        parts = rows * num_parts(rows, self.num_kv_heads)
        return parts * self.num_kv_heads * power_of_two(self._group * queries)

    def read(self, layer: int, rows: DecodeRows, query: torch.Tensor, out: torch.Tensor) -> None:
        """One layer's attention, (rows * queries, heads, head_dim) each; the rows' own keys are in the pool."""
        count = len(rows.part_keys)
        assert rows.queries == 1 or rows.seen is not None
        filled = power_of_two(self._group * rows.queries)
        decode_kernels.attend[(self.num_kv_heads, count, num_parts(count, self.num_kv_heads))](
            query,
            self._layers[layer],
            self._table,
            rows.table_rows,
            rows.positions,
            rows.part_keys,
            rows.seen,
            out,
            self._part_outs,
            self._part_sums,
            self._finished,
            query.stride(0),
            self._table.stride(0),
            self._scale,
            KV_HEADS=self.num_kv_heads,
            GROUP=self._group,
            QUERIES=rows.queries,
            TILE=max(_LEAST_TILE, filled),
            FILLED=filled,
            DIM=self._head_dim,
            KEYS=BLOCK_KEYS,
            AT_ONCE=min(16, max(4, 64 // filled)),
            num_warps=8 if 2 * filled * self._head_dim > _MOST_VALUES else 4,
            num_stages=_STAGES,
        )


def drafts_attention(pool: torch.Tensor, table: torch.Tensor, num_heads: int, most_tokens: int) -> DecodeAttention:
    """For rows with drafts, of any width: `most_tokens` of a step. Arguments otherwise as `DecodeAttention`'s."""
    queries = most_queries(num_heads, pool.shape[3], pool.shape[4])
    return DecodeAttention(
        pool,
        table,
        num_heads,
        most_rows=most_tokens // min(WIDTHS[0], queries),
        most_queries=min(WIDTHS[-1], queries),
        most_tokens=most_tokens,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodePart:
    """Tokens `first` … `first + count - 1` of a step: decode rows."""

    first: int
    count: int
    attention: DecodeAttention
    rows: DecodeRows

    def read(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """See `engine.attention.flashinfer_backend.Part`."""
        self.attention.read(layer, self.rows, query, out)
