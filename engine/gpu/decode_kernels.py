"""The Triton kernel of attention for rows of few tokens, without its launch: see `engine.gpu.decode_attention`."""

import triton
import triton.language as tl

# What a query that sees none of a block's keys has for a score: finite, so that no difference of two is undefined, and
# weighs nothing beside a key that is seen.
UNSEEN = tl.constexpr(-1.0e30)


@triton.jit
def write(
    result,
    out,
    row,
    head,
    TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
):
    """The queries of a row and key head, (TILE, DIM), to where `out` (tokens, heads, DIM) has them."""
    tile = tl.arange(0, TILE)
    token = (row * QUERIES + tile // GROUP).to(tl.int64)
    query_head = head * GROUP + tile % GROUP
    target = out + (token * (KV_HEADS * GROUP) + query_head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(tile < QUERIES * GROUP)[:, None])


@triton.jit
def put_together(part_outs, part_sums, used, is_query, FILLED: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr):
    """What `used` parts make together: outs (parts, FILLED, DIM) and log2 of their sums (parts, FILLED)."""
    filled = tl.arange(0, FILLED)
    cells = filled[:, None] * DIM + tl.arange(0, DIM)[None, :]
    highest = tl.full((FILLED,), UNSEEN, tl.float32)
    total = tl.zeros((FILLED,), tl.float32)
    mean = tl.zeros((FILLED, DIM), tl.float32)
    for begin in range(0, used, AT_ONCE):  # all loads of so many parts are in flight together
        higher = highest
        for index in tl.static_range(AT_ONCE):
            there = is_query & (begin + index < used)
            sums = part_sums + (begin + index) * FILLED + filled
            higher = tl.maximum(higher, tl.load(sums, mask=there, other=UNSEEN, cache_modifier=".cg"))
        kept = tl.exp2(highest - higher)
        total *= kept
        mean *= kept[:, None]
        for index in tl.static_range(AT_ONCE):
            there = is_query & (begin + index < used)
            sums = part_sums + (begin + index) * FILLED + filled
            outs = part_outs + (begin + index) * (FILLED * DIM) + cells
            weight = tl.exp2(tl.load(sums, mask=there, other=UNSEEN, cache_modifier=".cg") - higher)
            total += weight
            mean += weight[:, None] * tl.load(outs, mask=there[:, None], other=0.0, cache_modifier=".cg")
        highest = higher
    return mean / total[:, None]


@triton.jit(do_not_specialize_on_alignment=["table_rows", "positions", "part_keys", "seen"])
def attend(
    query,
    pool,
    table,
    table_rows,
    positions,
    part_keys,
    seen,
    out,
    part_outs,
    part_sums,
    finished,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    FILLED: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """softmax(query @ keys.T * scale) @ values. A program a key head, a row, and a part of the row's keys.

    query (tokens, heads, DIM), `query_stride` apart; pool (slots, 2, KV_HEADS, DIM); table (…, table_stride);
    table_rows and positions (tokens,), QUERIES tokens a row, of which the last says how long the row is and where it is
    in the table; part_keys (rows,). out (tokens, heads, DIM). `scale` times log2(e).

    seen (tokens,): bit 31 lets a token see its row's last place, each bit below it the place before, and bit 0, which
    is always set, all that are farther away, too. None where QUERIES is 1 and each token sees all there is.

    part_outs (rows, KV_HEADS, parts, FILLED, DIM), part_sums without DIM: what parts leave to the last of them, which
    `finished` (rows, KV_HEADS), zeros before and after, tells that it is. FILLED: the power of two at or above
    QUERIES * GROUP; TILE: the same and at least 16, as the tensor cores want.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    most_parts = tl.num_programs(2)
    last = row * QUERIES + QUERIES - 1
    table_row = tl.load(table_rows + last)
    length = tl.load(positions + last) + 1
    size = tl.load(part_keys + row)
    first = part * size
    if (first >= length) | (table_row < 0):  # it never is; asked so that the three are loaded at once
        return
    # Whatever the host thought of the length, no key is left out.
    stop = tl.where(part == most_parts - 1, length, tl.minimum(first + size, length))

    tile = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    token = row * QUERIES + tl.minimum(tile // GROUP, QUERIES - 1)
    query_head = head * GROUP + tile % GROUP
    is_query = tile < QUERIES * GROUP
    slots_of_row = table + table_row.to(tl.int64) * table_stride
    keys = first + tl.arange(0, KEYS)
    slots = tl.load(slots_of_row + keys, mask=keys < stop, other=0)
    queries = tl.load(
        query + (token.to(tl.int64) * query_stride + query_head * DIM)[:, None] + dims[None, :],
        mask=is_query[:, None],
        other=0.0,
    )
    if seen is not None:
        sees = tl.load(seen + token)

    highest = tl.full((TILE,), -float("inf"), tl.float32)
    totals = tl.zeros((TILE, KEYS), tl.float32)  # summed up at the end: a sum over threads in each turn would take time
    mean = tl.zeros((TILE, DIM), tl.float32)
    for at in range(first, stop, KEYS):
        keys = at + tl.arange(0, KEYS)
        inside = keys < stop
        source = pool + (slots.to(tl.int64) * (2 * KV_HEADS * DIM) + head * DIM)[:, None] + dims[None, :]
        key = tl.load(source, mask=inside[:, None], other=0.0)
        value = tl.load(source + KV_HEADS * DIM, mask=inside[:, None], other=0.0)
        slots = tl.load(slots_of_row + keys + KEYS, mask=keys + KEYS < stop, other=0)  # of the next block
        scores = tl.dot(queries, tl.trans(key)) * scale
        scores = tl.where(inside[None, :], scores, UNSEEN)
        if seen is not None:  # noqa: SIM102  known when this is compiled
            if at + KEYS > length - 31:  # farther away all see all
                bits = 1 << (tl.maximum(keys - (length - 32), 0) & 31)
                scores = tl.where((sees[:, None] & bits[None, :]) != 0, scores, UNSEEN)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(highest - higher)
        totals = totals * kept[:, None] + weights
        mean = tl.dot(weights.to(value.dtype), value, mean * kept[:, None])
        highest = higher
    total = tl.sum(totals, 1)
    mean = mean / total[:, None]

    if size >= length:
        write(mean, out, row, head, TILE, KV_HEADS, GROUP, QUERIES, DIM)
        return

    pair = (row * KV_HEADS + head).to(tl.int64)
    of_part = (pair * most_parts + part) * FILLED + tile
    tl.store(part_outs + of_part[:, None] * DIM + dims[None, :], mean, mask=is_query[:, None])
    tl.store(part_sums + of_part, highest + tl.log2(total), mask=is_query)
    # Stores of all threads come before the barrier, and one thread's release after it carries them along; whoever
    # acquires the last count sees those of all parts.
    tl.debug_barrier()
    used = tl.minimum(tl.cdiv(length, size), most_parts)
    if tl.atomic_add(finished + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.store(finished + pair, 0)  # for the next launch
        filled = tl.arange(0, FILLED)
        begin = pair * most_parts * FILLED
        together = put_together(
            part_outs + begin * DIM, part_sums + begin, used, filled < QUERIES * GROUP, FILLED, DIM, AT_ONCE
        )
        write(together, out, row, head, FILLED, KV_HEADS, GROUP, QUERIES, DIM)
