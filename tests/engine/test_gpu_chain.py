"""Kernels that are launched before the last one has ended compute what they compute one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.engine.gpu import needs_gpu

pytestmark = needs_gpu

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 2048, 3072, 16, 8, 128, 6
KEYS = 700


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_a_chain_of_layers_gives_the_same_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph, replayed often; a library's products stand between. Each layer reads the keys it has just written."""
    import numpy as np

    from engine.gpu.decode_attention import DecodeAttention, DecodeRows, part_keys
    from engine.gpu.graph import Graph, GraphMemory
    from engine.gpu.ops import rotate_and_write
    from engine.gpu.skinny import GATE_UP, TO_RESIDUAL, add_parts_rms_norm, skinny, skinny_gate_up
    from preprocess.blocks.gpu_kernels import rms_norm, silu_mul

    qkv_weight = _random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed=1) * HIDDEN**-0.5
    out_weight = _random(HIDDEN, HEADS * DIM, seed=2) * HIDDEN**-0.5
    up_weight = _random(2 * INNER, HIDDEN, seed=3) * HIDDEN**-0.5
    down_weight = _random(HIDDEN, INNER, seed=4) * INNER**-0.5
    gain, head_gain = _random(HIDDEN, seed=5), _random(HEADS + KV_HEADS, DIM, seed=6)
    pool = _random(LAYERS, 1 + rows * KEYS, 2, KV_HEADS, DIM, seed=7)
    table = torch.arange(1, 1 + rows * KEYS, dtype=torch.int32, device="cuda").view(rows, KEYS)
    lengths = np.array([KEYS - 31 * row % 600 for row in range(rows)], np.int32)
    positions = torch.from_numpy(lengths - 1).cuda()
    places = torch.arange(rows, dtype=torch.int32, device="cuda")
    slots = table[places.long(), positions.long()]
    angles = _random(rows, 1, DIM, seed=8)
    attention = DecodeAttention(pool, table, HEADS, most_rows=rows)
    decoding = DecodeRows(places, positions, torch.from_numpy(part_keys(lengths, KV_HEADS)).cuda())
    start = _random(rows, HIDDEN, seed=9)

    def chain() -> torch.Tensor:
        x = start.clone()
        normed = rms_norm(x, gain, 1e-6)
        for layer in range(LAYERS):
            qkv = torch.nn.functional.linear(normed, qkv_weight).view(rows, -1, DIM)
            query = rotate_and_write(
                qkv, (angles, angles), slots, pool[layer], num_kv_heads=KV_HEADS, norm_weight=head_gain, eps=1e-6
            )
            attended = torch.empty((rows, HEADS, DIM), dtype=x.dtype, device="cuda")
            attention.read(layer, decoding, query, attended)
            if rows <= 8:
                normed = add_parts_rms_norm(skinny(attended.flatten(1), out_weight, None, TO_RESIDUAL), x, gain, 1e-6)
                parts = skinny(skinny_gate_up(normed, up_weight, None, GATE_UP), down_weight, None, TO_RESIDUAL)
                normed = add_parts_rms_norm(parts, x, gain, 1e-6)
            else:
                added = torch.nn.functional.linear(attended.flatten(1), out_weight)
                normed = rms_norm(added, gain, 1e-6, into=x)
                activated = silu_mul(torch.nn.functional.linear(normed, up_weight))
                normed = rms_norm(torch.nn.functional.linear(activated, down_weight), gain, 1e-6, into=x)
        return x

    with torch.inference_mode():
        wanted = chain()
        monkeypatch.setattr("engine.gpu.chain.EARLY", True)
        assert torch.equal(chain(), wanted)
        graph = Graph(chain, GraphMemory())
        for _ in range(200):
            pool[torch.arange(LAYERS, device="cuda")[:, None], slots.long()] = 0  # what a layer has to write in time
            graph.replay()
            assert torch.equal(graph.result, wanted)
    assert wanted.isfinite().all()
