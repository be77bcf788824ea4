"""FlashInfer's compiled kernels, loaded beside whatever else a start does, and compiled where they are not cached.

    tiled    any batch, on any device; compiles for twenty seconds in a thread, and the first step waits for it
    Hopper   large chunks of prompts, on that generation alone, half as long again as fast; compiles for more than a
             minute, so in a process of its own while requests are served, at the lowest priority

`python -m engine.attention.flashinfer_modules TYPE HEAD_DIM` is that process: it fills the library's cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any, Final, Protocol

import torch

TILED: Final = "fa2"
HOPPER: Final = "fa3"

HEAD_DIMS: Final = (64, 128, 256)
"""Sizes of heads that the kernels are made for."""

logger = logging.getLogger("beholder.engine")


def is_usable(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer is installed and has kernels for this type and size of heads."""
    usable = dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS
    return usable and importlib.util.find_spec("flashinfer") is not None


class AttentionModules(Protocol):
    """What attention is computed with: `tiled` any batch, `hopper` large chunks of prompts, where it is not None."""

    @property
    def tiled(self) -> Any: ...

    @property
    def hopper(self) -> Any | None: ...

    def look(self) -> None:
        """Start to compile the Hopper kernel where it is missing, and load it once that has been done. Never waits."""
        ...

    def wait(self) -> None:
        """Compile what is missing and wait for it."""
        ...


class _Nothing:
    """Plans and runs nothing."""

    def plan(self, *_: object) -> list[int]:
        return []

    def paged_run(self, *_: object) -> None:
        return None


class NoModules:
    """`AttentionModules` in whose place nothing is computed."""

    tiled: Any = _Nothing()
    hopper: Any | None = None

    def look(self) -> None:
        """Nothing is compiled."""

    def wait(self) -> None:
        """Nothing is waited for."""


class Modules:
    """`AttentionModules` for one type and size of heads. They begin to load at once; both properties wait for that.

    Attributes:
        is_final: Whether `hopper` will stay as it is.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._dtype = dtype
        self._head_dim = head_dim
        self._tiled: Future[Any] = Future()
        self._hopper: Future[Any] = Future()
        self._building: subprocess.Popen[bytes] | None = None
        self.is_final = not has_hopper()
        threading.Thread(target=self._load, name="flashinfer", daemon=True).start()

    @property
    def tiled(self) -> Any:
        """The kernel for everything."""
        return self._tiled.result()

    @property
    def hopper(self) -> Any | None:
        """The kernel for large chunks; None where there is none yet, or never will be."""
        return self._hopper.result()

    def look(self) -> None:
        """See `AttentionModules.look`."""
        if self.is_final:
            return
        if self.hopper is not None:
            self.is_final = True
            return
        if self._building is None:
            try:
                self._building = _start_build(self._dtype, self._head_dim)
            except OSError:  # such as too many processes
                logger.warning("prompts are read without FlashInfer's Hopper kernel", exc_info=True)
                self.is_final = True
        elif self._building.poll() is not None:
            self._take_built(self._building.returncode)

    def wait(self) -> None:
        """See `AttentionModules.wait`."""
        self.look()
        while not self.is_final:
            if self._building is not None:
                self._building.wait()
            self.look()

    def _take_built(self, code: int) -> None:
        self.is_final = True
        try:
            if code:
                raise RuntimeError(f"the compiler ended with code {code}")
            loaded = _loaded(_spec(HOPPER, self._dtype, self._head_dim))
        except Exception:  # the library compiles, links and loads: whatever fails there, the other kernel serves
            logger.warning("prompts are read without FlashInfer's Hopper kernel", exc_info=True)
            return
        self._hopper = Future()
        self._hopper.set_result(loaded)
        logger.info("FlashInfer's Hopper kernel is compiled and in use")

    def _load(self) -> None:
        try:
            self._tiled.set_result(_spec(TILED, self._dtype, self._head_dim).build_and_load())
        except BaseException as error:  # whoever needs the kernel gets it
            self._tiled.set_exception(error)
        try:
            spec = None if self.is_final else _spec(HOPPER, self._dtype, self._head_dim)
            # As it lies there: looking whether it is fresh may compile it anew, where a start waits for it.
            self._hopper.set_result(_loaded(spec) if spec is not None and spec.is_compiled else None)
        except Exception:
            logger.warning("FlashInfer's Hopper kernel is cached and cannot be loaded", exc_info=True)
            self._hopper.set_result(None)


def _loaded(spec: Any) -> Any:
    """The library's own file of it, or the one that was compiled here."""
    return spec.load(spec.get_library_path())


def has_hopper() -> bool:
    """Whether the device is of the generation that the Hopper kernel is made for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def build(dtype: torch.dtype, head_dim: int) -> None:
    """Compile the Hopper kernel into the library's cache, where it is not there yet."""
    _spec(HOPPER, dtype, head_dim).build(need_lock=True)


def _spec(variant: str, dtype: torch.dtype, head_dim: int) -> Any:
    from flashinfer.jit.attention import gen_batch_prefill_module

    return gen_batch_prefill_module(
        variant, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
    )


def _start_build(dtype: torch.dtype, head_dim: int) -> subprocess.Popen[bytes]:
    """The process ends, with all that it has started, when this one does: its standard input then ends."""
    name = str(dtype).removeprefix("torch.")
    jobs = os.environ.get("MAX_JOBS") or str(max(1, (os.cpu_count() or 1) // 2))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, name, str(head_dim)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "MAX_JOBS": jobs},
        start_new_session=True,
    )


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """What the process does."""
    name, head_dim = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(19)
    build(getattr(torch, name), int(head_dim))


if __name__ == "__main__":
    main()
