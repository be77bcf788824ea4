"""Where fused kernels for a GPU compute: a layer that has one asks here; elsewhere torch's operations do its work."""

import torch


def is_fused(x: torch.Tensor) -> bool:
    """Whether `x` lies on a GPU."""
    return x.device.type == "cuda"
