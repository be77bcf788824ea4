"""Triton kernels of a mixture of experts, without their launches: see `engine.gpu.experts`."""

import triton
import triton.language as tl


@triton.jit
def _likeliest(
    logits, x, token, num_tokens, num_experts, TOP_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """All experts as a token's router sees them: their indices, their places in its order, and the weights of those at
    a place below TOP_K. Logits come in parts (SPLITS, tokens, experts), whose sum is rounded to the type of `x`.

    Of equal ones the first goes first, and what is no number goes last: places are a permutation whatever comes.
    """
    experts = tl.arange(0, BLOCK)
    inside = experts < num_experts
    score = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = logits + (split * num_tokens + token) * num_experts + experts
        score += tl.load(part, mask=inside, other=0.0).to(tl.float32)
    score = score.to(x.dtype.element_ty).to(tl.float32)
    score = tl.where(inside & (score == score), score, -float("inf"))
    larger = score[None, :] > score[:, None]
    earlier = (score[None, :] == score[:, None]) & (experts[None, :] < experts[:, None])
    place = tl.sum((larger | earlier).to(tl.int32), 1)
    likely = tl.where(place < TOP_K, tl.exp(score - tl.max(score, 0)), 0.0)
    return experts, place, likely / tl.sum(likely, 0)


@triton.jit
def route(
    logits,
    x,
    weights,
    chosen,
    ranks,
    counts,
    num_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token: its TOP_K likeliest experts, their weights, and which of an expert's tokens it is.

    Ranks depend on which program comes first; results do not, since a row's product is its own.
    """
    token = tl.program_id(0)
    experts, place, weight = _likeliest(logits, x, token, num_tokens, num_experts, TOP_K, SPLITS, BLOCK)
    wanted = place < TOP_K
    pair = token * TOP_K + place
    tl.store(weights + pair, weight, mask=wanted)
    tl.store(chosen + pair, experts, mask=wanted)
    tl.store(ranks + pair, tl.atomic_add(counts + experts, 1, mask=wanted), mask=wanted)


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
def _block_of(counts, pairs, block, num_experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Expert of a block of ROWS that stand together, how many of its rows there are, none behind the last block, and
    which pair each is.
    """
    experts = tl.arange(0, BLOCK)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    blocks = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    own = experts == expert
    first = tl.sum(tl.where(own, ends - blocks, 0), 0)
    rows = tl.minimum(tl.sum(tl.where(own, count, 0), 0) - (block - first) * ROWS, ROWS)
    row = tl.arange(0, ROWS)
    return expert, rows, tl.load(pairs + block * ROWS + row, mask=row < rows, other=0).to(tl.int64)


@triton.jit
def _gate_up(
    x,
    weight,
    out,
    expert,
    pair,
    rows,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[pair] = silu(gate) * up of the tokens of `rows` pairs by one expert. weight (experts, 2 inner, hidden)."""
    row = tl.arange(0, ROWS)
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
    """`_gate_up` of a block of pairs that stand together."""
    block = tl.program_id(1)
    expert, rows, pair = _block_of(counts, pairs, block, num_experts, ROWS, BLOCK)
    if rows > 0:
        _gate_up(x, weight, out, expert, pair, rows, hidden, inner, TOP_K, ROWS, COLUMNS, DEPTH)


@triton.jit
def choose_gate_up(
    x,
    weight,
    out,
    logits,
    chosen,
    weights,
    num_tokens,
    num_experts,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_gate_up` of one pair, whose expert each program finds out for itself; the first of them writes it down."""
    block = tl.program_id(1)
    experts, place, weight_of = _likeliest(logits, x, block // TOP_K, num_tokens, num_experts, TOP_K, SPLITS, BLOCK)
    own = place == block % TOP_K
    expert = tl.sum(tl.where(own, experts, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(chosen + block, expert)
        tl.store(weights + block, tl.sum(tl.where(own, weight_of, 0.0), 0))
    pair = (tl.zeros((ROWS,), tl.int32) + block).to(tl.int64)
    _gate_up(x, weight, out, expert, pair, 1, hidden, inner, TOP_K, ROWS, COLUMNS, DEPTH)


@triton.jit
def _down(
    x,
    weight,
    out,
    weights,
    expert,
    pair,
    rows,
    num_tokens,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    TOP_K: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[pair] = x[pair] times one expert's weight, of (experts, hidden, inner), for `rows` pairs.

    IN_PARTS: times the pair's own weight besides, float32 (TOP_K, tokens, hidden), to be summed up by whoever reads it.
    """
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    source = x + pair[:, None] * inner + depth[None, :]
    matrix = weight + expert.to(tl.int64) * hidden * inner + column[None, :] * inner + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, inner, DEPTH):
        known = depth < inner - at
        a = tl.load(source + at, mask=(row < rows)[:, None] & known[None, :], other=0.0)
        b = tl.load(matrix + at, mask=(column < hidden)[None, :] & known[:, None], other=0.0)
        total = tl.dot(a, b, total)
    place = pair
    if IN_PARTS:
        place = pair % TOP_K * num_tokens + pair // TOP_K
        total = total.to(x.dtype.element_ty).to(tl.float32)  # as a product's result is rounded
        total *= tl.load(weights + pair, mask=row < rows, other=0.0)[:, None]
    target = out + place[:, None] * hidden + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < hidden)[None, :])


@triton.jit
def expert_down(
    x,
    weight,
    out,
    weights,
    pairs,
    counts,
    num_tokens,
    num_experts,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    TOP_K: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_down` of a block of pairs that stand together."""
    block = tl.program_id(1)
    expert, rows, pair = _block_of(counts, pairs, block, num_experts, ROWS, BLOCK)
    if rows > 0:
        _down(
            x,
            weight,
            out,
            weights,
            expert,
            pair,
            rows,
            num_tokens,
            inner,
            hidden,
            TOP_K,
            IN_PARTS,
            ROWS,
            COLUMNS,
            DEPTH,
        )


@triton.jit
def chosen_down(
    x,
    weight,
    out,
    weights,
    chosen,
    num_tokens,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`_down` of one pair, in parts."""
    block = tl.program_id(1)
    expert = tl.load(chosen + block)
    pair = (tl.zeros((ROWS,), tl.int32) + block).to(tl.int64)
    _down(x, weight, out, weights, expert, pair, 1, num_tokens, inner, hidden, TOP_K, True, ROWS, COLUMNS, DEPTH)


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
