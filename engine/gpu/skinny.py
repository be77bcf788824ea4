"""Products of few rows, as decode steps of few sequences have them: nothing but reading weights, as fast as possible.

A layer of a library has a kernel for each product; here SwiGLU is part of its product, and products whose inputs are
split over programs leave their parts to the norm that follows (split-K without a pass of its own).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch

from engine.gpu import skinny_kernels
from preprocess.blocks.fusion import power_of_two

FEW_ROWS: Final = 16
SOME_ROWS: Final = 32
MOST_ROWS: Final = 64
"""Up to so many rows tiles are alike. With more than the most, or for queries, keys and values with more than some, a
library's kernels read the weights as fast. It also has those with more than a few where a device has too little shared
memory for what is on its way to larger tiles.
"""

LARGE_SHARED: Final = 200 << 10
"""Bytes that a program may have where all tiles here fit: Hopper has 227 KiB."""

LEAST_INPUTS: Final = 1024
"""With fewer, products are so small that it hardly matters who makes them."""

PROGRAMS: Final = 256
"""Parts are as many as it takes to have about as many programs: two for each of an H200's 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: outputs and inputs of a tile, parts of the inputs; warps; loads in flight; rows of a tile,
    and whether the tensor cores take outputs for rows, of which Hopper's want 64 where of rows 8 do.
    """

    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    rows: int = FEW_ROWS
    turned: bool = False


def is_skinny(x: torch.Tensor, inputs: int) -> bool:
    """Whether these rows are few, and the products large enough, for the kernels here."""
    if inputs < LEAST_INPUTS or len(x) > MOST_ROWS:
        return False
    return len(x) <= FEW_ROWS or has_large_tiles(x.device)


def is_skinny_for_heads(x: torch.Tensor, inputs: int) -> bool:
    """The same for queries, keys and values, whose product has nothing to be fused with but the sum of its parts."""
    return inputs >= LEAST_INPUTS and len(x) <= SOME_ROWS and has_large_tiles(x.device)


def kind_of(rows: int) -> int:
    """The most rows that have the same tiles as so many, or 0 where they are not few."""
    return next((most for most in (FEW_ROWS, SOME_ROWS, MOST_ROWS) if rows <= most), 0)


def of_each_kind(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of sizes, rows and tokens a row each, those with the fewest and the most tokens of each kind: nothing is launched
    otherwise between them.
    """
    ordered = sorted(sizes, key=lambda size: size[0] * size[1])
    most = {kind_of(rows * width): (rows, width) for rows, width in ordered}
    fewest = {kind_of(rows * width): (rows, width) for rows, width in reversed(ordered)}
    return list(dict.fromkeys([*fewest.values(), *most.values()]))


@lru_cache(maxsize=8)
def has_large_tiles(device: torch.device) -> bool:
    """Whether a program may have enough shared memory on a device."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= LARGE_SHARED)


def gate_up_tiles(rows: int, inner: int) -> Tiles:
    """For `skinny_gate_up`. Those of all three functions are the best of a hundred, on average over shapes of models of
    2, 3 and 8 billion parameters on an H200.
    """
    if rows <= FEW_ROWS:
        return Tiles(columns=32, depth=64, stages=5)
    if rows <= SOME_ROWS:
        return Tiles(columns=64, depth=64, stages=5, rows=32, turned=True)
    if inner <= 64 * PROGRAMS // 2:  # a program a multiprocessor, which has so much more to wait for
        return Tiles(columns=64, depth=128, rows=64)
    return Tiles(columns=64, depth=64, rows=64)


def residual_tiles(rows: int, outputs: int, inputs: int) -> Tiles:
    """For a product whose parts the norm behind it sums up."""
    if rows <= FEW_ROWS:
        return _split(Tiles(columns=32, depth=128), outputs, inputs, most=4, least=1024)
    if rows <= SOME_ROWS:
        return _split(Tiles(columns=64, depth=128, rows=32, turned=True), outputs, inputs, most=6, least=512)
    return _split(Tiles(columns=32, depth=128, rows=64), outputs, inputs, most=4, least=1024)


def heads_tiles(rows: int, outputs: int, inputs: int) -> Tiles:
    """For queries, keys and values, whose parts `engine.gpu.ops.rotate_and_write` sums up."""
    tiles = Tiles(columns=64, depth=128, stages=5, turned=True)
    if rows > FEW_ROWS:
        tiles = Tiles(columns=64, depth=128, rows=32, turned=True)
    return _split(tiles, outputs, inputs, most=3, least=640)


def _split(tiles: Tiles, outputs: int, inputs: int, *, most: int, least: int) -> Tiles:
    """In at most so many parts, of at least so many inputs."""
    programs = -(-outputs // tiles.columns)
    return replace(tiles, splits=max(1, min(most, inputs // least, PROGRAMS // programs)))


def skinny(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """(rows, inputs) times (outputs, inputs): (rows, outputs), or with splits float32 parts (splits, rows, outputs)."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if tiles.splits == 1:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiles.splits, rows, outputs), dtype=torch.float32, device=x.device)
    skinny_kernels.multiply[(-(-rows // tiles.rows), -(-outputs // tiles.columns), tiles.splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        -(-inputs // (tiles.splits * tiles.depth)) * tiles.depth,
        HAS_BIAS=bias is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        EVEN=inputs % tiles.depth == 0,
        TURNED=tiles.turned,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def skinny_gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """silu(gate) * up: (rows, inputs) and (2 * inner, inputs), gates first → (rows, inner)."""
    rows, inputs = x.shape
    inner = weight.shape[0] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    skinny_kernels.gate_up[(-(-rows // tiles.rows), -(-inner // tiles.columns))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        inner,
        inputs,
        HAS_BIAS=bias is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        EVEN=inputs % tiles.depth == 0,
        TURNED=tiles.turned,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def add_parts_rms_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds the sum of parts (splits, rows, width) to `residual` in place; the sum's RMS norm (rows, width)."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    block = power_of_two(width)
    skinny_kernels.add_parts_rms_norm[(rows,)](
        parts,
        residual,
        weight,
        out,
        rows,
        width,
        eps,
        SPLITS=parts.shape[0],
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
