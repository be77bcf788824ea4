"""Where tests of the GPU's own code run: on the device; or its kernels alone, slowly, in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_gpu_kernels.py     # needs triton, no device
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
needs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED),
        reason="needs a CUDA device, or TRITON_INTERPRET=1 and triton",
    ),
]
