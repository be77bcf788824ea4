"""Process: the engine. Feeds `Engine` from its socket, steps it while it has work, sends what each step made.

The server hears of admission and statistics; tokens go to the detokenizer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil
import zmq

from engine.config import EngineConfig
from engine.start_times import StartTimes
from preprocess.arena import Arena
from preprocess.child import Child
from preprocess.errors import BeholderError
from preprocess.wire import (
    Abort,
    EngineInput,
    EngineRequest,
    EngineStats,
    Pixels,
    Reset,
    ResetDone,
)

if TYPE_CHECKING:
    import torch

    from engine.core import Engine

STATS_EVERY_MS = 250
IDLE_WAIT_MS = 1_000
PACE_ROWS = 8
"""Streams of the step that the table at start tells of."""


def main() -> None:
    """Load the model, then serve until the launcher ends this process."""
    child = Child.from_stdin()
    config = child.config(EngineConfig)
    inbox = child.bind("engine")  # before the long load: what is sent meanwhile waits in line
    lap = StartTimes(time.time() - psutil.Process().create_time())
    from engine.core import Engine, batched_tokens  # torch takes seconds to import: after the sockets stand
    from engine.grammar import Grammars
    from engine.limits import with_vision_cache
    from engine.load import load_runner
    from engine.step_measure import measure

    lap("imports")
    started = time.monotonic()
    try:
        runner = load_runner(config, lap)
        grammars = Grammars(config.model, runner.vocab_size)
        grammars.load_ahead()  # in a thread, while this one waits for compilers
        runner.warm_up(lap)
        grammars.warm_up()
        lap("grammars")
        costs = measure(runner, batched_tokens(config, runner)) if config.ttft_target_ms > 0 else None
        lap("measuring")
        config = with_vision_cache(config, runner)
    except BeholderError as error:
        child.fail(error.message)
    except Exception as error:
        child.fail_unforeseen(error)
    runner.report_to(child.beat)
    engine = Engine(config, runner, costs=costs, grammars=grammars)
    loop = EngineLoop(engine, child, inbox)
    rows = min(PACE_ROWS, runner.max_rows)
    pace = engine.budget.pace(rows)
    child.ready(
        load_s=round(time.monotonic() - started, 2),
        start_s=lap.seconds(),
        kv_tokens=runner.num_slots - 1,
        context=engine.max_context,
        vision_cache_bytes=config.vision_cache_bytes,
        pace_rows=rows,
        pace_ms=[round(part * 1e3, 1) for part in pace] if pace else [],
        **runner.facts(),
        pid=os.getpid(),
    )
    while True:
        child.beat()
        loop.turn()


class EngineLoop:
    """One turn: take what came, run a step, send what it made."""

    def __init__(self, engine: Engine, child: Child, inbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._to_server = child.connect("server")
        self._to_detokenizer = child.connect("detokenizer")
        self._decoder: msgspec.msgpack.Decoder[EngineInput] = msgspec.msgpack.Decoder(EngineInput)
        self._encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
        self._arena = Arena.attach(child.boot.arena_fd, child.boot.arena_size)
        self._generation = child.boot.generation
        self._was_reset = False
        self._stats_at = 0.0
        self._stats: EngineStats | None = None
        self._stats_due = False
        self._idle_left = False

    def turn(self) -> None:
        """Wait only when there is nothing to do; not long while there is something to tell.

        A turn that found no work makes later ones faster, as long as there is a way to; after work not before a pause.
        """
        is_busy = self._engine.has_work or self._idle_left
        wait_ms = 0 if is_busy else STATS_EVERY_MS if self._stats_due else IDLE_WAIT_MS
        if self._inbox.poll(wait_ms):
            while True:
                try:
                    message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._take(message)
        worked = self._engine.has_work
        for output in self._engine.step():
            self._to_detokenizer.send(self._encode(output))
        if worked and not self._engine.has_work:
            self._engine.check()  # a leak ends this process with a traceback, and the launcher starts a sound one
        self._idle_left = not worked and not self._engine.has_work and self._engine.idle()
        self._send_stats()

    def _take(self, message: EngineInput) -> None:
        if isinstance(message, Reset):
            if message.generation == self._generation:
                self._reset(message)
        elif not self._was_reset:
            return  # meant for the process that was here before; the server has answered for it
        elif isinstance(message, EngineRequest):
            self._to_server.send(self._encode(self._engine.submit(message, self._pixels)))
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id)
        else:
            self._engine.stop(message.request_id, message.num_tokens)

    def _reset(self, reset: Reset) -> None:
        self._was_reset = True
        self._engine.reset()
        done = self._encode(ResetDone(reset.epoch, self._engine.max_context))
        self._to_server.send(done)
        self._to_detokenizer.send(done)
        self._stats = None

    def _pixels(self, pixels: Pixels) -> torch.Tensor:
        """uint8 (tiles, height, width, 3): a view into the arena, or of the inline bytes."""
        import torch

        size = pixels.shape[0] * pixels.shape[1] * pixels.shape[2] * pixels.shape[3]
        if pixels.inline:
            return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)
        return torch.frombuffer(self._arena.view(pixels.offset, size), dtype=torch.uint8).view(pixels.shape)

    def _send_stats(self) -> None:
        now = time.monotonic()
        self._stats_due = now - self._stats_at < STATS_EVERY_MS / 1e3
        if self._stats_due:
            return
        stats = self._engine.stats()
        if stats != self._stats:
            self._to_server.send(self._encode(stats))
            self._stats, self._stats_at = stats, now


if __name__ == "__main__":
    main()
