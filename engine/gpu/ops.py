"""Launches of the elementwise kernels: what stands between two matrix products of a decoder layer, in one pass each."""

from __future__ import annotations

import math

import torch

from engine.gpu import kernels
from engine.gpu.chain import launch_options


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` in place where given, and returns the sum's RMS norm, (tokens, width) each."""
    tokens, width = residual.shape
    out = torch.empty_like(residual)
    block = _power_of_two(width)
    kernels.add_rms_norm[(tokens,)](
        residual if x is None else x,
        residual,
        weight,
        out,
        width,
        eps,
        ADD=x is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(),
    )
    return out


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
        qkv: (tokens, heads + 2 kv_heads, head_dim); its queries are changed in place, keys and values are not.
        rotation: Cosines and signed sines, (tokens, 1, head_dim) each, of equal strides.
        slots: int32 (tokens,).
        pool: One layer's, (slots, 2, kv_heads, head_dim).
        num_kv_heads: How many of the heads are keys, and again values.
        norm_weight: (heads + kv_heads, head_dim) of QK-norm, where the model has one.
        eps: Of that norm.

    Returns:
        The queries, (tokens, heads, head_dim), a view.
    """
    tokens, total, dim = qkv.shape
    heads = total - 2 * num_kv_heads
    # Few tokens: a program a head, for latency. Many: blocks of heads, for throughput.
    group = 1 if tokens <= 64 else math.gcd(math.gcd(heads, num_kv_heads), 8)
    group = group & -group  # a power of two
    kernels.rotate_and_write[(tokens, total // group)](
        qkv,
        qkv if norm_weight is None else norm_weight,
        rotation[0],
        rotation[1],
        slots,
        pool,
        heads,
        num_kv_heads,
        rotation[0].stride(0),
        eps,
        NORM=norm_weight is not None,
        HALF=dim // 2,
        BLOCK=_power_of_two(dim // 2),
        HEADS=group,
        num_warps=1 if group <= 2 else 4,
        **launch_options(),
    )
    return qkv[:, :heads]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (tokens, 2 * inner), gates first → (tokens, inner)."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, _power_of_two(inner))
    kernels.silu_mul[(tokens, -(-inner // block))](gate_up, out, inner, BLOCK=block, num_warps=4, **launch_options())
    return out


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


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
