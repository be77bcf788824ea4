"""Patches of pictures in the order that Qwen-VL encoders take: those that become one vision token stand together.

merge 2:   0  1 │  4  5        token 0 is made of patches 0 … 3, token 1 of 4 … 7
           2  3 │  6  7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fusion import is_fused
from preprocess.blocks.linear import Linear
from preprocess.blocks.rope import rotation
from preprocess.families.settings import check_alike, normalisation
from preprocess.model_folder import ModelFolder
from preprocess.vision.normalisation import CLIP_MEAN, CLIP_STD, Normalisation

_BLOCK: Final = 64
"""Inputs that a GPU's products read at once; where others are left over they are slow."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of a picture in the encoder's order.

    Attributes:
        rows, columns: Of tokens.
        merge: Side of the block of patches that becomes one token.
        window: Side in tokens of the windows that tokens are ordered by (see `qwen2_vl.window_order`); 0: row by row.
    """

    rows: int
    columns: int
    merge: int = 1
    window: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.rows * self.columns

    @property
    def patches(self) -> int:
        """All of them."""
        return self.tokens * self.merge**2


class PatchEmbedding:
    """Pixels of pictures, or of clips by so many frames, → patches in the encoder's width.

    Args:
        checkpoint: Where the weights are, and the processors' settings.
        module: Of the convolution.
        shape: Its weight's: (width, 3, frames, patch, patch).
        merge: Side of the block of patches that becomes one vision token.
        bias: Whether it has one.
        clip_mean, clip_std: What clips are normalised by where the folder does not say.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: str,
        shape: tuple[int, int, int, int, int],
        merge: int,
        *,
        bias: bool,
        clip_mean: Sequence[float] = CLIP_MEAN,
        clip_std: Sequence[float] = CLIP_STD,
    ) -> None:
        folder, device = ModelFolder(checkpoint.folder), checkpoint.device
        self.of_picture = Normalisation.read(folder.image_settings, device, mean=CLIP_MEAN, std=CLIP_STD)
        self.of_clip = Normalisation.read(folder.video_settings, device, mean=clip_mean, std=clip_std)
        if shape[2] == 1:
            pictures = normalisation(folder.image_settings, CLIP_MEAN, CLIP_STD)
            check_alike(pictures, normalisation(folder.video_settings, clip_mean, clip_std))
        kernel = checkpoint.tensor(f"{module}.weight", shape)
        shift = checkpoint.tensor(f"{module}.bias", shape[:1]) if bias else None
        # Pixels stay in (frame, row, column, channel) order, so the convolution's weight takes that order too.
        self.clip_patches = _filled_up(kernel.permute(0, 2, 3, 4, 1).flatten(1), shift)
        # All frames of a picture are the same, so that it is enough to multiply it once.
        self.picture_patches = _filled_up(kernel.sum(2).permute(0, 2, 3, 1).flatten(1), shift)
        self.frames, self.patch = shape[2], shape[3]
        self.merge = merge
        self.dtype = checkpoint.dtype

    def grid(self, height: int, width: int, window: int = 0) -> Grid:
        """Of a picture of so many pixels. Raises ValueError for sides that tokens do not fill."""
        side = self.patch * self.merge
        if height % side or width % side:
            raise ValueError(f"picture of {height}×{width} pixels, expected sides in {side} pixels")
        return Grid(height // side, width // side, self.merge, window)

    def __call__(self, items: torch.Tensor, grid: Grid) -> torch.Tensor:
        """uint8 (items, frames, height, width, 3) → (items, patches, width): row by row, on a GPU as `grid` says."""
        frames = items.shape[1]
        if frames not in (1, self.frames):
            raise ValueError(f"an item of {frames} frames, expected 1 (a picture) or {self.frames} (of a clip)")
        normalise, embed = (self.of_picture, self.picture_patches) if frames == 1 else (self.of_clip, self.clip_patches)
        if is_fused(items):
            from preprocess.vision.gpu_patches import cut

            return embed(cut(items, normalise, grid, self.patch, embed.inputs, self.dtype))
        pixels = normalise(items.flatten(0, 1)).to(self.dtype).view(items.shape)
        return embed(unfold(pixels, self.patch, self.merge))


def _filled_up(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """With zeros for inputs that there are not, up to whole blocks, on a GPU."""
    return Linear(F.pad(weight, (0, -weight.shape[1] % _BLOCK)) if is_fused(weight) else weight, bias)


def unfold(pixels: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """(items, frames, height, width, 3) → (items, patches, frames * patch * patch * 3)."""
    items, frames, height, width, channels = pixels.shape
    block = patch * merge
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
