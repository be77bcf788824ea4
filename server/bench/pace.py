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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from preprocess.prepare import Preparer
from preprocess.wire import EngineRequest, ImagePart, Message, TextPart
from server.bench.arguments import count, count_from_0
from server.bench.engine_alone import clock_of, events, pixels_of, prepared
from server.bench.figures import percentile, print_rows
from server.bench.interference import Round, add_scenario_options, figures, num_pictures, story
from server.bench.pictures import picture
from server.settings import Settings

if TYPE_CHECKING:
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
    add_scenario_options(parser)
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
        from engine.limits import with_vision_cache
        from engine.load import load_runner

        self._options = options
        settings = Settings.load({"model": options.model, "speculation": "none"}).resolve_model()
        self._runner = load_runner(settings.engine_config())
        self._runner.warm_up()
        self._config = with_vision_cache(settings.engine_config(), self._runner)
        self._clock = clock_of(self._runner.slot_table.device.type)
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

        text = story(options.stream_words)
        for index in range(options.streams):
            engine.submit(self._request(f"stream{index}", f"{index}: {text}", max_tokens=2048), pixels_of)
        while len(begun) < options.streams:
            step()
        for _ in range(options.turns):
            every_s = options.picture_every_ms / 1e3
            pictures = [self._picture(16) for _ in range(num_pictures(options.seconds, every_s))]
            gaps.clear()
            until_s = clock() + options.seconds
            while clock() < until_s:
                step()
            quiet_ms = list(gaps)
            gaps.clear()
            started_s = clock()
            for index, wanted in enumerate(pictures):
                due_s = started_s + index * every_s
                while clock() < due_s:
                    step()
                engine.submit(wanted, pixels_of)
                sent_s[wanted.request_id] = due_s
            while clock() < started_s + options.seconds:
                step()
            beside_ms = list(gaps)
            while engine.num_requests > options.streams:
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
            may_ask = min(options.clients, 1 + num_steps // APART)
            if waiting and engine.num_requests < may_ask:
                engine.submit(waiting.pop(), pixels_of)
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
        message = Message("user", [*parts, TextPart(text)])
        return prepared(self._preparer, name, [message], {"max_tokens": max_tokens, "ignore_eos": True})


def _answered(engine: Engine) -> Iterator[str]:
    """Step; whose tokens came."""
    return (event.request_id for event in events(engine) if event.token_ids)
