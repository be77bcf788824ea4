"""FlashInfer's modules: what is loaded at once, what is compiled beside serving, and what happens when that fails."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.attention import flashinfer_modules
from engine.attention.flashinfer_modules import HOPPER, TILED, Modules


class Spec:
    """A kernel of the library: compiled or not, whole or broken."""

    def __init__(self, variant: str, *, compiled: bool, works: bool = True) -> None:
        self.variant = variant
        self.is_compiled = compiled
        self.works = works
        self.path = "cached"
        self.may_end = threading.Event()
        self.may_end.set()

    def build_and_load(self) -> str:
        """Compiles where that was not done."""
        self.may_end.wait()
        self.is_compiled = True
        return self.load()

    def get_library_path(self) -> str:
        """Where it lies, with the library or in its cache."""
        return self.path

    def load(self, path: str | None = None) -> str:
        """A stand-in for the loaded module."""
        if not self.works or path not in (None, self.path):
            raise OSError("cannot be loaded")
        return f"module {self.variant}"


class Build:
    """The process that compiles."""

    returncode: int | None = None

    def poll(self) -> int | None:
        """Its code once it has ended."""
        return self.returncode

    def wait(self) -> int:
        """It ends well."""
        self.returncode = 0
        return 0


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Spec]:
    """What the library would give, on a Hopper device with nothing of that variant cached."""
    found = {TILED: Spec(TILED, compiled=False), HOPPER: Spec(HOPPER, compiled=False)}
    attention: Any = ModuleType("flashinfer.jit.attention")
    attention.gen_batch_prefill_module = lambda variant, *_: found[variant]
    for name, module in (
        ("flashinfer", ModuleType("flashinfer")),
        ("flashinfer.jit", ModuleType("flashinfer.jit")),
        ("flashinfer.jit.attention", attention),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_modules, "has_hopper", lambda: True)
    return found


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Build]:
    """The processes that were started."""
    started: list[Build] = []

    def start(dtype: torch.dtype, head_dim: int) -> Build:
        started.append(Build())
        return started[-1]

    monkeypatch.setattr(flashinfer_modules, "_start_build", start)
    return started


def _modules() -> Modules:
    return Modules(torch.bfloat16, 128)


def test_loading_goes_on_beside_others_and_whoever_needs_it_waits(specs: dict[str, Spec]) -> None:
    specs[TILED].may_end.clear()
    modules = _modules()
    assert not modules._tiled.done()
    specs[TILED].may_end.set()
    assert modules.tiled == "module fa2"
    assert modules.hopper is None


def test_a_cached_hopper_kernel_is_there_from_the_beginning(specs: dict[str, Spec], builds: list[Build]) -> None:
    specs[HOPPER].is_compiled = True
    modules = _modules()
    assert modules.hopper == "module fa3"
    modules.look()
    assert modules.is_final
    assert not builds


@pytest.mark.parametrize("path", ["cached", "with the library"])
def test_a_start_never_waits_for_a_stale_hopper_kernel(specs: dict[str, Spec], path: str) -> None:
    specs[HOPPER].is_compiled, specs[HOPPER].path = True, path
    specs[HOPPER].may_end.clear()  # compiling it anew would not end
    modules = _modules()
    try:
        assert modules._hopper.result(timeout=10) == "module fa3"
    finally:
        specs[HOPPER].may_end.set()


def test_a_missing_hopper_kernel_is_compiled_once_and_swapped_in(specs: dict[str, Spec], builds: list[Build]) -> None:
    modules = _modules()
    for _ in range(3):
        modules.look()
    assert len(builds) == 1
    assert modules.hopper is None
    builds[0].returncode = 0
    modules.look()
    assert modules.hopper == "module fa3"
    modules.look()
    assert modules.is_final
    assert len(builds) == 1


@pytest.mark.parametrize("fault", ["the compiler fails", "the module cannot be loaded"])
def test_without_it_the_other_kernel_serves(
    specs: dict[str, Spec], builds: list[Build], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    modules = _modules()
    modules.look()
    specs[HOPPER].works = fault != "the module cannot be loaded"
    builds[0].returncode = 1 if fault == "the compiler fails" else 0
    modules.look()
    modules.look()
    assert modules.hopper is None
    assert modules.is_final
    assert modules.tiled == "module fa2"
    assert len(builds) == 1
    assert "without FlashInfer's Hopper kernel" in caplog.text


def test_a_compiler_that_cannot_be_started_is_not_tried_again(
    specs: dict[str, Spec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(dtype: torch.dtype, head_dim: int) -> Build:
        raise OSError("no more processes")

    monkeypatch.setattr(flashinfer_modules, "_start_build", fails)
    modules = _modules()
    modules.look()
    modules.look()
    assert modules.is_final
    assert modules.hopper is None
    assert caplog.text.count("without FlashInfer's Hopper kernel") == 1


def test_a_broken_cache_is_compiled_anew(specs: dict[str, Spec], builds: list[Build]) -> None:
    specs[HOPPER].is_compiled, specs[HOPPER].works = True, False
    modules = _modules()
    assert modules.hopper is None
    modules.look()
    specs[HOPPER].works = True
    builds[0].returncode = 0
    modules.look()
    assert modules.hopper == "module fa3"


def test_prebuilding_waits(specs: dict[str, Spec], builds: list[Build]) -> None:
    modules = _modules()
    modules.wait()
    assert modules.hopper == "module fa3"
    assert len(builds) == 1


def test_other_devices_have_none(specs: dict[str, Spec], builds: list[Build], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_modules, "has_hopper", lambda: False)
    specs[HOPPER].is_compiled = True
    modules = _modules()
    modules.look()
    modules.wait()
    assert modules.hopper is None
    assert not builds


def test_what_a_compiler_says_reaches_whoever_needs_the_kernel(specs: dict[str, Spec]) -> None:
    specs[TILED].works = False
    modules = _modules()
    with pytest.raises(OSError, match="cannot be loaded"):
        _ = modules.tiled


def test_the_compiling_process_ends_with_its_parent(tmp_path: Any) -> None:
    """It is told by the end of its standard input, and takes along what it has started."""
    import os
    import subprocess

    code = (
        "import subprocess, sys, threading, time; from engine.attention import flashinfer_modules as m; "
        "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); "
        "threading.Thread(target=m._end_with_parent, daemon=True).start(); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    child = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(20) == -9
    for _ in range(200):
        try:
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().split()[2] == "Z":  # nobody is left here to bury it
                    break
        except FileNotFoundError:
            break
        threading.Event().wait(0.05)
    else:
        os.kill(child, 9)
        pytest.fail("the compiler runs on")
    process.stdout.close()
