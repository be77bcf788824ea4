"""What every encoder does first: pixels of 8 bits become numbers around 0, on the device that encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from preprocess.blocks.fields import Fields

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
        rescale = settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0
        means, stds = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        if settings.flag("do_normalize", True):
            means, stds = _channels(settings, "image_mean", mean), _channels(settings, "image_std", std)
        return cls((rescale / stds).to(device, torch.float32), (-means / stds).to(device, torch.float32))

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 (tiles, height, width, 3) → float32."""
        width = tiles.shape[2]
        lines = tiles.flatten(2).float()  # (tiles, height, width * 3): operations over rows of 3 are many times slower
        return torch.addcmul(self.shift.repeat(width), lines, self.scale.repeat(width)).view(tiles.shape)


def _channels(settings: Fields, name: str, default: Sequence[float]) -> torch.Tensor:
    value = settings.values.get(name) or list(default)
    if not (isinstance(value, list) and len(value) == 3 and all(isinstance(part, (int, float)) for part in value)):
        raise settings.error(name, value, "three numbers")
    return torch.tensor(value, dtype=torch.float64)
