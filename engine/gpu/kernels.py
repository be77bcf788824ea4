"""Triton kernels, without their launches: `engine.gpu.ops` and `engine.gpu.sampling` wrap them in typed functions.

All arithmetic is float32 whatever the tensors' type; what is stored is rounded once. Tensors are contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_and_write(
    qkv,
    queries,
    weight,
    cosines,
    sines,
    slots,
    pool,
    num_heads,
    num_kv_heads,
    query_stride,
    angle_stride,
    eps,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """QK-norm where NORM, rotation of queries and keys, and keys and values into the pool's slots.

    One program a token and block of HEADS heads, whatever they are. `sines` are signed, see
    `preprocess.blocks.rope.Rope`. qkv (tokens, heads + 2 kv_heads, 2 HALF), or the sum of PARTS of them; queries
    (tokens, query_stride), which may be qkv's; weight (heads + kv_heads, 2 HALF); pool (slots, 2, kv_heads, 2 HALF).
    """
    token = tl.program_id(0).to(tl.int64)
    total = num_heads + 2 * num_kv_heads
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)
    inside = (columns < HALF)[None, :] & (heads < total)
    is_turned = heads < num_heads + num_kv_heads  # not values
    is_query = heads < num_heads
    source = qkv + (token * total + heads) * (2 * HALF) + columns[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        for _ in tl.static_range(1, PARTS):
            source += tl.num_programs(0) * total * (2 * HALF)
            low += tl.load(source, mask=inside, other=0.0)
            high += tl.load(source + HALF, mask=inside, other=0.0)
        low = low.to(pool.dtype.element_ty).to(tl.float32)  # as a product's result is rounded
        high = high.to(pool.dtype.element_ty).to(tl.float32)
    if NORM:
        square = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        gains = weight + heads * (2 * HALF) + columns[None, :]
        low_gain = tl.load(gains, mask=inside & is_turned, other=0.0).to(tl.float32)
        high_gain = tl.load(gains + HALF, mask=inside & is_turned, other=0.0).to(tl.float32)
        low = tl.where(is_turned, (low * scale * low_gain).to(pool.dtype.element_ty).to(tl.float32), low)
        high = tl.where(is_turned, (high * scale * high_gain).to(pool.dtype.element_ty).to(tl.float32), high)
    angle = token * angle_stride + columns
    low_cos = tl.load(cosines + angle, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cosines + angle + HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sines + angle, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sines + angle + HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    low_turned = low * low_cos + high * low_sin
    high_turned = high * high_cos + low * high_sin
    low = tl.where(is_turned, low_turned, low).to(pool.dtype.element_ty)
    high = tl.where(is_turned, high_turned, high).to(pool.dtype.element_ty)
    result = queries + token * query_stride + heads * (2 * HALF) + columns[None, :]
    tl.store(result, low, mask=inside & is_query)
    tl.store(result + HALF, high, mask=inside & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    target = pool + (slot * (2 * num_kv_heads) + heads - num_heads) * (2 * HALF) + columns[None, :]
    tl.store(target, low, mask=inside & (heads >= num_heads))
    tl.store(target + HALF, high, mask=inside & (heads >= num_heads))


@triton.jit
def gather_slots(table, table_rows, indptr, out, positions_per_row, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """out[indptr[r]:indptr[r + 1]] = the first slots of table[table_rows[r]]. PARTS programs a row."""
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    length = tl.load(indptr + row + 1) - begin
    source = table + tl.load(table_rows + row).to(tl.int64) * positions_per_row
    at = tl.program_id(1) * BLOCK
    while at < length:
        columns = at + tl.arange(0, BLOCK)
        inside = columns < length
        tl.store(out + begin + columns, tl.load(source + columns, mask=inside), mask=inside)
        at += PARTS * BLOCK


@triton.jit
def decode_inputs(
    ids, table_rows, positions, future, table, token_ids, slots, count, positions_per_row, BLOCK: tl.constexpr
):
    """Rows of one token: its id, from `future` where `ids` says -1, and the slot that its position has."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    given = tl.load(ids + rows, mask=inside, other=0)
    table_row = tl.load(table_rows + rows, mask=inside, other=0).to(tl.int64)
    drawn = tl.load(future + table_row, mask=inside, other=0)
    tl.store(token_ids + rows, tl.where(given < 0, drawn, given), mask=inside)
    position = tl.load(positions + rows, mask=inside, other=0)
    slot = tl.load(table + table_row * positions_per_row + position, mask=inside, other=0)
    tl.store(slots + rows, slot, mask=inside)


@triton.jit
def gumbel(keys, token_ids):
    """The noise of `engine.sampling.gumbel_noise`: uint64 keys and ids → float32. log1p after Kahan."""
    hashed = token_ids * 0x9E3779B97F4A7C15 + keys
    hashed = (hashed ^ (hashed >> 30)) * 0xBF58476D1CE4E5B9
    hashed = (hashed ^ (hashed >> 27)) * 0x94D049BB133111EB
    bits = (hashed ^ (hashed >> 31)) >> 24
    uniform = (bits.to(tl.int64).to(tl.float32) + 0.5) * 9.094947017729282e-13
    uniform = tl.minimum(uniform, 0.99999994)
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0)))
    return -tl.log(exponential)


@triton.jit
def draw_blocks(logits, temperatures, keys, best, best_ids, vocab, num_blocks, BLOCK: tl.constexpr):
    """The largest of logit / temperature + noise in each block of a row's vocabulary; temperature 0: of the logits."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    value = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value == value, value, -1e30)
    value = tl.minimum(tl.maximum(value, -1e30), 1e30)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        value = value / temperature + gumbel(key, ids.to(tl.uint64))
    value = tl.where(inside, value, -float("inf"))
    largest, index = tl.max(value, 0, return_indices=True)
    tl.store(best + row * num_blocks + block, largest)
    tl.store(best_ids + row * num_blocks + block, block * BLOCK + index)


@triton.jit
def draw_rows(best, best_ids, tokens, future, table_rows, num_blocks, BLOCK: tl.constexpr):
    """The id of the largest of each row's blocks, for the host and for the next step."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCK)
    value = tl.load(best + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))
    _, index = tl.max(value, 0, return_indices=True)
    token = tl.load(best_ids + row * num_blocks + index).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(future + tl.load(table_rows + row), token)


@triton.jit
def guess_inputs(
    turn,
    limits,
    table_rows,
    positions,
    offsets,
    keys,
    table,
    own_rows,
    own_positions,
    rotary,
    slots,
    drawn_keys,
    spots,
    num_rows,
    most_rows,
    positions_per_row,
    dummy,
    lag,
    BLOCK: tl.constexpr,
):
    """What a model that guesses reads before its guess number `turn`, which rises: of rows that want so many guesses
    the next position and its slot, of others a dummy's. One program, so that nobody else reads the turn.

    `keys` (turns, num_rows); `spots` are places in (turns, most_rows).
    """
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    now = tl.load(turn)
    wants = inside & (now < tl.load(limits + row, mask=inside, other=0))
    table_row = tl.where(wants, tl.load(table_rows + row, mask=inside, other=0), dummy)
    position = tl.where(wants, tl.load(positions + row, mask=inside, other=0) + now, lag)
    place = table_row.to(tl.int64) * positions_per_row + position
    tl.store(own_rows + row, table_row, mask=inside)
    tl.store(own_positions + row, position - lag, mask=inside)
    tl.store(rotary + row, position + tl.load(offsets + row, mask=inside, other=0), mask=inside)
    tl.store(slots + row, tl.load(table + place, mask=inside, other=0), mask=inside)
    tl.store(drawn_keys + row, tl.load(keys + now * num_rows + row, mask=inside, other=0), mask=inside)
    tl.store(spots + row, now * most_rows + row, mask=inside)
    tl.debug_barrier()
    tl.store(turn, now + 1)
