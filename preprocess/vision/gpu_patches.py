"""Triton kernels for what encoders do before their first layer: pixels become rows of patches, and where each patch is
becomes learned positions and a rotation. With their launches; imported only where tensors are on a GPU.

Each takes the place of dozens of small operations over all pixels or patches. What depends on a grid is made anew for
each picture, in less time than it takes to look it up: a captured graph needs nothing that somebody else must keep.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from preprocess.blocks.fusion import power_of_two
from preprocess.vision.normalisation import Normalisation
from preprocess.vision.patches import Grid

_SIZES: Final = ["rows", "columns", "window", "height", "width"]
"""Of pictures: kernels are not compiled anew for those that are multiples of something."""


@triton.jit
def _token_at(index, rows, columns, window):
    """Row and column of the token that stands at `index`: in full windows, then in those of the right edge, of the
    lower edge, and of the corner.
    """
    high_edge = rows // window * window
    wide_edge = columns // window * window
    full = high_edge * wide_edge
    right = full + high_edge * (columns - wide_edge)
    lower = right + (rows - high_edge) * wide_edge
    is_lower = index >= right
    is_right = ((index >= full) & (index < right)) | (index >= lower)
    first = tl.where(is_lower, tl.where(is_right, lower, right), tl.where(is_right, full, 0))
    high = tl.where(is_lower, rows - high_edge, window)
    wide = tl.where(is_right, columns - wide_edge, window)
    in_line = tl.where(is_right, 1, columns // window)  # windows beside each other
    within = index - first
    # Classes that are empty have no side; nobody stands there.
    which = within // tl.maximum(high * wide, 1)
    within = within % tl.maximum(high * wide, 1)
    wide = tl.maximum(wide, 1)
    in_line = tl.maximum(in_line, 1)
    row = tl.where(is_lower, high_edge, 0) + which // in_line * high + within // wide
    column = tl.where(is_right, wide_edge, 0) + which % in_line * wide + within % wide
    return row, column


@triton.jit
def _patch_at(patch, rows, columns, window, MERGE: tl.constexpr, WINDOWS: tl.constexpr):
    """Row and column of a patch among patches."""
    token = patch // (MERGE * MERGE)
    within = patch % (MERGE * MERGE)
    row = token // columns
    column = token % columns
    if WINDOWS:
        row, column = _token_at(token, rows, columns, window)
    return row * MERGE + within // MERGE, column * MERGE + within % MERGE


@triton.jit(do_not_specialize=_SIZES)
def _cut(
    pixels,
    scale,
    shift,
    out,
    rows,
    columns,
    window,
    height,
    width,
    frames,
    out_width,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a patch. Of its bytes, frame by frame, each row of a patch stands together in the picture."""
    line: tl.constexpr = PATCH * 3
    program = tl.program_id(0)
    patches = rows * columns * MERGE * MERGE
    item = (program // patches).to(tl.int64)
    row, column = _patch_at(program % patches, rows, columns, window, MERGE, WINDOWS)
    at = tl.arange(0, BLOCK)
    frame = at // (PATCH * line)
    pixel_row = row * PATCH + at // line % PATCH
    inside = frame < frames
    place = ((item * frames + frame) * height + pixel_row) * (width * 3) + column * line + at % line
    value = tl.load(pixels + place, mask=inside, other=0).to(tl.float32)
    channel = at % 3
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    target = out + program.to(tl.int64) * out_width + at
    tl.store(target, tl.where(inside, value, 0.0).to(out.dtype.element_ty), mask=at < out_width)


def cut(
    pixels: torch.Tensor, normalise: Normalisation, grid: Grid, patch: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """uint8 (items, frames, height, width, 3) → normalised (items, patches, width) of `dtype`.

    A patch is (frames, patch, patch, 3) in a row; what `width` is longer is zero. Pixels outside of the grid are not
    seen.
    """
    items, frames, height, pixel_width, _ = pixels.shape
    out = torch.empty((items, grid.patches, width), dtype=dtype, device=pixels.device)
    _cut[(items * grid.patches,)](
        pixels.contiguous(),
        normalise.scale,
        normalise.shift,
        out,
        grid.rows,
        grid.columns,
        grid.window,
        height,
        pixel_width,
        frames,
        width,
        PATCH=patch,
        MERGE=grid.merge,
        WINDOWS=grid.window > 0,
        BLOCK=power_of_two(width),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=_SIZES[:3])
def _turn(
    cosines,
    sines,
    rows,
    columns,
    window,
    log2_theta,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """One program a patch: a quarter of the head's waves by its row, a quarter by its column."""
    patch = tl.program_id(0)
    row, column = _patch_at(patch, rows, columns, window, MERGE, WINDOWS)
    wave = tl.arange(0, BLOCK)
    is_row = wave < HALF // 2
    power = tl.where(is_row, wave, wave - HALF // 2).to(tl.float32) * (2.0 / HALF)
    angle = tl.where(is_row, row, column).to(tl.float32) * tl.exp2(-power * log2_theta)
    cos = tl.cos(angle).to(cosines.dtype.element_ty)
    sin = tl.sin(angle)
    at = patch * (2 * HALF) + wave
    tl.store(cosines + at, cos, mask=wave < HALF)
    tl.store(cosines + at + HALF, cos, mask=wave < HALF)
    tl.store(sines + at, (-sin).to(sines.dtype.element_ty), mask=wave < HALF)
    tl.store(sines + at + HALF, sin.to(sines.dtype.element_ty), mask=wave < HALF)


def axial_rotation(
    grid: Grid, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `preprocess.vision.patches.axial_rotation`: each (patches, 1, head_dim)."""
    cos, sin = (torch.empty((grid.patches, 1, head_dim), dtype=dtype, device=device) for _ in range(2))
    _turn[(grid.patches,)](
        cos,
        sin,
        grid.rows,
        grid.columns,
        grid.window,
        math.log2(theta),
        HALF=head_dim // 2,
        BLOCK=power_of_two(head_dim // 2),
        MERGE=grid.merge,
        WINDOWS=grid.window > 0,
        num_warps=1,
    )
    return cos, sin


@triton.jit
def _neighbour(index, count, side):
    """See `preprocess.vision.qwen3_vl.stretch`: the place below in a line of `side`, and how much of the next."""
    at = index.to(tl.float32) * (side - 1) / tl.maximum(count - 1, 1)
    below = tl.floor(at)
    return below.to(tl.int32), at - below


@triton.jit(do_not_specialize=_SIZES[:2])
def _add_positions(x, table, rows, columns, side, width, MERGE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a patch of an item: four rows of the square `table`, by how near they are."""
    program = tl.program_id(0)
    row, column = _patch_at(program % (rows * columns * MERGE * MERGE), rows, columns, 0, MERGE, False)
    y, down = _neighbour(row, rows * MERGE, side)
    x_at, right = _neighbour(column, columns * MERGE, side)
    y_next = tl.minimum(y + 1, side - 1)
    x_next = tl.minimum(x_at + 1, side - 1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    total = tl.load(table + (y * side + x_at) * width + at, mask=inside, other=0.0).to(tl.float32)
    total *= (1 - down) * (1 - right)
    total += tl.load(table + (y * side + x_next) * width + at, mask=inside, other=0.0).to(tl.float32) * (
        (1 - down) * right
    )
    total += tl.load(table + (y_next * side + x_at) * width + at, mask=inside, other=0.0).to(tl.float32) * (
        down * (1 - right)
    )
    total += tl.load(table + (y_next * side + x_next) * width + at, mask=inside, other=0.0).to(tl.float32) * (
        down * right
    )
    target = x + program.to(tl.int64) * width + at
    value = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    value += total.to(x.dtype.element_ty).to(tl.float32)
    tl.store(target, value.to(x.dtype.element_ty), mask=inside)


def add_positions_(x: torch.Tensor, table: torch.Tensor, grid: Grid, side: int) -> torch.Tensor:
    """Adds to patches (items, patches, width), row by row, the positions of a square table (side * side, width) that
    is stretched over the grid.
    """
    width = x.shape[-1]
    _add_positions[(x.numel() // width,)](
        x,
        table,
        grid.rows,
        grid.columns,
        side,
        width,
        MERGE=grid.merge,
        BLOCK=power_of_two(width),
        num_warps=4,
    )
    return x


@triton.jit(do_not_specialize=_SIZES[:3])
def _order(out, rows, columns, window, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = _token_at(index, rows, columns, window)
    tl.store(out + index, (row * columns + column).to(tl.int64), mask=index < rows * columns)


def window_order(grid: Grid, device: torch.device) -> torch.Tensor:
    """See `preprocess.vision.qwen2_vl.window_order`: int64 (tokens,)."""
    out = torch.empty(grid.tokens, dtype=torch.int64, device=device)
    _order[(-(-grid.tokens // 256),)](out, grid.rows, grid.columns, grid.window, BLOCK=256, num_warps=4)
    return out
