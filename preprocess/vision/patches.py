"""Patches of pictures in the order that Qwen-VL encoders take: those that become one vision token stand together.

merge 2:   0  1 │  4  5        token 0 is made of patches 0 … 3, token 1 of 4 … 7
           2  3 │  6  7
"""

from __future__ import annotations

import torch

from preprocess.blocks.rope import rotation


def unfold(pixels: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """(items, frames, height, width, 3) → (items, patches, frames * patch * patch * 3)."""
    items, frames, height, width, channels = pixels.shape
    block = patch * merge
    if height % block or width % block:
        raise ValueError(f"picture of {height}×{width} pixels, expected sides in {block} pixels")
    blocks = pixels.view(items, frames, height // block, merge, patch, width // block, merge, patch, channels)
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(items, height * width // patch**2, -1)


def places(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """int64 (2, patches): row and column of each patch of a grid."""
    row = torch.arange(rows, device=device).view(rows // merge, 1, merge, 1)
    column = torch.arange(columns, device=device).view(1, columns // merge, 1, merge)
    shape = (rows // merge, columns // merge, merge, merge)
    return torch.stack((row.expand(shape), column.expand(shape))).flatten(1)


def axial_rotation(
    at: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for `rope.rotate_`, of patches at rows and columns `at` (2, patches).

    The first half of a head's waves turns with the row, the second with the column, both at the same rates (2D-RoPE,
    arXiv:2409.12191, section 2.1).
    """
    half = head_dim // 2
    powers = torch.arange(0, half, 2, dtype=torch.float32, device=at.device) / half
    angles = at.unsqueeze(2) * (1.0 / theta**powers)  # (2, patches, head_dim / 4)
    return rotation(torch.cat((angles[0], angles[1]), dim=-1), dtype)
