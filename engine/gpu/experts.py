"""A mixture of experts in a few launches, none of which asks the host which experts were chosen.

A pair is a token and one of its experts. Few tokens hardly ever share an expert, so each pair is a product of its own:

    router, in parts ─▶ choose, gate, up and silu of each pair ─▶ down, in parts

With more, pairs of an expert stand in blocks of as many rows as a tile of the product has, so that an expert's weights
are read once for all of its tokens (grouped matrix products, arXiv:2211.15841):

    router ─▶ route ─▶ line up pairs by expert ─▶ gate, up and silu of each block ─▶ down ─▶ weighted sum

Parts are for the norm that follows, which sums them up: see `engine.gpu.skinny.add_parts_rms_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.gpu import expert_kernels
from engine.gpu.skinny import Tiles, skinny
from engine.models.experts import Experts
from preprocess.blocks.fusion import power_of_two

FEW_TOKENS: Final = 4
"""So many rarely share an expert: 4 tokens that take 8 of 128 each read 6 % less where they do."""

MOST_PARTS: Final = 64
"""With more tokens their parts, float32, are no longer cheaper than a pass that sums them up."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How the products of a step's experts are cut; `rows` of both: the pairs that a tile has room for."""

    rows: int
    gate_up: Tiles
    down: Tiles


ROUTER: Final = Tiles(columns=16, depth=128, splits=8, warps=4, stages=2)
FEW: Final = ExpertTiles(16, Tiles(columns=32, depth=128, stages=3), Tiles(columns=32, depth=128, stages=3))
SOME: Final = ExpertTiles(16, Tiles(columns=32, depth=128, stages=3), Tiles(columns=64, depth=128, stages=3))
MANY: Final = ExpertTiles(64, Tiles(columns=64, depth=64, stages=3), Tiles(columns=128, depth=64, stages=3))


def tiles_for(tokens: int, top_k: int, num_experts: int) -> ExpertTiles:
    """By how many tokens an expert gets."""
    if tokens <= FEW_TOKENS:
        return FEW
    return SOME if tokens * top_k <= 16 * num_experts else MANY


def run_experts(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """`Experts.__call__` on a GPU: (tokens, hidden) → the same, or float32 parts of it, (top_k, tokens, hidden)."""
    tiles = tiles_for(len(x), experts.top_k, experts.router.outputs)
    if len(x) <= FEW_TOKENS and experts.router.bias is None:
        return run_pairs(experts, x, tiles, ROUTER)
    return run_blocks(experts, x, tiles, in_parts=len(x) <= MOST_PARTS)


def run_pairs(experts: Experts, x: torch.Tensor, tiles: ExpertTiles, router: Tiles) -> torch.Tensor:
    """Each pair by itself: float32 parts (top_k, tokens, hidden)."""
    assert experts.stacked is not None
    gate_up, down = experts.stacked  # (experts, 2 * inner, hidden), (experts, hidden, inner)
    tokens, hidden = x.shape
    count, inner, top_k = gate_up.shape[0], gate_up.shape[1] // 2, experts.top_k
    num_pairs = tokens * top_k
    logits = skinny(x, experts.router.weight, None, router)
    chosen = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
    activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    expert_kernels.choose_gate_up[(-(-inner // tiles.gate_up.columns), num_pairs)](
        x,
        gate_up,
        activated,
        logits,
        chosen,
        weights,
        tokens,
        count,
        hidden,
        inner,
        TOP_K=top_k,
        SPLITS=router.splits,
        ROWS=tiles.rows,
        COLUMNS=tiles.gate_up.columns,
        DEPTH=tiles.gate_up.depth,
        BLOCK=power_of_two(count),
        num_warps=tiles.gate_up.warps,
        num_stages=tiles.gate_up.stages,
    )
    parts = torch.empty((top_k, tokens, hidden), dtype=torch.float32, device=x.device)
    expert_kernels.chosen_down[(-(-hidden // tiles.down.columns), num_pairs)](
        activated,
        down,
        parts,
        weights,
        chosen,
        tokens,
        inner,
        hidden,
        TOP_K=top_k,
        ROWS=tiles.rows,
        COLUMNS=tiles.down.columns,
        DEPTH=tiles.down.depth,
        num_warps=tiles.down.warps,
        num_stages=tiles.down.stages,
    )
    return parts


def run_blocks(experts: Experts, x: torch.Tensor, tiles: ExpertTiles, *, in_parts: bool) -> torch.Tensor:
    """Pairs of an expert together: (tokens, hidden), or float32 parts (top_k, tokens, hidden) of it."""
    assert experts.stacked is not None
    gate_up, down = experts.stacked
    tokens, hidden = x.shape
    count, inner, top_k = gate_up.shape[0], gate_up.shape[1] // 2, experts.top_k
    num_pairs = tokens * top_k
    device = x.device
    rows = tiles.rows
    num_blocks = min(num_pairs, -(-num_pairs // rows) + count)
    block = power_of_two(count)
    logits = experts.router(x)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    chosen = torch.empty(num_pairs, dtype=torch.int32, device=device)
    ranks = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    pairs = torch.empty(num_blocks * rows, dtype=torch.int32, device=device)
    expert_kernels.route[(tokens,)](
        logits,
        x,
        weights,
        chosen,
        ranks,
        counts,
        tokens,
        count,
        TOP_K=top_k,
        SPLITS=1,
        BLOCK=block,
        num_warps=4,
    )
    expert_kernels.line_up[(num_pairs,)](
        chosen, ranks, counts, pairs, num_pairs, count, ROWS=rows, BLOCK=block, num_warps=1
    )
    activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=device)
    expert_kernels.expert_gate_up[(-(-inner // tiles.gate_up.columns), num_blocks)](
        x,
        gate_up,
        activated,
        pairs,
        counts,
        count,
        hidden,
        inner,
        TOP_K=top_k,
        ROWS=rows,
        COLUMNS=tiles.gate_up.columns,
        DEPTH=tiles.gate_up.depth,
        BLOCK=block,
        num_warps=tiles.gate_up.warps,
        num_stages=tiles.gate_up.stages,
    )
    shape = (top_k, tokens, hidden) if in_parts else (num_pairs, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=device)
    expert_kernels.expert_down[(-(-hidden // tiles.down.columns), num_blocks)](
        activated,
        down,
        results,
        weights,
        pairs,
        counts,
        tokens,
        count,
        inner,
        hidden,
        TOP_K=top_k,
        IN_PARTS=in_parts,
        ROWS=rows,
        COLUMNS=tiles.down.columns,
        DEPTH=tiles.down.depth,
        BLOCK=block,
        num_warps=tiles.down.warps,
        num_stages=tiles.down.stages,
    )
    if in_parts:
        return results
    out = torch.empty_like(x)
    width = min(1024, power_of_two(hidden))
    expert_kernels.combine[(tokens, -(-hidden // width))](
        results, weights, out, hidden, TOP_K=top_k, BLOCK=width, num_warps=4
    )
    return out
