"""Fills the caches of kernels that compile at first use, so that no start waits for them: `beholder prebuild`."""

from __future__ import annotations

import time

from engine.config import EngineConfig
from engine.load import load_runner


def prebuild(config: EngineConfig) -> float | None:
    """Runs every kind of work of a model once, and compiles what a server compiles while it runs. Seconds that it took;
    None where nothing is compiled for the device.

    Raises:
        ModelError: The folder or an option cannot be honoured.
    """
    started = time.monotonic()
    runner = load_runner(config)
    if runner.slot_table.device.type == "cpu":
        return None
    from engine.gpu.runner import CudaRunner

    runner.warm_up()
    if isinstance(runner, CudaRunner):
        runner.compile_all()
    return time.monotonic() - started
