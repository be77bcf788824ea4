"""Launches of the elementwise kernels: what stands between two matrix products of a decoder layer, in one pass each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.gpu import kernels
from preprocess.blocks.fusion import power_of_two

_FEW_HEADS: Final = 1024
"""So few heads of all tokens have a program each, for latency: of 8B's 64 tokens they take 3.4 µs, of 112 tokens eight
at a time 2.4.
"""


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    pool: torch.Tensor,
    *,
    num_kv_heads: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalises and rotates queries and keys, writes keys and values to the pool.

    Args:
        qkv: (tokens, heads + 2 kv_heads, head_dim), whose queries are changed in place, or float32 parts
            (parts, tokens, heads + 2 kv_heads, head_dim), whose sum it is.
        rotation: Cosines and signed sines, (tokens, 1, head_dim) each, of equal strides.
        slots: int32 (tokens,).
        pool: One layer's, (slots, 2, kv_heads, head_dim).
        num_kv_heads: How many of the heads are keys, and again values.
        norm_weight: (heads + kv_heads, head_dim) of QK-norm, where the model has one.
        eps: Of that norm.

    Returns:
        The queries, (tokens, heads, head_dim), a view where they were changed in place.
    """
    tokens, total, dim = qkv.shape[-3:]
    heads = total - 2 * num_kv_heads
    in_parts = qkv.dim() == 4
    queries = qkv.new_empty((tokens, heads, dim), dtype=pool.dtype) if in_parts else qkv[:, :heads]
    group = 1 if tokens * total <= _FEW_HEADS else 8
    kernels.rotate_and_write[(tokens, -(-total // group))](
        qkv,
        queries,
        pool if norm_weight is None else norm_weight,
        rotation[0],
        rotation[1],
        slots,
        pool,
        heads,
        num_kv_heads,
        queries.stride(0),
        rotation[0].stride(0),
        eps,
        PARTS=len(qkv) if in_parts else 1,
        NORM=norm_weight is not None,
        HALF=dim // 2,
        BLOCK=power_of_two(dim // 2),
        HEADS=group,
        num_warps=1 if group == 1 else 4,
    )
    return queries


def gather_slots(table: torch.Tensor, table_rows: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor) -> None:
    """The slots of several sequences one behind the other: out[indptr[r] : indptr[r + 1]] from table[table_rows[r]].

    `table` int32 (rows, positions), the others int32.
    """
    kernels.gather_slots[(len(table_rows), 8)](
        table, table_rows, indptr, out, table.shape[1], BLOCK=512, PARTS=8, num_warps=4
    )


def decode_inputs(
    ids: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    future: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """What a decode step reads: `token_ids` are `ids`, or the table row's of `future` for -1; `slots` of `positions`.

    `future` (table rows,) and `token_ids` are int64, the others int32; all but `future` (rows,).
    """
    count = len(ids)
    kernels.decode_inputs[(-(-count // 128),)](
        ids, table_rows, positions, future, table, token_ids, slots, count, table.shape[1], BLOCK=128, num_warps=4
    )


@dataclass(frozen=True, slots=True)
class GuessInputs:
    """What rows read before a guess, (rows,) each: rows of the slot table, positions among the entries, rotary
    positions, slots, keys of noise, and where in (turns, most rows) the guess is written to. int32, keys int64.
    """

    table_rows: torch.Tensor
    positions: torch.Tensor
    rotary: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    spots: torch.Tensor


def guess_inputs(
    turn: torch.Tensor,
    limits: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    into: GuessInputs,
    *,
    most_rows: int,
    lag: int,
) -> None:
    """Prepares guess number `turn`, which then is the next one.

    Args:
        turn: int32 (1,), from 0.
        limits: int32 (rows,): how many guesses each row wants. One that has them goes on at the dummies.
        table_rows: int32 (rows,).
        positions: int32 (rows,): of the last token that is known; guess number n is what follows n tokens behind it.
        offsets: int32 (rows,): what rotary positions are more.
        keys: int64 (turns, rows).
        table: int32, the slot table, whose last row is of dummies.
        into: What is written.
        most_rows: See `GuessInputs`.
        lag: See `engine.speculation.drafter.Drafter`.
    """
    rows = len(limits)
    kernels.guess_inputs[(1,)](
        turn,
        limits,
        table_rows,
        positions,
        offsets,
        keys,
        table,
        into.table_rows,
        into.positions,
        into.rotary,
        into.slots,
        into.keys,
        into.spots,
        rows,
        most_rows,
        table.shape[1],
        table.shape[0] - 1,
        lag,
        BLOCK=max(32, power_of_two(rows)),
        num_warps=1,
    )
