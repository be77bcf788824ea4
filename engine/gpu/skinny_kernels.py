"""Triton kernels for products of few rows, without their launches: see `engine.gpu.skinny`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    part,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    TURNED: tl.constexpr,
):
    """out[split] = x @ weight.T over `part` of the inputs, the first with the bias; out (splits, rows, outputs).

    A program a tile of rows, one of outputs, and a part; tiles of rows change first, as they share weights. `part` is a
    multiple of DEPTH; EVEN: so are the inputs.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * part
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
    for at in range(first, tl.minimum(first + part, inputs), DEPTH):
        a = load_tile(x, row, rows, depth + at, inputs, EVEN)
        b = load_tile(weight, column, outputs, depth + at, inputs, EVEN)
        total = tl.dot(b, tl.trans(a), total) if TURNED else tl.dot(a, tl.trans(b), total)
    if TURNED:
        total = tl.trans(total)
    if HAS_BIAS:
        wanted = (column < outputs) & (first == 0)
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    target = out + (tl.program_id(2) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@triton.jit
def load_tile(matrix, row, rows, column, columns, EVEN: tl.constexpr):
    """Rows and columns of a dense matrix (rows, columns), zeros beyond it; EVEN: all of the columns are there."""
    inside = (row < rows)[:, None]
    if not EVEN:
        inside = inside & (column < columns)[None, :]
    return tl.load(matrix + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def gate_up(
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    inputs,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    TURNED: tl.constexpr,
):
    """out = silu(gate) * up, of x @ weight.T + bias with weight (2 inner, inputs), gates first. Programs and EVEN as
    `multiply`'s.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    gate = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
    ups = weight + inner.to(tl.int64) * inputs
    for at in range(0, inputs, DEPTH):
        a = load_tile(x, row, rows, depth + at, inputs, EVEN)
        b = load_tile(weight, column, inner, depth + at, inputs, EVEN)
        c = load_tile(ups, column, inner, depth + at, inputs, EVEN)
        gate = tl.dot(b, tl.trans(a), gate) if TURNED else tl.dot(a, tl.trans(b), gate)
        up = tl.dot(c, tl.trans(a), up) if TURNED else tl.dot(a, tl.trans(c), up)
    if HAS_BIAS:
        of_gates = tl.load(bias + column, mask=column < inner, other=0.0).to(tl.float32)
        of_ups = tl.load(bias + inner + column, mask=column < inner, other=0.0).to(tl.float32)
        gate += of_gates[:, None] if TURNED else of_gates[None, :]
        up += of_ups[:, None] if TURNED else of_ups[None, :]
    result = gate / (1.0 + tl.exp(-gate)) * up
    if TURNED:
        result = tl.trans(result)
    target = out + row[:, None] * inner + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_parts_rms_norm(
    parts,
    residual,
    weight,
    out,
    rows,
    width,
    eps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += the sum of parts (SPLITS, rows, width); out = its RMS norm * weight. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        added += tl.load(parts + (split * rows + row) * width + columns, mask=inside, other=0.0)
    added = added.to(residual.dtype.element_ty).to(tl.float32)  # as a product's result is rounded
    value = tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32) + added
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + row * width + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * width + columns, (value * scale * gain).to(out.dtype.element_ty), mask=inside)
