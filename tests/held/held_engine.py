"""The engine process whose endless answers are held up."""

from __future__ import annotations

import time

from held import held, wait_for_start

from engine import process
from engine.core import Engine
from preprocess.wire import OutputStart, TokenEvents

ENDLESS = 777
"""`serving.ENDLESS`"""
BEGINNING = 30
"""Tokens that do come."""
step = Engine.step


def _step(self: Engine) -> list[OutputStart | TokenEvents]:
    """Whoever waits and has room, ends, or asked for another number of tokens is served as always."""
    running = self.scheduler.running
    begun = (each.request.sampling.max_tokens == ENDLESS and len(each.output_ids) >= BEGINNING for each in running)
    may_begin = self.waiting and len(running) < self.config.max_running
    if running and not may_begin and not self._flagged and all(begun) and held("answers"):
        time.sleep(0.005)
        return []
    return step(self)


if __name__ == "__main__":
    wait_for_start()
    Engine.step = _step  # type: ignore[method-assign]
    process.main()
