"""What every encoder does first: pixels of 8 bits become numbers around 0, on the device that encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from preprocess.blocks.fields import Fields
from preprocess.families.settings import normalisation

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
"""Of the pictures that CLIP was trained on (arXiv:2103.00020), which others took over."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """pixel → (pixel * rescale - mean) / std by channel, as one scale and one shift."""

    scale: torch.Tensor  # (3,)
    shift: torch.Tensor  # (3,)

    @classmethod
    def read(
        cls,
        settings: Fields,
        device: torch.device,
        *,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> Normalisation:
        """From a processor's settings; absent fields are `mean` and `std`, as its class has them."""
        how = normalisation(settings, mean, std)
        means, stds = (torch.tensor(values, dtype=torch.float64) for values in (how.mean, how.std))
        return cls((how.scale / stds).to(device, torch.float32), (-means / stds).to(device, torch.float32))

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 (tiles, height, width, 3) → float32."""
        width = tiles.shape[2]
        lines = tiles.flatten(2).float()  # (tiles, height, width * 3): operations over rows of 3 are many times slower
        return torch.addcmul(self.shift.repeat(width), lines, self.scale.repeat(width)).view(tiles.shape)
