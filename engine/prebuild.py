"""Fills the caches of kernels that compile at first use, so that no start waits for them: `beholder prebuild`."""

from __future__ import annotations

import time

from engine.batch import OverlappedRunner
from engine.config import EngineConfig
from engine.load import load_runner


def prebuild(config: EngineConfig) -> float | None:
    """Runs every kind of work of a model once. Seconds that it took; None where nothing is compiled for the device.

    Raises:
        ModelError: The folder or an option cannot be honoured.
    """
    started = time.monotonic()
    runner = load_runner(config)
    if not isinstance(runner, OverlappedRunner):
        return None
    runner.warm_up()
    return time.monotonic() - started
