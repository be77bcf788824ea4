"""Where tests of the GPU's own code run: on the device; or its kernels alone, slowly, in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_gpu_kernels.py     # needs triton, no device
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

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


def _let_bounds_be_loaded() -> None:
    """Triton 3.6's interpreter keeps a scalar in an array of one element, which numpy since 2.4 takes for no bound of a
    loop.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: value.handle.data.item())

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    _let_bounds_be_loaded()
