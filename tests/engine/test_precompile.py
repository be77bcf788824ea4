"""Triton kernels that are found and compiled before they are launched. Compiles for a device that need not be here.

PYTHONPATH=…:folder-of-triton python -m pytest tests/engine/test_precompile.py     # needs triton, no device
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_heads import tiny_head

from tests.engine.gpu import INTERPRETED
from tests.engine.simulated_gpu import load_simulated, simulate

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

    from engine.gpu import decode_kernels
    from preprocess.blocks import gpu_kernels
    from preprocess.vision import gpu_windows

    kernels = gpu_kernels._rms_norm, gpu_kernels._silu_mul, decode_kernels.attend, gpu_windows._attend
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for kernel in kernels:
        kernel.device_caches.clear()
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    yield made
    for kernel in kernels:
        kernel.device_caches.clear()


@needs_compiler
def test_what_work_would_launch_is_compiled_and_not_launched(driver: Driver) -> None:
    from engine.gpu.precompile import _launched, compile_launched
    from preprocess.blocks.gpu_kernels import rms_norm, silu_mul

    x, weight = torch.zeros(3, 64), torch.zeros(64)
    gates = torch.ones(3, 128)

    def work() -> None:
        rms_norm(x, weight, 1e-6)
        rms_norm(x, weight, 1e-6, into=x)
        rms_norm(x, weight, 1e-6, into=x)
        silu_mul(gates)

    assert compile_launched(work) == 3
    assert sorted(driver.loaded) == ["_rms_norm", "_rms_norm", "_silu_mul"]
    assert _launched(work) == [], "all are known now"
    assert compile_launched(work) == 0
    assert len(driver.loaded) == 3


@needs_compiler
def test_other_types_are_other_kernels(driver: Driver) -> None:
    from engine.gpu.precompile import compile_launched
    from preprocess.blocks.gpu_kernels import silu_mul

    assert compile_launched(lambda: silu_mul(torch.ones(1, 128))) == 1
    assert compile_launched(lambda: silu_mul(torch.ones(5, 128))) == 0
    assert compile_launched(lambda: silu_mul(torch.ones(1, 128, dtype=torch.bfloat16))) == 1


@needs_compiler
@pytest.mark.parametrize(("heads", "dim", "widths"), [(2, 128, 5), (8, 128, 5), (4, 256, 5), (16, 128, 4)])
def test_attention_of_rows_with_drafts_fits_the_device(driver: Driver, heads: int, dim: int, widths: int) -> None:
    """A kernel for each width that one program has room for, of so many query heads to a key head: it is refused where
    shared memory does not do.
    """
    from engine.gpu.decode_attention import DecodeAttention, DecodeRows, most_queries
    from engine.gpu.precompile import compile_launched

    pool = torch.zeros((1, 16, 2, 1, dim), dtype=torch.bfloat16)
    attention = DecodeAttention(pool, torch.zeros((2, 16), dtype=torch.int32), heads, most_rows=1, most_queries=16)
    query = torch.zeros((16, heads, dim), dtype=torch.bfloat16)
    places, positions, cut, seen = torch.zeros((4, 16), dtype=torch.int32)

    def work() -> None:
        for width in (1, 2, 4, 8, 16):
            if width <= most_queries(heads, 1, dim):
                rows = DecodeRows(
                    places[:width], positions[:width], cut[:1], seen[:width] if width > 1 else None, width
                )
                attention.read(0, rows, query[:width], torch.empty_like(query[:width]))

    assert compile_launched(work) == widths
    assert driver.loaded == ["attend"] * widths


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [80, 64])
def test_attention_within_windows_asks_for_all_it_reads_before_it_waits(
    driver: Driver, dim: int, dtype: torch.dtype
) -> None:
    """What is read before the first barrier is on its way at once; behind it, it would be waited for once more."""
    from engine.gpu.precompile import compile_launched
    from preprocess.vision import gpu_windows

    qkv, angles = torch.zeros((1, 80, 12, dim), dtype=dtype), torch.zeros((80, 1, dim), dtype=dtype)
    work = partial(gpu_windows.attend_in_windows, qkv, (angles, angles), [(1, 64), (1, 16)])
    assert compile_launched(work) == 1
    assert driver.loaded == ["_attend"]
    [compiled] = gpu_windows._attend.device_caches[0][0].values()
    first, *later = compiled.asm["ptx"].split("bar.sync")
    assert "ld.global" in first
    assert later
    assert not any("ld.global" in part for part in later)


@needs_compiler
@pytest.mark.parametrize("dim", [64, 128])
def test_guesses_of_all_sizes_are_compiled_by_a_few(
    driver: Driver, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """What a head launches for any number of sequences and tokens is known before the first."""
    from triton.runtime.jit import JITFunction

    from engine.gpu import decode_kernels, kernels
    from engine.gpu.precompile import _launched, compile_launched

    simulate(monkeypatch, interpreted=True)
    fields = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "head_dim": dim}
    head = str(tiny_head(tmp_path / "head", tiny_model, fields=fields, draft_vocab_size=80))
    runner = load_simulated(tiny_model, max_rows=64, dtype=torch.bfloat16, draft_head=head)
    graphs = runner._guess_graphs
    assert graphs is not None
    for kernel in (*vars(kernels).values(), decode_kernels.attend):
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()
    assert compile_launched(graphs.send_all) > 8
    assert {"guess_inputs", "attend", "draw_blocks", "_rms_norm"} <= set(driver.loaded)

    def everything() -> None:
        for size in graphs.sizes():
            layout = graphs._layout(*size)
            graphs._send([], [], [], layout)
            graphs._first(layout)
            graphs._following(layout)
            for filters in (False, True):
                graphs._draw(layout, filters=filters)

    with torch.inference_mode():
        assert _launched(everything) == []


@needs_compiler
def test_a_launcher_that_was_loaded_before_stays_that_of_its_kernel(tmp_path: Path) -> None:
    """Real modules of one name, each loaded for the second time, by turns: Python has one object for all of them."""
    from triton.runtime import build

    from engine.gpu.precompile import each_its_own

    source = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__twin", NULL, -1, methods};
PyMODINIT_FUNC PyInit___twin(void) { return PyModule_Create(&module); }
"""
    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "twin.c").write_text(source % number)
        paths.append(build._build("__twin", str(folder / "twin.c"), str(folder), [], [], [], []))
    for path in paths:
        build._load_module_from_path("__twin", path)
    one, other = (build._load_module_from_path("__twin", path) for path in paths)
    assert one.launch() == other.launch() == 2, "as Python does it"
    load = each_its_own(build._load_module_from_path)
    one, other = (load("__twin", path) for path in paths)
    assert (one.launch(), other.launch()) == (1, 2)
