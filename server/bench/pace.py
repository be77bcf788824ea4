"""`beholder bench pace`: what time-budgeted steps change, seen from the engine: no HTTP, and on a CPU no other process.

    beholder bench pace [--model FOLDER] [--streams 32] [--picture-every-ms 500] [--image-size 1024x768]

Both sides run in one process in turn: one takes pictures and prompts as they come (`--ttft-target-ms 0`), one keeps to
its targets. With one torch thread times are processor time of that thread, since shared machines are noisy, and
pictures come by the same clock. Pictures are decoded and prompts tokenised beforehand.

    interference   as `beholder bench interference`: streams alone and with pictures in turn
    closed loop    so many clients, each with a new picture when its last answer is complete: what steady streams cost
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preprocess.prepare import Preparer
from preprocess.wire import (
    EngineRequest,
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    Message,
    Pixels,
    Prepared,
    TextPart,
    TokenEvents,
)
from server.bench.arguments import count, count_from_0, positive
from server.bench.figures import percentile, print_rows
from server.bench.interference import STORY, Round, figures
from server.bench.pictures import picture, size
from server.sampling_rules import sampling_options
from server.settings import Settings

if TYPE_CHECKING:
    import torch

    from engine.core import Engine

SIDES: Final = {"as they come": 0.0, "by targets": -1.0}
"""`ttft_target_ms` of each; below 0 is the default."""
CLOSED_ANSWERS: Final = 4
"""Of each client in the closed loop."""
APART: Final = 5
"""Clients of the closed loop begin so many steps one after the other, so that they do not all ask at once."""


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench pace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--streams", type=count, default=32, help="that decode all the time (default: 32)")
    parser.add_argument("--picture-every-ms", type=positive, default=500, help="(default: 500)")
    parser.add_argument("--image-size", type=size, default=(1024, 768), help="of the JPEGs (default: 1024x768)")
    parser.add_argument("--seconds", type=positive, default=2, help="alone, and again with pictures (default: 2)")
    parser.add_argument("--turns", type=count, default=4, help="of both (default: 4)")
    parser.add_argument("--stream-words", type=count, default=400, help="of a stream's question (default: 400)")
    parser.add_argument("--clients", type=count_from_0, default=8, help="of the closed loop; 0: none (default: 8)")
    parser.add_argument("--closed-tokens", type=count, default=64, help="of an answer there (default: 64)")
    parser.add_argument("--rounds", type=count, default=2, help="of both sides (default: 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    totals = {name: Round() for name in SIDES}
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(options.rounds):
        for name in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
            totals[name].add(bench.interference(SIDES[name]))
            if options.clients:
                rates[name].append(bench.closed_loop(SIDES[name]))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = [{"side": name, **figures(total)} for name, total in totals.items()]
    if options.clients:
        first = next(iter(rates.values()))
        for row, own in zip(rows, rates.values(), strict=True):
            row["closed loop requests/s"] = round(statistics.median(own), 2)
            row["÷ as they come"] = " ".join(f"{rate / come:.3f}" for come, rate in zip(first, own, strict=True))
    print_rows(rows, as_json=options.json)
    return 0


class Bench:
    """One loaded model that both sides use in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from engine.limits import with_vision_cache
        from engine.load import load_runner

        self._options = options
        settings = Settings.load({"model": options.model, "speculation": "none"}).resolve_model()
        self._runner = load_runner(settings.engine_config())
        self._runner.warm_up()
        self._config = with_vision_cache(settings.engine_config(), self._runner)
        is_one_thread = self._runner.slot_table.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if is_one_thread else time.perf_counter
        self._preparer = Preparer(settings.preprocess_config(), None)
        self._next_picture = 0
        gc.freeze()  # as the engine process does

    def interference(self, ttft_target_ms: float) -> Round:
        """Streams, and pictures at fixed times."""
        options, result = self._options, Round()
        engine = self._engine(ttft_target_ms)
        clock, last_s = self._clock, dict[str, float]()
        sent_s: dict[str, float] = {}
        begun: set[str] = set()
        gaps: list[float] = []

        def step() -> None:
            for request_id in _answered(engine):
                now_s = clock()
                if request_id in sent_s:
                    result.ttft_ms.append((now_s - sent_s.pop(request_id)) * 1e3)
                elif request_id.startswith("stream"):
                    if request_id in last_s:
                        gaps.append((now_s - last_s[request_id]) * 1e3)
                    last_s[request_id] = now_s
                    begun.add(request_id)

        story = STORY * (options.stream_words // len(STORY.split()))
        for index in range(options.streams):
            engine.submit(self._request(f"stream{index}", f"{index}: {story}", max_tokens=2048), _pixels)
        while len(begun) < options.streams:
            step()
        for _ in range(options.turns):
            count = max(round(options.seconds * 1e3 / options.picture_every_ms), 1)
            pictures = [self._picture(16) for _ in range(count)]
            gaps.clear()
            until_s = clock() + options.seconds
            while clock() < until_s:
                step()
            quiet_ms = list(gaps)
            gaps.clear()
            started_s = clock()
            for index, wanted in enumerate(pictures):
                due_s = started_s + index * options.picture_every_ms / 1e3
                while clock() < due_s:
                    step()
                engine.submit(wanted, _pixels)
                sent_s[wanted.request_id] = due_s
            while clock() < started_s + options.seconds:
                step()
            beside_ms = list(gaps)
            while engine.stats().num_running + engine.stats().num_waiting > options.streams:
                step()
            result.quiet_ms += quiet_ms
            result.beside_ms += beside_ms
            if quiet_ms:
                result.relative += [gap / percentile(quiet_ms, 50) for gap in beside_ms]
        return result

    def closed_loop(self, ttft_target_ms: float) -> float:
        """Requests a second of clients that ask as soon as they are answered, begun one after the other."""
        options = self._options
        engine = self._engine(ttft_target_ms)
        waiting = [self._picture(options.closed_tokens) for _ in range(options.clients * CLOSED_ANSWERS)]
        total = len(waiting)
        started_s = self._clock()
        num_steps = 0
        while engine.has_work or waiting:
            stats = engine.stats()
            may_ask = min(options.clients, 1 + num_steps // APART)
            if waiting and stats.num_running + stats.num_waiting < may_ask:
                engine.submit(waiting.pop(), _pixels)
            list(_answered(engine))
            num_steps += 1
        return total / (self._clock() - started_s)

    def _engine(self, ttft_target_ms: float) -> Engine:
        from engine.core import Engine, batched_tokens
        from engine.step_measure import measure

        config = self._config
        if ttft_target_ms >= 0:
            config = msgspec.structs.replace(config, ttft_target_ms=ttft_target_ms)
        costs = measure(self._runner, batched_tokens(config, self._runner), self._clock)
        return Engine(config, self._runner, self._clock, costs)

    def _picture(self, max_tokens: int) -> EngineRequest:
        self._next_picture += 1
        jpeg = picture(self._next_picture, *self._options.image_size)
        return self._request(f"picture{self._next_picture}", "What is in it?", jpeg, max_tokens=max_tokens)

    def _request(self, name: str, text: str, jpeg: bytes | None = None, *, max_tokens: int) -> EngineRequest:
        parts: list[Any] = [ImagePart(data=jpeg)] if jpeg is not None else []
        options: GenerationOptions = sampling_options(
            {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        )
        message = Message("user", [*parts, TextPart(text)])
        prepared = self._preparer.prepare(Job(name, [message], options, Lease(), time.monotonic()))
        if not isinstance(prepared, Prepared):
            raise RuntimeError(prepared.message)
        return prepared.request


def _answered(engine: Engine) -> Iterator[str]:
    """Step; whose tokens came."""
    for message in engine.step():
        if isinstance(message, TokenEvents):
            for event in message.events:
                if event.error is not None:
                    raise RuntimeError(event.error.message)
                if event.token_ids:
                    yield event.request_id


def _pixels(pixels: Pixels) -> torch.Tensor:
    """uint8 (tiles, height, width, 3)."""
    import torch

    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)
