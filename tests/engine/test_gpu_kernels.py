"""Each Triton kernel computes what the torch layers compute, on shapes of real models and on odd ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.batch import RowSampling
from engine.models.experts import Experts, ExpertsConfig
from engine.sampling import noise_key, sample
from preprocess.blocks.linear import Linear
from preprocess.wire import SamplingParams
from tests.engine.gpu import INTERPRETED, KERNEL_DEVICE, needs_triton

pytestmark = needs_triton

TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(KERNEL_DEVICE, dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in float64: rounding of the type, and no more."""
    wanted = expected.double()
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (7, 48), (65, 1536)])
def test_the_sum_is_kept_and_normalised(dtype: torch.dtype, tokens: int, width: int) -> None:
    from preprocess.blocks.gpu_kernels import rms_norm

    x, residual = _random(tokens, width, dtype=dtype), _random(tokens, width, dtype=dtype, seed=1)
    weight = _random(width, dtype=dtype, seed=2)
    total = x + residual
    kept = residual.clone()
    normed = rms_norm(x, weight, 1e-6, into=kept)
    assert torch.equal(kept, total)
    _close(normed, F.rms_norm(total.double(), [width], weight.double(), 1e-6), dtype)
    untouched = kept.clone()
    assert torch.equal(rms_norm(kept, weight, 1e-6), normed)
    assert torch.equal(kept, untouched)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("tokens", "width"), [(3, 1152), (9, 48), (70, 1280)])
def test_a_sum_and_its_norm_go_where_they_are_wanted(dtype: torch.dtype, kind: str, tokens: int, width: int) -> None:
    """And what is summed up stays as it is."""
    from preprocess.blocks.gpu_kernels import layer_norm, rms_norm

    def norm(x: torch.Tensor, **places: Any) -> torch.Tensor:
        weight, bias = _random(2, width, dtype=dtype, seed=2)
        return rms_norm(x, weight, 1e-6, **places) if kind == "rms" else layer_norm(x, weight, bias, 1e-6, **places)

    x, y = _random(tokens, width, dtype=dtype), _random(tokens, width, dtype=dtype, seed=1)
    before = x.clone(), y.clone()
    out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    assert norm(x, into=y, out=out) is out[1]
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert torch.equal(out[1], norm(x, into=y))
    assert torch.equal(out[0], y)
    assert torch.equal(out[1], norm(out[0]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 16, 8, 128), (70, 16, 8, 128), (5, 3, 1, 20), (66, 9, 3, 64), (80, 28, 4, 128)],
)
def test_heads_are_normalised_rotated_and_written(
    dtype: torch.dtype, norm: bool, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    from engine.gpu.ops import rotate_and_write

    qkv = _random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weight = _random(heads + kv_heads, dim, dtype=dtype, seed=1)
    angles = _random(tokens, 1, dim // 2, dtype=torch.float32, seed=2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    slots = (torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(3))[:tokens]).int().to(KERNEL_DEVICE)
    pool = torch.full((2 * tokens, 2, kv_heads, dim), 7.0, device=KERNEL_DEVICE, dtype=dtype)

    wanted = qkv.double()
    qk = wanted[:, : heads + kv_heads]
    if norm:
        qk = (F.rms_norm(qk, [dim], eps=1e-6) * weight.double()).to(dtype).double()
    qk = qk * cos.double() + qk.roll(dim // 2, -1) * sin.double()

    query = rotate_and_write(
        qkv, (cos, sin), slots, pool, num_kv_heads=kv_heads, norm_weight=weight if norm else None, eps=1e-6
    )
    _close(query, qk[:, :heads], dtype)
    _close(pool[slots.long(), 0], qk[:, heads:], dtype)
    assert torch.equal(pool[slots.long(), 1].double(), wanted[:, heads + kv_heads :])
    others = torch.ones(2 * tokens, dtype=torch.bool, device=KERNEL_DEVICE)
    others[slots.long()] = False
    assert (pool[others] == 7.0).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", [2, 3])
def test_heads_in_parts_are_their_sum(dtype: torch.dtype, parts: int) -> None:
    from engine.gpu.ops import rotate_and_write

    tokens, heads, kv_heads, dim = 7, 4, 2, 64
    split = _random(parts, tokens, heads + 2 * kv_heads, dim, dtype=torch.float32)
    weight = _random(heads + kv_heads, dim, dtype=dtype, seed=1)
    rotation = _random(tokens, 1, dim, dtype=dtype, seed=2), _random(tokens, 1, dim, dtype=dtype, seed=3)
    slots = torch.arange(tokens, dtype=torch.int32, device=KERNEL_DEVICE)
    results = []
    for qkv in (split, split.sum(0).to(dtype)):
        pool = torch.zeros((tokens, 2, kv_heads, dim), device=KERNEL_DEVICE, dtype=dtype)
        query = rotate_and_write(qkv, rotation, slots, pool, num_kv_heads=kv_heads, norm_weight=weight, eps=1e-6)
        assert query.dtype is dtype
        results.append((query, pool))
    (query, pool), (wanted_query, wanted_pool) = results
    _close(query, wanted_query, dtype)
    _close(pool, wanted_pool, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 6144), (3, 100), (65, 1500)])
def test_gates_close(dtype: torch.dtype, tokens: int, inner: int) -> None:
    from preprocess.blocks.gpu_kernels import silu_mul

    both = _random(tokens, 2 * inner, dtype=dtype)
    _close(silu_mul(both), F.silu(both[:, :inner].double()) * both[:, inner:].double(), dtype)
    bias = _random(2 * inner, dtype=dtype, seed=1)
    gate, up = (both.double() + bias.double()).chunk(2, dim=1)
    _close(silu_mul(both, bias), F.silu(gate) * up, dtype)


def test_slots_of_several_sequences_stand_in_line() -> None:
    from engine.gpu.ops import gather_slots

    table = torch.arange(6 * 5000, dtype=torch.int32, device=KERNEL_DEVICE).view(6, 5000)
    rows, lengths = [4, 0, 5, 2], [4999, 1, 513, 0]
    indptr = torch.tensor([0, *lengths]).cumsum(0).int().to(KERNEL_DEVICE)
    out = torch.full((sum(lengths) + 3,), -1, dtype=torch.int32, device=KERNEL_DEVICE)
    gather_slots(table, torch.tensor(rows, dtype=torch.int32, device=KERNEL_DEVICE), indptr, out)
    wanted = torch.cat([table[row, :length] for row, length in zip(rows, lengths, strict=True)])
    assert torch.equal(out[: sum(lengths)], wanted)
    assert (out[sum(lengths) :] == -1).all()


def test_inputs_come_from_the_host_or_from_the_last_step() -> None:
    from engine.gpu.ops import decode_inputs

    table = torch.arange(200 * 30, dtype=torch.int32, device=KERNEL_DEVICE).view(200, 30)
    future = torch.arange(1000, 1200, device=KERNEL_DEVICE)
    rows = torch.arange(199, 49, -1, dtype=torch.int32, device=KERNEL_DEVICE)
    ids = torch.where(rows % 3 == 0, -1, rows)
    positions = rows % 30
    tokens, slots = torch.empty_like(future[: len(rows)]), torch.empty_like(rows)
    decode_inputs(ids, rows, positions, future, table, tokens, slots)
    assert torch.equal(tokens, torch.where(rows % 3 == 0, 1000 + rows, rows).long())
    assert torch.equal(slots, table[rows.long(), positions.long()])


@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (5, 300), (64, 5000)])
def test_draws_are_those_of_the_torch_sampler(rows: int, vocab: int) -> None:
    """Greedy and at several temperatures, with numbers that are none among the logits."""
    from engine.gpu.sampling import draw, is_plain, temperature_of

    logits = 3 * _random(rows, vocab, dtype=torch.float32)
    logits[0, 17] = torch.nan
    logits[rows - 1, 5] = torch.inf if rows > 1 else 3.0
    wanted = [
        RowSampling(SamplingParams(max_tokens=9, temperature=[0.0, 0.3, 1.0, 2.5][row % 4], seed=row * 77), row % 5)
        for row in range(rows)
    ]
    assert all(is_plain(row) for row in wanted)
    tokens = torch.full((rows,), -1, dtype=torch.long, device=KERNEL_DEVICE)
    temperatures = torch.tensor([temperature_of(row.params) for row in wanted], device=KERNEL_DEVICE)
    keys = torch.tensor([noise_key(row) for row in wanted], device=KERNEL_DEVICE)
    future = torch.full((rows + 1,), -1, device=KERNEL_DEVICE)
    places = torch.arange(rows, 0, -1, dtype=torch.int32, device=KERNEL_DEVICE)
    draw(logits, temperatures, keys, tokens, future, places)
    assert tokens.tolist() == [token.token_id for token in sample(logits, wanted)]
    assert future.tolist() == [-1, *reversed(tokens.tolist())]


@pytest.mark.skipif(INTERPRETED, reason="pinned memory needs a device")
def test_bounded_draws_are_those_of_the_torch_sampler() -> None:
    from engine.gpu.sampling import draw_bounded, is_bounded

    logits = 3 * _random(32, 5000, dtype=torch.float32)
    wanted = [
        RowSampling(
            SamplingParams(max_tokens=9, temperature=0.7, top_k=1 + 9 * (row % 8), top_p=[0.8, 1.0][row % 2], seed=row),
            row,
        )
        for row in range(32)
    ]
    assert all(is_bounded(row) for row in wanted)
    assert draw_bounded(logits, wanted).tolist() == [token.token_id for token in sample(logits, wanted)]


def _experts(dtype: torch.dtype, count: int, top_k: int, hidden: int, inner: int) -> Experts:
    scale = hidden**-0.5
    gate_up = scale * _random(count, 2 * inner, hidden, dtype=dtype)
    down = scale * _random(count, hidden, inner, dtype=dtype, seed=1)
    router = Linear(_random(count, hidden, dtype=dtype, seed=2))
    experts = Experts(router, gate_up, down, ExpertsConfig(count, top_k, inner, step=1, plain_layers=()))
    experts.stacked = gate_up, down
    return experts


def _as_layer(experts: Experts, x: torch.Tensor, result: torch.Tensor) -> None:
    """A result is what the layer says, or parts of it."""
    wanted = experts(x).double()
    whole = result.double().sum(0) if result.dim() == 3 else result.double()
    assert whole.shape == x.shape
    limit = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}[x.dtype]
    assert (whole - wanted).norm() / wanted.norm() < limit


@pytest.mark.parametrize("dtype", TYPES if INTERPRETED else TYPES[1:])  # float32 products would be in tf32
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner"),
    [(1, 16, 4, 96, 40), (4, 6, 2, 48, 24), (5, 16, 4, 96, 40), (37, 6, 2, 48, 24), (200, 8, 3, 64, 72)],
)
def test_experts_are_those_that_the_layer_would_ask(
    dtype: torch.dtype, tokens: int, count: int, top_k: int, hidden: int, inner: int
) -> None:
    from engine.gpu.experts import FEW_TOKENS, MOST_PARTS, run_experts

    assert FEW_TOKENS in {1, 2, 3, 4}
    experts = _experts(dtype, count, top_k, hidden, inner)
    x = _random(tokens, hidden, dtype=dtype, seed=3)
    result = run_experts(experts, x)
    assert result.dim() == (3 if tokens <= MOST_PARTS else 2)
    _as_layer(experts, x, result)


@pytest.mark.parametrize("dtype", TYPES if INTERPRETED else TYPES[1:])
@pytest.mark.parametrize("tokens", [1, 8])
def test_experts_are_the_same_by_pairs_and_by_blocks_of_pairs(dtype: torch.dtype, tokens: int) -> None:
    """With every kind of tiles, summed up or in parts, and where tokens share experts."""
    from engine.gpu.experts import FEW, MANY, ROUTER, SOME, run_blocks, run_pairs

    experts = _experts(dtype, 6, 3, 80, 40)
    x = _random(tokens, 80, dtype=dtype, seed=3)
    _as_layer(experts, x, run_pairs(experts, x, FEW, ROUTER))
    for tiles in (FEW, SOME, MANY):
        for in_parts in (False, True):
            _as_layer(experts, x, run_blocks(experts, x, tiles, in_parts=in_parts))


@pytest.mark.parametrize("by_pairs", [True, False])
def test_experts_that_are_liked_alike_are_taken_once_each(by_pairs: bool) -> None:
    """Where scores are no numbers only that token is wrong: no expert is asked that is not there."""
    from engine.gpu.experts import FEW, ROUTER, SOME, run_blocks, run_pairs

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    experts = _experts(dtype, 6, 3, 64, 24)
    assert experts.stacked is not None
    experts.router = Linear(torch.zeros(6, 64, dtype=dtype, device=KERNEL_DEVICE))
    x = _random(3, 64, dtype=dtype, seed=3)
    x[1] = torch.nan
    run = run_pairs(experts, x, FEW, ROUTER) if by_pairs else run_blocks(experts, x, SOME, in_parts=True)
    gate_up, down = (part[:3].double() for part in experts.stacked)
    for token in (0, 2):
        gate, up = (gate_up @ x[token].double()).chunk(2, dim=1)  # (3, inner) each
        wanted = (down @ (F.silu(gate) * up)[:, :, None])[:, :, 0].mean(0)
        assert (run[:, token].double().sum(0) - wanted).norm() / wanted.norm() < 1e-2
    assert run[:, 1].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(50, 9, 24), (5, 16, 72), (1, 16, 64)])
def test_heads_of_encoders_turn(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    from preprocess.blocks.gpu_kernels import rotate_heads_

    qkv = _random(2, tokens, 3 * heads, dim, dtype=dtype)
    cos, sin = _random(2, tokens, 1, dim, dtype=dtype, seed=1)
    wanted = qkv.double()
    both = wanted[:, :, : 2 * heads]
    turned = both * cos.double() + both.roll(dim // 2, -1) * sin.double()
    rotate_heads_(qkv[:, :, : 2 * heads], cos, sin)
    _close(qkv[:, :, : 2 * heads], turned, dtype)
    assert torch.equal(qkv[:, :, 2 * heads :].double(), wanted[:, :, 2 * heads :])


@pytest.mark.parametrize("dtype", TYPES)
def test_layers_of_encoders_are_normalised(dtype: torch.dtype) -> None:
    from preprocess.blocks.gpu_kernels import layer_norm

    x, y = _random(2, 33, 1152, dtype=dtype), _random(2, 33, 1152, dtype=dtype, seed=1)
    weight, bias = _random(1152, dtype=dtype, seed=2), _random(1152, dtype=dtype, seed=3)
    exact = weight.double(), bias.double(), 1e-6
    _close(layer_norm(x, weight, bias, 1e-6), F.layer_norm(x.double(), [1152], *exact), dtype)
    total = x + y
    normed = layer_norm(x, weight, bias, 1e-6, into=y)
    assert torch.equal(y, total)
    _close(normed, F.layer_norm(total.double(), [1152], *exact), dtype)


@pytest.mark.parametrize("dtype", TYPES if INTERPRETED else TYPES[1:])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "splits", "rows"),
    [(1, 96, 128, 1, 16), (5, 64, 512, 2, 16), (8, 50, 300, 3, 16), (33, 96, 192, 1, 32), (100, 200, 300, 2, 64)],
)
def test_few_rows_are_multiplied_as_many_are(
    dtype: torch.dtype, tokens: int, outputs: int, inputs: int, splits: int, rows: int, turned: bool
) -> None:
    from engine.gpu.skinny import Tiles, skinny, skinny_gate_up

    columns = 64 if turned else 16
    tiles = Tiles(columns=columns, depth=64, splits=splits, warps=4, stages=2, rows=rows, turned=turned)
    x, weight = _random(tokens, inputs, dtype=dtype), _random(outputs, inputs, dtype=dtype, seed=1)
    bias = _random(outputs, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    for added, wanted in ((None, exact), (bias, exact + bias.double())):
        parts = skinny(x, weight, added, tiles)
        whole = parts.sum(0) if splits > 1 else parts
        _close(whole, wanted, torch.float32 if splits > 1 and not INTERPRETED else dtype)
        gate, up = wanted.chunk(2, dim=1)
        _close(skinny_gate_up(x, weight, added, tiles), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("hidden", "inner", "heads"), [(2048, 6144, 4096), (2048, 11008, 2560), (4096, 12288, 6144)])
def test_tiles_fit_and_every_part_has_something_to_do(rows: int, hidden: int, inner: int, heads: int) -> None:
    """Tiles of few rows fit into what the least device has, 99 KiB, those of more into what is asked for."""
    from engine.gpu import skinny

    least = 99 << 10 if rows <= skinny.FEW_ROWS else skinny.LARGE_SHARED
    products = [
        (skinny.gate_up_tiles(rows, inner), hidden, 2, least),
        (skinny.residual_tiles(rows, hidden, hidden), hidden, 1, least),
        (skinny.residual_tiles(rows, hidden, inner), inner, 1, least),
    ]
    if rows <= skinny.SOME_ROWS:
        products.append((skinny.heads_tiles(rows, heads, hidden), hidden, 1, skinny.LARGE_SHARED))
    for tiles, inputs, weights, limit in products:
        assert rows <= tiles.rows < 4 * max(rows, 8)
        part = -(-inputs // (tiles.splits * tiles.depth)) * tiles.depth
        assert part * (tiles.splits - 1) < inputs
        shared = (tiles.rows + weights * tiles.columns) * tiles.depth * tiles.stages * 2
        assert shared < limit
