"""Triton kernels for products of few rows, without their launches: see `engine.gpu.skinny`."""

import triton
import triton.language as tl


@triton.jit
def multiply(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out[split] = x @ weight.T over one of SPLITS parts of the inputs, the first with the bias; with one part out is
    (rows, outputs).
    """
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part: tl.constexpr = (inputs + SPLITS * DEPTH - 1) // (SPLITS * DEPTH) * DEPTH
    first = tl.program_id(1) * part
    depth = first + tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, part, DEPTH):
        inside = depth + at < inputs
        a = tl.load(
            x + row[:, None] * inputs + (depth + at)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            weight + column[None, :].to(tl.int64) * inputs + (depth + at)[:, None],
            mask=(column < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        wanted = (column < outputs) & (first == 0)
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    target = out + (tl.program_id(1) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@triton.jit
def gate_up(
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    inputs: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out = silu(gate) * up, of x @ weight.T + bias with weight (2 inner, inputs), gates first."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    gates = weight + column[None, :].to(tl.int64) * inputs
    for at in range(0, inputs, DEPTH):
        inside = depth + at < inputs
        a = tl.load(
            x + row[:, None] * inputs + (depth + at)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        wanted = (column < inner)[None, :] & inside[:, None]
        gate = tl.dot(a, tl.load(gates + (depth + at)[:, None], mask=wanted, other=0.0), gate)
        up = tl.dot(a, tl.load(gates + inner * inputs + (depth + at)[:, None], mask=wanted, other=0.0), up)
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=column < inner, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + inner + column, mask=column < inner, other=0.0).to(tl.float32)[None, :]
    result = gate / (1.0 + tl.exp(-gate)) * up
    target = out + row[:, None] * inner + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < inner)[None, :])


@triton.jit
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
