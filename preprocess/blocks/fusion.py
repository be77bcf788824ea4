"""What launches of a GPU's fused kernels share. A layer that has one asks here where it computes; elsewhere torch's
operations do its work.
"""

import torch


def is_fused(x: torch.Tensor) -> bool:
    """Whether `x` lies on a GPU."""
    return x.device.type == "cuda"


def power_of_two(value: int) -> int:
    """The least that is not below `value`: sizes of a Triton kernel's blocks are powers of two."""
    return 1 << (value - 1).bit_length()
