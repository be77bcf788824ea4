"""Triton kernels of a mixture of experts, without their launches: see `engine.gpu.experts`."""

import triton
import triton.language as tl


@triton.jit
def route(
    logits,
    weights,
    chosen,
    ranks,
    counts,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token: its TOP_K likeliest experts, their weights, and which of an expert's tokens it is.

    Ranks depend on which program comes first; results do not, since a row's product is its own.
    """
    token = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    inside = experts < num_experts
    score = tl.load(logits + token * num_experts + experts, mask=inside, other=-float("inf")).to(tl.float32)
    likely = tl.exp(score - tl.max(score, 0))
    likely = tl.where(inside, likely / tl.sum(likely, 0), -1.0)
    left = likely
    total = 0.0
    for _ in tl.static_range(TOP_K):
        best, expert = tl.max(left, 0, return_indices=True)
        total += best
        left = tl.where(experts == expert, -1.0, left)
    left = likely
    for index in tl.static_range(TOP_K):
        best, expert = tl.max(left, 0, return_indices=True)
        left = tl.where(experts == expert, -1.0, left)
        best = best / total
        pair = token * TOP_K + index
        tl.store(weights + pair, best)
        tl.store(chosen + pair, expert)
        tl.store(ranks + pair, tl.atomic_add(counts + expert, 1))


@triton.jit
def _first_row(counts, expert, num_experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where an expert's tokens begin, each expert's padded to whole blocks of ROWS."""
    experts = tl.arange(0, BLOCK)
    before = tl.load(counts + experts, mask=(experts < num_experts) & (experts < expert), other=0)
    return tl.sum((before + ROWS - 1) // ROWS, 0) * ROWS


@triton.jit
def line_up(chosen, ranks, counts, pairs, num_pairs, num_experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program a pair of token and expert: pairs of one expert stand together."""
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair)
    place = _first_row(counts, expert, num_experts, ROWS, BLOCK) + tl.load(ranks + pair)
    tl.store(pairs + place, pair)


@triton.jit
def _block_of(counts, block, num_experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Expert of a block of ROWS, and how many of its rows there are: 0 behind the last block."""
    experts = tl.arange(0, BLOCK)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    blocks = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    own = experts == expert
    first = tl.sum(tl.where(own, ends - blocks, 0), 0)
    rows = tl.sum(tl.where(own, count, 0), 0) - (block - first) * ROWS
    return expert, tl.minimum(rows, ROWS)


@triton.jit
def expert_gate_up(
    x,
    weight,
    out,
    pairs,
    counts,
    num_experts,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[pair] = silu(gate) * up of the pair's token by the pair's expert. weight (experts, 2 inner, hidden)."""
    block = tl.program_id(1)
    expert, rows = _block_of(counts, block, num_experts, ROWS, BLOCK)
    if rows > 0:
        row = tl.arange(0, ROWS)
        pair = tl.load(pairs + block * ROWS + row, mask=row < rows, other=0).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        source = x + (pair // TOP_K)[:, None] * hidden + depth[None, :]
        gates = weight + expert.to(tl.int64) * 2 * inner * hidden + column[None, :] * hidden + depth[:, None]
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, hidden, DEPTH):
            known = depth < hidden - at
            a = tl.load(source + at, mask=(row < rows)[:, None] & known[None, :], other=0.0)
            wanted = (column < inner)[None, :] & known[:, None]
            gate = tl.dot(a, tl.load(gates + at, mask=wanted, other=0.0), gate)
            up = tl.dot(a, tl.load(gates + at + inner * hidden, mask=wanted, other=0.0), up)
        gate = gate.to(x.dtype.element_ty).to(tl.float32)
        up = up.to(x.dtype.element_ty).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
        target = out + pair[:, None] * inner + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < inner)[None, :])


@triton.jit
def expert_down(
    x,
    weight,
    out,
    pairs,
    counts,
    num_experts,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[pair] = x[pair] times the pair's expert's weight, of (experts, hidden, inner)."""
    block = tl.program_id(1)
    expert, rows = _block_of(counts, block, num_experts, ROWS, BLOCK)
    if rows > 0:
        row = tl.arange(0, ROWS)
        pair = tl.load(pairs + block * ROWS + row, mask=row < rows, other=0).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        source = x + pair[:, None] * inner + depth[None, :]
        weights = weight + expert.to(tl.int64) * hidden * inner + column[None, :] * inner + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, inner, DEPTH):
            known = depth < inner - at
            a = tl.load(source + at, mask=(row < rows)[:, None] & known[None, :], other=0.0)
            b = tl.load(weights + at, mask=(column < hidden)[None, :] & known[:, None], other=0.0)
            total = tl.dot(a, b, total)
        target = out + pair[:, None] * hidden + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < hidden)[None, :])


@triton.jit
def combine(x, weights, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = sum of its TOP_K experts' results, weighted, in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        part = tl.load(x + pair * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
