"""A mixture of experts in five launches, none of which asks the host which experts were chosen.

    route ─▶ line up pairs by expert ─▶ gate, up and silu of each block of pairs ─▶ down ─▶ weighted sum

A pair is a token and one of its experts. Pairs of an expert stand in blocks of as many rows as a tile of the product
has, so that an expert's weights are read once for all of its tokens (grouped matrix products, arXiv:2211.15841).
"""

from __future__ import annotations

import torch

from engine.gpu import expert_kernels
from engine.models.experts import Experts


def run_experts(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """`Experts.__call__` on a GPU: (tokens, hidden) → the same."""
    assert experts.stacked is not None
    gate_up, down = experts.stacked  # (experts, 2 * inner, hidden), (experts, hidden, inner)
    tokens, hidden = x.shape
    count, inner, top_k = gate_up.shape[0], gate_up.shape[1] // 2, experts.top_k
    num_pairs = tokens * top_k
    device = x.device
    rows = 16 if num_pairs <= 16 * count else 64
    num_blocks = min(num_pairs, -(-num_pairs // rows) + count)
    block = 1 << (count - 1).bit_length()
    logits = experts.router(x)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    chosen = torch.empty(num_pairs, dtype=torch.int32, device=device)
    ranks = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    pairs = torch.empty(num_blocks * rows, dtype=torch.int32, device=device)
    expert_kernels.route[(tokens,)](
        logits,
        weights,
        chosen,
        ranks,
        counts,
        count,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=1,
    )
    expert_kernels.line_up[(num_pairs,)](
        chosen, ranks, counts, pairs, num_pairs, count, ROWS=rows, BLOCK=block, num_warps=1
    )
    activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=device)
    columns, depth = (32, 128) if rows == 16 else (64, 64)
    expert_kernels.expert_gate_up[(-(-inner // columns), num_blocks)](
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
        COLUMNS=columns,
        DEPTH=depth,
        BLOCK=block,
        num_warps=4,
        num_stages=3,
    )
    results = torch.empty((num_pairs, hidden), dtype=x.dtype, device=device)
    columns = 64 if rows == 16 else 128
    expert_kernels.expert_down[(-(-hidden // columns), num_blocks)](
        activated,
        down,
        results,
        pairs,
        counts,
        count,
        inner,
        hidden,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        BLOCK=block,
        num_warps=4,
        num_stages=3,
    )
    out = torch.empty_like(x)
    width = min(1024, 1 << (hidden - 1).bit_length())
    expert_kernels.combine[(tokens, -(-hidden // width))](
        results, weights, out, hidden, TOP_K=top_k, BLOCK=width, num_warps=4
    )
    return out
