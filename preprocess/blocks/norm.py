"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = list(weight.shape)

    @classmethod
    def load(cls, checkpoint: Checkpoint, module: str, width: int, eps: float) -> RMSNorm:
        """The norm of `module`."""
        return cls(checkpoint.tensor(f"{module}.weight", (width,)), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, width) → (…, width)."""
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class LayerNorm:
    """Layer normalisation (Ba, Kiros and Hinton 2016, arXiv:1607.06450)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self._shape = list(weight.shape)

    @classmethod
    def load(cls, checkpoint: Checkpoint, module: str, width: int, eps: float) -> LayerNorm:
        """The norm of `module`."""
        weight = checkpoint.tensor(f"{module}.weight", (width,))
        return cls(weight, checkpoint.tensor(f"{module}.bias", (width,)), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, width) → (…, width)."""
        return F.layer_norm(x, self._shape, self.weight, self.bias, self.eps)
