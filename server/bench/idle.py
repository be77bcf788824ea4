"""`beholder bench idle`: whether a GPU waits for its host: how long it stands idle while streams decode.

    beholder bench idle --model FOLDER [--streams 1,8,64] [--trace FILE.json.gz] [--kernels 12]

The engine runs alone, without a server. Of each number of streams some steps are timed, as many are traced with torch's
profiler, and then a second is traced in which new pictures come.

    step            of the timed steps; a traced one is longer
    host            what the host does in a timed step, without waiting for results
    busy            work of the device in a traced step
    idle            share of the traced time in which the device did nothing
    between         the part of it in which nothing had been sent; the rest is between the kernels of one graph
    longest         the longest time in which nothing had been sent

`--trace` keeps the traces: FILE-8.json.gz and FILE-8-pictures.json.gz for 8 streams, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from preprocess.prepare import Preparer
from preprocess.wire import EngineRequest, ImagePart, Message, TextPart
from server.bench.arguments import count, count_from_0, counts, positive
from server.bench.device_trace import Work, device_time, kernel_times, read_trace
from server.bench.engine_alone import events, pixels_of, prepared
from server.bench.figures import print_rows
from server.bench.interference import num_pictures, story
from server.bench.pictures import picture, size
from server.settings import Settings

if TYPE_CHECKING:
    from engine.batch import Flight, Row
    from engine.core import Engine

SETTLING_STEPS: Final = 16
WARM_PICTURES: Final = 3
"""Of the size of all others: the second is captured, the third replays."""
PICTURE_TOKENS: Final = 16
ROOM: Final = 8
"""Rows beside the streams, for pictures."""
LONGEST_NAME: Final = 72

Trace = Callable[[Callable[[], None], Path], None]
"""Does some work and writes a trace of it to a file."""


@dataclass(frozen=True)
class Timed:
    """Steps without a profiler, seconds each."""

    step_s: float
    host_s: float


class Alone:
    """A loaded model, whose engine decodes streams.

    Args:
        model: Folder; empty: the bundled model.
        device: As `--device` of `beholder serve`.
        most_streams: That will decode at once.
        stream_words: Of each stream's question.
        image_size: Of the pictures.
        trace: Traces.
    """

    def __init__(
        self, model: str, device: str, most_streams: int, stream_words: int, image_size: tuple[int, int], trace: Trace
    ) -> None:
        from engine.limits import with_vision_cache
        from engine.load import load_runner

        rows = max(Settings().max_running, most_streams + ROOM)
        given = {"model": model, "device": device, "max_running": rows, "speculation": "none"}
        settings = Settings.load(given).resolve_model()
        self._runner = load_runner(settings.engine_config())
        self._runner.warm_up()
        self._config = with_vision_cache(settings.engine_config(), self._runner)
        self._preparer = Preparer(settings.preprocess_config(), None)
        self._stream_words = stream_words
        self._image_size = image_size
        self._trace = trace
        self._num_pictures = 0
        self._waited_s = 0.0
        if launch := getattr(self._runner, "launch", None):
            self._launch: Callable[[Sequence[Row]], Flight] = launch
            self._runner.launch = self._watched  # type: ignore[attr-defined]
        gc.freeze()  # as the engine process does

    def start(self, streams: int, steps: int) -> Engine:
        """An engine in which so many streams decode, for at least `steps` steps more."""
        from engine.core import Engine, batched_tokens
        from engine.step_measure import measure as measure_costs

        costs = measure_costs(self._runner, batched_tokens(self._config, self._runner))
        engine = Engine(self._config, self._runner, costs=costs)
        for _ in range(WARM_PICTURES):
            engine.submit(self._picture(), pixels_of)
            while engine.has_work:
                list(events(engine))
        while engine.idle():  # graphs of such pictures, and of all steps: as a server that has had a pause
            continue
        begun: set[str] = set()
        for index in range(streams):
            request = self._request(f"stream{index}", f"{index}: {story(self._stream_words)}", max_tokens=steps)
            engine.submit(request, pixels_of)
        while len(begun) < streams:
            begun |= {event.request_id for event in events(engine) if event.token_ids}
        _steps(engine, SETTLING_STEPS)
        return engine

    def time(self, engine: Engine, steps: int) -> Timed:
        """Times steps."""
        self._waited_s = 0.0
        started_s = time.perf_counter()
        _steps(engine, steps)
        elapsed_s = time.perf_counter() - started_s
        return Timed(elapsed_s / steps, (elapsed_s - self._waited_s) / steps)

    def trace(self, engine: Engine, steps: int, path: Path) -> list[Work]:
        """Traces steps."""
        self._trace(lambda: _steps(engine, steps), path)
        return read_trace(path)

    def trace_pictures(self, engine: Engine, seconds: float, every_s: float, path: Path) -> tuple[list[Work], int]:
        """Traces as long with new pictures; and says how many steps that were."""
        pictures = [self._picture() for _ in range(num_pictures(seconds, every_s))]
        before = engine.stats().num_steps

        def work() -> None:
            started_s = time.perf_counter()
            for index, wanted in enumerate(pictures):
                while time.perf_counter() < started_s + index * every_s:
                    list(events(engine))
                engine.submit(wanted, pixels_of)
            while time.perf_counter() < started_s + seconds:
                list(events(engine))

        self._trace(work, path)
        return read_trace(path), engine.stats().num_steps - before

    def _picture(self) -> EngineRequest:
        self._num_pictures += 1
        jpeg = picture(self._num_pictures, *self._image_size)
        return self._request(f"picture{self._num_pictures}", "What is in it?", jpeg, max_tokens=PICTURE_TOKENS)

    def _request(self, name: str, text: str, jpeg: bytes | None = None, *, max_tokens: int) -> EngineRequest:
        parts: list[Any] = [ImagePart(data=jpeg)] if jpeg is not None else []
        message = Message("user", [*parts, TextPart(text)])
        return prepared(self._preparer, name, [message], {"max_tokens": max_tokens, "ignore_eos": True})

    def _watched(self, rows: Sequence[Row]) -> Flight:
        return _WatchedFlight(self._launch(rows), self._wait)

    def _wait(self, seconds: float) -> None:
        self._waited_s += seconds


class _WatchedFlight:
    """A flight that says how long it was waited for."""

    def __init__(self, flight: Flight, waited: Callable[[float], None]) -> None:
        self.is_first = flight.is_first
        self._flight = flight
        self._waited = waited

    def wait(self) -> None:
        """See `engine.batch.Flight.wait`."""
        started_s = time.perf_counter()
        try:
            self._flight.wait()
        finally:
            self._waited(time.perf_counter() - started_s)

    def result(self) -> Any:
        """See `engine.batch.Flight.result`."""
        return self._flight.result()


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench idle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--streams", type=counts, default=[1, 8, 64], help="that decode (default: 1,8,64)")
    parser.add_argument("--steps", type=count, default=64, help="timed, and as many traced (default: 64)")
    parser.add_argument("--stream-words", type=count, default=800, help="of a stream's question (default: 800)")
    parser.add_argument("--picture-every-ms", type=positive, default=100, help="(default: 100)")
    parser.add_argument("--image-size", type=size, default=(1024, 768), help="of the JPEGs (default: 1024x768)")
    parser.add_argument("--seconds", type=positive, default=1, help="traced with pictures (default: 1)")
    parser.add_argument("--trace", type=Path, help="keep the traces: FILE.json or FILE.json.gz")
    parser.add_argument("--kernels", type=count_from_0, default=0, help="of each trace, those that take longest")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.trace and not options.trace.name.endswith((".json", ".json.gz")):
        parser.error(f"--trace {options.trace}: expected a name that ends with .json or .json.gz")
    _require_cuda()
    with tempfile.TemporaryDirectory() as folder:
        kept = options.trace or Path(folder) / "trace.json"
        profiled(lambda: None, Path(folder) / "first.json")  # what a profiler sets up is no part of a step
        alone = Alone(options.model, "cuda", max(options.streams), options.stream_words, options.image_size, profiled)
        rows = measure(alone, options, kept)
    kernels = [{"streams": row["streams"], "beside": row["beside"], **each} for row in rows for each in row["kernels"]]
    if not options.json:
        for row in rows:
            del row["kernels"]
    print_rows(rows, as_json=options.json)
    if kernels and not options.json:
        print()
        print_rows(kernels, as_json=False)
    return 0


def measure(alone: Alone, options: argparse.Namespace, kept: Path) -> list[dict[str, Any]]:
    """Figures, two rows for each number of streams, and the kernels that take longest; traces go beside `kept`."""
    rows = []
    for streams in options.streams:
        # A second of pictures holds fewer steps than a second of the fastest decoding there is.
        engine = alone.start(streams, SETTLING_STEPS + 3 * options.steps + int(2000 * options.seconds))
        timed = alone.time(engine, options.steps)
        works = {"": (alone.trace(engine, options.steps, _named(kept, f"-{streams}")), options.steps)}
        works["pictures"] = alone.trace_pictures(
            engine, options.seconds, options.picture_every_ms / 1e3, _named(kept, f"-{streams}-pictures")
        )
        for beside, (work, steps) in works.items():
            times = {"streams": streams, "beside": beside or "nothing"}
            if beside:
                times |= {"step ms": "", "host ms": ""}
            else:
                times |= {"step ms": round(timed.step_s * 1e3, 3), "host ms": round(timed.host_s * 1e3, 3)}
            rows.append({**times, **_figures(work, steps), "kernels": _kernels(work, steps, options.kernels)})
    return rows


def _kernels(work: Sequence[Work], steps: int, most: int) -> list[dict[str, Any]]:
    return [
        {
            "µs a step": each.total_us / steps,
            "runs a step": each.count / steps,
            "kernel": each.name[:LONGEST_NAME].replace("|", "/"),
        }
        for each in kernel_times(work)[:most]
    ]


def _figures(work: Sequence[Work], steps: int) -> dict[str, Any]:
    found = device_time(work)
    return {
        "traced step ms": round(found.span_us / steps / 1e3, 3),
        "busy ms": round(found.busy_us / steps / 1e3, 3),
        "idle %": round(100 * found.idle, 1),
        "between %": round(100 * found.idle_between, 1),
        "longest µs": round(found.longest_us, 1),
    }


def profiled(work: Callable[[], None], path: Path) -> None:
    """A `Trace` of the device's own work: that of the host would slow the host down."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("bench idle traces a GPU: it needs a CUDA device, and torch sees none here")


def _named(kept: Path, more: str) -> Path:
    """``trace.json.gz`` and ``-8``: ``trace-8.json.gz``."""
    stem, dot, ending = kept.name.partition(".json")
    return kept.with_name(f"{stem}{more}{dot}{ending}")


def _steps(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        list(events(engine))
