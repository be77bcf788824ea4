"""Products of few rows, as decode steps of few sequences have them: nothing but reading weights, as fast as possible.

A layer of a library has a kernel for each product; here SwiGLU is part of its product, and products whose inputs are
split over programs leave their parts to the norm that follows (split-K without a pass of its own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.gpu import skinny_kernels
from preprocess.blocks.fusion import power_of_two

MOST_ROWS: Final = 8
"""With more, a library's kernels read the weights as fast."""

_ROWS: Final = 16
"""Least rows of a tile of the tensor cores."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: outputs and inputs of a tile, parts of the inputs; warps; loads in flight."""

    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


GATE_UP: Final = Tiles(columns=32, depth=128, stages=3)
TO_RESIDUAL: Final = Tiles(columns=32, depth=128, splits=4)
"""Best of a hundred on an H200, for shapes of models of 2 and 8 billion parameters."""


def is_skinny(x: torch.Tensor, inputs: int) -> bool:
    """Whether these rows are few, and the products large enough, for the kernels here."""
    return len(x) <= MOST_ROWS and inputs >= 1024


def skinny(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """(rows, inputs) times (outputs, inputs): (rows, outputs), or with splits float32 parts (splits, rows, outputs)."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if tiles.splits == 1:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiles.splits, rows, outputs), dtype=torch.float32, device=x.device)
    skinny_kernels.multiply[(-(-outputs // tiles.columns), tiles.splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        ROWS=_ROWS,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        SPLITS=tiles.splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def skinny_gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """silu(gate) * up: (rows, inputs) and (2 * inner, inputs), gates first → (rows, inner)."""
    rows, inputs = x.shape
    inner = weight.shape[0] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    skinny_kernels.gate_up[(-(-inner // tiles.columns),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        inner,
        inputs,
        HAS_BIAS=bias is not None,
        ROWS=_ROWS,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
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
