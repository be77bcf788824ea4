"""Compiles Triton kernels side by side, before the first of them is launched: by themselves they would be compiled one
after the other, each when it is needed first.

Which kernels, and for which types and sizes, is found out by running the work itself without launching anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from triton import knobs
from triton.runtime import build as modules
from triton.runtime.jit import JITFunction

MOST_THREADS: Final = 16
LOADER: Final = "_load_module_from_path"
"""What Triton 3 loads launchers with."""

logger = logging.getLogger("beholder.engine")


def compile_launched(work: Callable[[], object]) -> int:
    """Compile what `work` would launch, or load it from the cache on disk. How many kernels that were.

    `work` runs once; what it launches does nothing, so that results are whatever was in memory. It must not look at
    them, nor give them to anything but such kernels that takes them for indices.
    """
    found = _launched(work)
    device = torch.cuda.current_device()

    def build(kernel: tuple[JITFunction[Any], str]) -> None:
        torch.cuda.set_device(device)
        function, specialisation = kernel
        try:
            compiled: Any = function.preload(specialisation)
            compiled.run  # noqa: B018  its launcher is compiled, and the kernel sent to the device, at the first look
        except Exception:  # whoever launches it gets the error
            logger.debug("%s is not compiled ahead", function, exc_info=True)

    load = getattr(modules, LOADER, None)
    patch = contextlib.nullcontext() if load is None else mock.patch.object(modules, LOADER, each_its_own(load))
    most = MOST_THREADS if load is not None else 1  # another Triton, whose launchers may get mixed up
    with patch, ThreadPoolExecutor(min(most, os.cpu_count() or 1), "triton") as threads:
        list(threads.map(build, found))
    return len(found)


def each_its_own(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """Loads launchers as `load` does, for threads. Kernels of alike arguments share a file, all files a name; and what
    Python loads from a file for the second time it puts into the one module of that name. So another thread may find
    its own launcher replaced before it takes it.
    """
    one_at_a_time = threading.Lock()

    def load_own(name: str, path: str) -> ModuleType:
        with one_at_a_time:
            own = ModuleType(name)
            vars(own).update(vars(load(name, path)))
            return own

    return load_own


def _launched(work: Callable[[], object]) -> list[tuple[JITFunction[Any], str]]:
    """Kernels and what they are specialised for, those that are not compiled yet."""
    found: dict[tuple[int, str], tuple[JITFunction[Any], str]] = {}
    run = JITFunction.run

    def only_look(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.setdefault((id(fn.jit_function), key), (fn.jit_function, compile["specialization_data"]))
        return True  # do not compile it now

    with mock.patch.object(JITFunction, "run", only_look), mock.patch.object(knobs.runtime, "jit_cache_hook", note):
        work()
    return list(found.values())
