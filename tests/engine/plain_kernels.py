"""What the Triton kernels of `engine.gpu` and `preprocess.blocks.gpu_kernels` compute, in plain torch and with
their arguments.

`tests.engine.simulated_gpu` puts them in the kernels' place; `test_simulated_gpu` compares the two.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.sampling import _gumbel_noise, finite


class Kernel:
    """Launched as a Triton kernel is: `kernel[grid](…)`."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._run


def _rms_norm(
    x: torch.Tensor,
    into: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    width: int,
    eps: float,
    *,
    ADD: bool,
    **_: int,
) -> None:
    if ADD:
        torch.add(into, x, out=total)
    out.copy_(F.rms_norm(total.float(), [width], weight.float(), eps))


def _rotate_and_write(
    qkv: torch.Tensor,
    queries: torch.Tensor,
    weight: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_stride: int,
    angle_stride: int,
    eps: float,
    *,
    PARTS: int,
    NORM: bool,
    HALF: int,
    **_: int,
) -> None:
    assert queries.stride(0) == query_stride
    if PARTS > 1:
        qkv = qkv.sum(0).to(pool.dtype)
    both = num_heads + num_kv_heads
    heads = qkv[:, :both].float()
    if NORM:
        heads = (F.rms_norm(heads, [2 * HALF], eps=eps) * weight.float()).to(qkv.dtype).float()
    heads = (heads * cosines.float() + heads.roll(HALF, -1) * sines.float()).to(qkv.dtype)
    queries.copy_(heads[:, :num_heads])
    pool[slots.long(), 0] = heads[:, num_heads:]
    pool[slots.long(), 1] = qkv[:, both:]


def _silu_mul(
    gate_up: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, width: int, *, HAS_BIAS: bool, **_: int
) -> None:
    gate, up = (gate_up.float() + bias.float() if HAS_BIAS else gate_up.float()).chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def _gather_slots(
    table: torch.Tensor,
    table_rows: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    positions_per_row: int,
    **_: int,
) -> None:
    offsets = indptr.tolist()
    for row, first, stop in zip(table_rows.tolist(), offsets[:-1], offsets[1:], strict=True):
        assert stop - first <= positions_per_row
        out[first:stop] = table[row, : stop - first]


def _decode_inputs(
    ids: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    future: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    *_: int,
    **__: int,
) -> None:
    rows = table_rows.long()
    token_ids.copy_(torch.where(ids < 0, future[rows], ids.long()))
    slots.copy_(table[rows, positions.long()])


def _draw_blocks(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    best: torch.Tensor,
    best_ids: torch.Tensor,
    vocab: int,
    num_blocks: int,
    **_: int,
) -> None:
    """All of a row's vocabulary counts as its first block."""
    values = finite(logits)
    drawn = temperatures > 0
    if bool(drawn.any()):
        noise = _gumbel_noise(keys[drawn], torch.arange(vocab))
        values[drawn] = noise.add_(values[drawn] / temperatures[drawn].unsqueeze(1))
    best.fill_(-torch.inf)
    largest = values.max(-1)
    best[:, 0], best_ids[:, 0] = largest.values, largest.indices.int()


def _draw_rows(
    best: torch.Tensor,
    best_ids: torch.Tensor,
    tokens: torch.Tensor,
    future: torch.Tensor,
    table_rows: torch.Tensor,
    *_: int,
    **__: int,
) -> None:
    tokens.copy_(best_ids.gather(1, best.max(-1, keepdim=True).indices).squeeze(1))
    for row, token in zip(table_rows.tolist(), tokens.tolist(), strict=True):
        future[row] = token


def _guess_inputs(
    turn: torch.Tensor,
    limits: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    own_rows: torch.Tensor,
    own_positions: torch.Tensor,
    rotary: torch.Tensor,
    slots: torch.Tensor,
    drawn_keys: torch.Tensor,
    spots: torch.Tensor,
    num_rows: int,
    most_rows: int,
    positions_per_row: int,
    dummy: int,
    lag: int,
    **_: int,
) -> None:
    now = int(turn)
    for row in range(num_rows):
        wants = now < int(limits[row])
        place, position = (int(table_rows[row]), int(positions[row]) + now) if wants else (dummy, lag)
        assert position < positions_per_row
        own_rows[row], own_positions[row] = place, position - lag
        rotary[row], slots[row] = position + offsets[row], table[place, position]
        drawn_keys[row], spots[row] = keys.view(-1)[now * num_rows + row], now * most_rows + row
    turn += 1


def _attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    part_keys: torch.Tensor,
    seen: torch.Tensor | None,
    out: torch.Tensor,
    part_outs: torch.Tensor,
    part_sums: torch.Tensor,
    finished: torch.Tensor,
    query_stride: int,
    table_stride: int,
    scale: float,
    *,
    GROUP: int,
    QUERIES: int,
    KEYS: int,
    **_: int,
) -> None:
    assert query.stride(0) == query_stride
    assert table.stride(0) == table_stride
    assert len(query) == len(table_rows) == len(positions) == QUERIES * len(part_keys)
    assert bool((part_keys >= KEYS).all())
    places, ends = table_rows.view(-1, QUERIES)[:, -1], positions.view(-1, QUERIES)[:, -1]
    assert bool((positions <= ends.repeat_interleave(QUERIES)).all())
    assert seen is not None or QUERIES == 1
    assert seen is None or len(seen) == len(query)
    # All rows at once, as long as the longest: a call for each token was half of what the tests of drafts took.
    length = int(ends.max()) + 1
    cells = pool[table[places, :length].long()].float()  # (rows, keys, 2, kv_heads, dim)
    keys, values = cells.unbind(2)
    grouped = query.float().view(len(places), QUERIES, keys.shape[2], GROUP, keys.shape[3])
    scores = torch.einsum("rqhgd,rkhd->rhgqk", grouped, keys) * (scale * math.log(2))
    known = torch.arange(length).expand(len(places), QUERIES, length)
    hidden = known > ends.view(-1, 1, 1)
    if seen is not None:
        bits = (31 - ends.view(-1, 1, 1) + known).clamp(0, 31)
        hidden = hidden | ((seen.long().view(-1, QUERIES, 1) >> bits) & 1 == 0)
    weights = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)  # nothing is seen
    out.copy_(torch.einsum("rhgqk,rkhd->rqhgd", weights, values).reshape(out.shape))


def import_kernels() -> None:
    """Imports what needs triton, where that is missing too: as long as nobody launches a kernel it will do."""
    if importlib.util.find_spec("triton") is not None:
        return
    triton, language = _Missing("triton"), _Missing("triton.language")
    triton.language = language
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        for name in ("kernels", "decode_kernels", "skinny_kernels", "expert_kernels"):
            importlib.import_module(f"engine.gpu.{name}")
        importlib.import_module("preprocess.blocks.gpu_kernels")
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


class _Missing(ModuleType):
    """A module with whatever is asked of it while others are defined."""

    language: ModuleType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(value: Any = None, *_: object, **__: object) -> Any:
    """As a decorator, with options or without."""
    return _unchanged if value is None else value


def replace_kernels(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, torch computes what the kernels would."""
    from engine.gpu import decode_kernels, kernels
    from preprocess.blocks import gpu_kernels

    plain: dict[str, Callable[..., None]] = {
        "rotate_and_write": _rotate_and_write,
        "gather_slots": _gather_slots,
        "decode_inputs": _decode_inputs,
        "draw_blocks": _draw_blocks,
        "draw_rows": _draw_rows,
        "guess_inputs": _guess_inputs,
    }
    for name, run in plain.items():
        patch.setattr(kernels, name, Kernel(run))
    patch.setattr(gpu_kernels, "_rms_norm", Kernel(_rms_norm))
    patch.setattr(gpu_kernels, "_silu_mul", Kernel(_silu_mul))
    patch.setattr(decode_kernels, "attend", Kernel(_attend))
    patch.setattr("engine.gpu.forward.run_experts", lambda experts, x: experts(x))
