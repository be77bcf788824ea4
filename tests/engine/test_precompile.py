"""Triton kernels that are found and compiled before they are launched. Compiles for a device that need not be here.

PYTHONPATH=…:folder-of-triton python -m pytest tests/engine/test_precompile.py     # needs triton, no device
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.gpu import INTERPRETED

IS_HERE = importlib.util.find_spec("triton") is not None and not INTERPRETED and not torch.cuda.is_available()
needs_compiler = pytest.mark.skipif(not IS_HERE, reason="needs triton, not its interpreter, and no CUDA device")


class Driver:
    """Of an H200 that nobody launches anything on."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.utils: Any = self
        self.launcher_cls: Any = lambda source, metadata: None

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """As far as a kernel needs them."""
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Notes which kernels would be sent to the device."""
        self.loaded.append(name)
        return 1, 1, 0, 0, 1024


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    """An empty cache, and kernels that nobody has compiled."""
    import triton

    from engine.gpu import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for kernel in (kernels.add_rms_norm, kernels.silu_mul):
        kernel.device_caches.clear()
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    yield made
    for kernel in (kernels.add_rms_norm, kernels.silu_mul):
        kernel.device_caches.clear()


@needs_compiler
def test_what_work_would_launch_is_compiled_and_not_launched(driver: Driver) -> None:
    from engine.gpu.ops import add_rms_norm, silu_mul
    from engine.gpu.precompile import _launched, compile_launched

    x, weight = torch.zeros(3, 64), torch.zeros(64)
    gates = torch.ones(3, 128)

    def work() -> None:
        add_rms_norm(None, x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6)
        silu_mul(gates)

    assert compile_launched(work) == 3
    assert sorted(driver.loaded) == ["add_rms_norm", "add_rms_norm", "silu_mul"]
    assert _launched(work) == [], "all are known now"
    assert compile_launched(work) == 0
    assert len(driver.loaded) == 3


@needs_compiler
def test_other_types_are_other_kernels(driver: Driver) -> None:
    from engine.gpu.ops import silu_mul
    from engine.gpu.precompile import compile_launched

    assert compile_launched(lambda: silu_mul(torch.ones(1, 128))) == 1
    assert compile_launched(lambda: silu_mul(torch.ones(5, 128))) == 0
    assert compile_launched(lambda: silu_mul(torch.ones(1, 128, dtype=torch.bfloat16))) == 1
