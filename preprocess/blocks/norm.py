"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fusion import is_fused

Pair = tuple[torch.Tensor, torch.Tensor]
"""A sum and its norm."""


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = list(weight.shape)
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._wide_weight = weight.float()

    @classmethod
    def load(cls, checkpoint: Checkpoint, module: str, width: int, eps: float) -> RMSNorm:
        """The norm of `module`."""
        return cls(checkpoint.tensor(f"{module}.weight", (width,)), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, width) → (…, width)."""
        if is_fused(x):
            from preprocess.blocks.gpu_kernels import rms_norm

            return rms_norm(x, self.weight, self.eps)
        # `F.rms_norm` of a CPU is a dozen operations; this is seven, with the same result.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # (…, 1)
        scale = torch.addcmul(self._eps, length, length, value=1 / self._shape[0]).rsqrt_()
        return (wide * scale).mul_(self._wide_weight).to(x.dtype)

    def of_sum(self, x: torch.Tensor, y: torch.Tensor | None, out: Pair | None = None) -> Pair:
        """See `LayerNorm.of_sum`."""
        if y is not None and is_fused(x):
            from preprocess.blocks.gpu_kernels import rms_norm

            normed = rms_norm(x, self.weight, self.eps, into=y, out=out)
            return y if out is None else out[0], normed
        total = x if y is None else x + y
        return _written(total, self(total), out)


class QKNorm:
    """RMS normalisation of each query and key head by itself (QK-norm, arXiv:2302.05442): all heads in one go.

    Attributes:
        weight: (heads + kv_heads, head_dim): the queries' weight for each query head, then the keys'.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = [weight.shape[1]]
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._wide_weight = weight.float()

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, attention: str, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> QKNorm:
        """The norms of an attention module."""
        q = checkpoint.tensor(f"{attention}.q_norm.weight", (head_dim,))
        k = checkpoint.tensor(f"{attention}.k_norm.weight", (head_dim,))
        return cls(torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))), eps)

    def normalise_(self, heads: torch.Tensor) -> None:
        """Normalises (tokens, heads + kv_heads, head_dim) in place."""
        wide = heads.float()
        if heads.device.type != "cpu":
            wide = F.rms_norm(wide, self._shape, eps=self.eps)
        else:  # as in `RMSNorm`
            length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            wide = wide * torch.addcmul(self._eps, length, length, value=1 / self._shape[0]).rsqrt_()
        heads.copy_(wide.mul_(self._wide_weight))


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
        if is_fused(x):
            from preprocess.blocks.gpu_kernels import layer_norm

            return layer_norm(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self._shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, y: torch.Tensor | None, out: Pair | None = None) -> Pair:
        """x + y, or x where `y` is None, and its norm; written to the two of `out`, where it is given.

        On a GPU it is one pass, and `y` becomes the sum where there is no `out`.
        """
        if y is not None and is_fused(x):
            from preprocess.blocks.gpu_kernels import layer_norm

            normed = layer_norm(x, self.weight, self.bias, self.eps, into=y, out=out)
            return y if out is None else out[0], normed
        total = x if y is None else x + y
        return _written(total, self(total), out)


def _written(total: torch.Tensor, normed: torch.Tensor, out: Pair | None) -> Pair:
    return (total, normed) if out is None else (out[0].copy_(total), out[1].copy_(normed))
