"""Attention within small windows as one Triton kernel: heads turn on the way in, scores never leave the registers.

Windows stand one behind the other, those of one size together, in up to four sizes (`qwen2_vl.window_order`). Imported
only where tensors are on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from preprocess.blocks.fusion import power_of_two

MOST_PATCHES: Final = 64
"""Of a window; smaller ones take as long."""

_LEAST: Final = 16
"""Columns that matrix units take."""

_SIZES: Final = 4

_OF_PICTURES: Final = [
    "patches",
    "windows",
    *(f"count_{size}" for size in range(3)),
    *(f"size_{size}" for size in range(4)),
]
"""Arguments that the kernel is not compiled anew for."""


@triton.jit(do_not_specialize=_OF_PICTURES)
def _attend(
    qkv,
    cosines,
    sines,
    out,
    patches,
    num_heads,
    windows,
    scale,
    count_0,
    size_0,
    count_1,
    size_1,
    count_2,
    size_2,
    size_3,
    HALF: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a head of a window of an item. Programs beside each other read the same patches.

    qkv (items, patches, 3 heads, 2 HALF); out (items, patches, heads, 2 HALF).
    """
    head = tl.program_id(0) % num_heads
    window = tl.program_id(0) // num_heads % windows
    item = (tl.program_id(0) // num_heads // windows).to(tl.int64)
    size = size_0
    first = window * size_0
    passed = count_0
    begin = count_0 * size_0
    if window >= passed:
        size = size_1
        first = begin + (window - passed) * size_1
    passed += count_1
    begin += count_1 * size_1
    if window >= passed:
        size = size_2
        first = begin + (window - passed) * size_2
    passed += count_2
    begin += count_2 * size_2
    if window >= passed:
        size = size_3
        first = begin + (window - passed) * size_3

    row = tl.arange(0, ROWS)
    token = (first + row)[:, None]
    is_row = (row < size)[:, None]
    head_stride = 2 * HALF
    to_keys = num_heads * head_stride

    # Queries and keys: of each half MAIN columns and REST. Values: WIDE and NARROW.
    main = tl.arange(0, MAIN)[None, :]
    in_main = is_row & (main < HALF)
    cos = tl.load(cosines + token * head_stride + main, mask=in_main, other=0.0)
    sin = tl.load(sines + token * head_stride + HALF + main, mask=in_main, other=0.0)  # the half that is not negated
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)[None, :]
        in_rest = is_row & (rest < HALF)
        rest_cos = tl.load(cosines + token * head_stride + rest, mask=in_rest, other=0.0)
        rest_sin = tl.load(sines + token * head_stride + HALF + rest, mask=in_rest, other=0.0)
    wide = tl.arange(0, WIDE)[None, :]
    in_wide = is_row & (wide < head_stride)
    if NARROW > 0:
        narrow = WIDE + tl.arange(0, NARROW)[None, :]
        in_narrow = is_row & (narrow < head_stride)

    query = qkv + (item * patches + token) * (3 * to_keys) + head * head_stride
    key = query + to_keys
    value = key + to_keys
    # All that is read is asked for before anything is waited for.
    low_query = tl.load(query + main, mask=in_main, other=0.0)
    high_query = tl.load(query + HALF + main, mask=in_main, other=0.0)
    low_key = tl.load(key + main, mask=in_main, other=0.0)
    high_key = tl.load(key + HALF + main, mask=in_main, other=0.0)
    if REST > 0:
        low_query_rest = tl.load(query + rest, mask=in_rest, other=0.0)
        high_query_rest = tl.load(query + HALF + rest, mask=in_rest, other=0.0)
        low_key_rest = tl.load(key + rest, mask=in_rest, other=0.0)
        high_key_rest = tl.load(key + HALF + rest, mask=in_rest, other=0.0)
    wide_value = tl.load(value + wide, mask=in_wide, other=0.0)
    if NARROW > 0:
        narrow_value = tl.load(value + narrow, mask=in_narrow, other=0.0)

    turned_query, turned_key = _turned(low_query, high_query, cos, sin), _turned(low_key, high_key, cos, sin)
    scores = tl.dot(turned_query, tl.trans(turned_key), input_precision="ieee")
    if REST > 0:
        turned_query = _turned(low_query_rest, high_query_rest, rest_cos, rest_sin)
        turned_key = _turned(low_key_rest, high_key_rest, rest_cos, rest_sin)
        scores = tl.dot(turned_query, tl.trans(turned_key), scores, input_precision="ieee")
    scores = tl.where((row < size)[None, :], scores * scale, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    share = 1.0 / tl.sum(weights, 1)[:, None]
    weights = weights.to(qkv.dtype.element_ty)
    target = out + ((item * patches + token) * num_heads + head) * head_stride
    seen = tl.dot(weights, wide_value, input_precision="ieee") * share
    tl.store(target + wide, seen.to(out.dtype.element_ty), mask=in_wide)
    if NARROW > 0:
        seen = tl.dot(weights, narrow_value, input_precision="ieee") * share
        tl.store(target + narrow, seen.to(out.dtype.element_ty), mask=in_narrow)


@triton.jit
def _turned(low, high, cos, sin):
    """Columns of both halves of heads, turned: (rows, 2 columns), lower and upper ones by turns, which products of
    queries and keys do not mind.
    """
    a, b, c, s = low.to(tl.float32), high.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    # What matrix units read is brought into their order through shared memory. The compiler does so as early as it can,
    # here with each of the four as soon as it has come, and waits for one after the other. Not across the sum over an
    # axis, though, which costs no more than a plus: so all are asked for at once, and one goes through shared memory.
    turned = tl.sum(tl.join(tl.join(a * c, b * c), tl.join(-b * s, a * s)), 3)
    return turned.to(low.dtype).reshape(low.shape[0], 2 * low.shape[1])


def fits(windows: Sequence[tuple[int, int]]) -> bool:
    """Whether the windows, (how many, of how many patches) each, are few in size and small."""
    return len(windows) <= _SIZES and max(size for _, size in windows) <= MOST_PATCHES


def attend_in_windows(
    qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], windows: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Attention of (items, patches, 3 * heads, dim), queries first, whose heads are not yet turned.

    Args:
        qkv: Contiguous, and not changed.
        rotation: Cosines and signed sines as of `patches.axial_rotation`: both halves of a head by the same angles.
        windows: For which `fits` holds.

    Returns:
        (items, patches, heads * dim).
    """
    items, patches, total, dim = qkv.shape
    heads = total // 3
    (count_0, size_0), (count_1, size_1), (count_2, size_2), (_, size_3) = [
        *windows,
        *[(0, 0)] * (_SIZES - len(windows)),
    ]
    count = sum(count for count, _ in windows)
    out = torch.empty((items, patches, heads * dim), dtype=qkv.dtype, device=qkv.device)
    half = dim // 2
    main, rest = _blocks(half)
    wide, narrow = _blocks(dim)
    _attend[(items * count * heads,)](
        qkv,
        *rotation,
        out,
        patches,
        heads,
        count,
        dim**-0.5 * math.log2(math.e),
        count_0,
        size_0,
        count_1,
        size_1,
        count_2,
        size_2,
        size_3,
        HALF=half,
        MAIN=main,
        REST=rest and max(_LEAST // 2, rest),
        WIDE=wide,
        NARROW=narrow and max(_LEAST, narrow),
        ROWS=MOST_PATCHES,
        num_warps=4,
    )
    return out


def _blocks(columns: int) -> tuple[int, int]:
    """Sizes of one or two blocks that hold so many columns, as few more as may be: 80 are 64 and 16, not 128."""
    first = max(1 << (columns.bit_length() - 1), _LEAST)
    return first, power_of_two(columns - first) if columns > first else 0
