"""Attention within small windows as one Triton kernel: heads turn on the way in, a window never leaves the registers.

Windows stand one behind the other, those of one size together, in up to four sizes (`qwen2_vl.window_order`). Imported
only where tensors are on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from preprocess.blocks.fusion import power_of_two

MOST_PATCHES: Final = 64
"""Of a window; smaller ones take as long."""

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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a window of an item, and head. A head's halves are handled apart, as they turn into each other.

    qkv (items, patches, 3 heads, 2 HALF); out (items, patches, heads, 2 HALF).
    """
    item = (tl.program_id(0) // windows).to(tl.int64)
    window = tl.program_id(0) % windows
    head = tl.program_id(1)
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
    column = tl.arange(0, BLOCK)
    inside = (row < size)[:, None] & (column < HALF)[None, :]
    token = first + row
    angle = token[:, None] * (2 * HALF) + column[None, :]
    cos = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)  # the half that is not negated

    at = qkv + (item * patches + token[:, None]) * (3 * num_heads * 2 * HALF) + head * (2 * HALF) + column[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    low_query = (low * cos - high * sin).to(qkv.dtype.element_ty)
    high_query = (high * cos + low * sin).to(qkv.dtype.element_ty)
    at += num_heads * 2 * HALF
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    low_key = (low * cos - high * sin).to(qkv.dtype.element_ty)
    high_key = (high * cos + low * sin).to(qkv.dtype.element_ty)
    at += num_heads * 2 * HALF
    low_value = tl.load(at, mask=inside, other=0.0)
    high_value = tl.load(at + HALF, mask=inside, other=0.0)

    scores = tl.dot(low_query, tl.trans(low_key), input_precision="ieee")
    scores = tl.dot(high_query, tl.trans(high_key), scores, input_precision="ieee") * scale
    scores = tl.where((row < size)[None, :], scores, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)[:, None]
    weights = weights.to(qkv.dtype.element_ty)
    target = out + ((item * patches + token[:, None]) * num_heads + head) * (2 * HALF) + column[None, :]
    low = tl.dot(weights, low_value, input_precision="ieee") / total
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    high = tl.dot(weights, high_value, input_precision="ieee") / total
    tl.store(target + HALF, high.to(out.dtype.element_ty), mask=inside)


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
    _attend[(items * count, heads)](
        qkv,
        *rotation,
        out,
        patches,
        heads,
        count,
        dim**-0.5,
        count_0,
        size_0,
        count_1,
        size_1,
        count_2,
        size_2,
        size_3,
        HALF=dim // 2,
        BLOCK=max(16, power_of_two(dim // 2)),  # at least what matrix units take
        ROWS=MOST_PATCHES,
        num_warps=4,
    )
    return out
