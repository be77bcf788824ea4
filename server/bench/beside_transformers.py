"""`beholder bench transformers`: this machine's figures, beside plain transformers on the same weights in the same run.

Rounds of both alternate, since shared machines are noisy; medians and ranges of the rounds are printed. The server runs
as `beholder serve` does, with all its processes; everything is measured as a client of 127.0.0.1 sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from server.bench.arguments import count
from server.bench.event_lines import EventLines
from server.bench.figures import percentile
from server.bench.http_client import HttpClient
from server.bench.pictures import data_url, picture
from server.bench.serving import end, serving
from server.settings import Settings

PROMPT: Final = "Describe the picture in detail, with all the things that you can see in it."
DECODE_TOKENS: Final = 128
REFERENCE_END_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class Round:
    """One round's figures; milliseconds and tokens a second as named."""

    reference_decode_tok_s: float
    reference_first_token_ms: float
    decode_tok_s: float
    decode_8_tok_s: float
    ttft_ms: list[float]
    health_ms: list[float]
    resident_mb: float


def main(arguments: list[str]) -> int:
    """Measure in rounds and print a table, or JSON; the exit code of the command.

    Raises:
        RuntimeError: The server did not become ready, or a request failed.
    """
    parser = argparse.ArgumentParser(prog="beholder bench transformers", description=__doc__)
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds of both sides (default: 3)")
    parser.add_argument("--requests", type=count, default=20, help="pictures for TTFT in each round (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("beholder: bench needs transformers to compare with: pip install transformers", file=sys.stderr)
        return 2
    model = Settings.load({"model": options.model}).resolve_model().model
    # Nothing is guessed: the same question comes again and again, so that any guess would be right.
    with serving(model, "--speculation", "none") as (url, process), _reference(model) as reference:
        results = []
        for number in range(options.rounds):
            results.append(_round(url, process, reference, number, options.requests))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    rows = _rows(results)
    if options.json:
        print(json.dumps([{"figure": r[0], "median": r[1], "low": r[2], "high": r[3], "asked": r[4]} for r in rows]))
    else:
        _print(rows)
    return 0


def _round(url: str, server: psutil.Process, reference: _Reference, number: int, requests: int) -> Round:
    reference_decode, reference_first_ms = reference.measure()
    one, eight, ttft, health = asyncio.run(_seen(url, number, requests))
    family = [server, *server.children(recursive=True)]
    resident = sum(process.memory_info().rss for process in family) / 1e6
    return Round(reference_decode, reference_first_ms, one, eight, ttft, health, resident)


async def _seen(url: str, number: int, requests: int) -> tuple[float, float, list[float], list[float]]:
    """What a client sees: tokens/s of 1 stream and of 8, ms to first tokens, ms of `/health` under load."""
    async with HttpClient(url) as http:
        client = _Client(http)
        return (
            await client.decode_rate(1, seed=number * 1000),
            await client.decode_rate(8, seed=number * 1000 + 100),
            await client.first_tokens(requests, seed=number * 1000 + 200),
            await client.health_under_load(seed=number * 1000 + 500),
        )


def _rows(results: Sequence[Round]) -> list[tuple[str, float, float, float, str]]:
    def row(name: str, values: Sequence[float], asked: str) -> tuple[str, float, float, float, str]:
        return name, statistics.median(values), min(values), max(values), asked

    all_ttft = [value for result in results for value in result.ttft_ms]
    all_health = [value for result in results for value in result.health_ms]
    return [
        row("transformers generate, 1 stream (tokens/s)", [r.reference_decode_tok_s for r in results], ""),
        row("transformers, picture to first token (ms)", [r.reference_first_token_ms for r in results], ""),
        row("Beholder over HTTP, 1 stream (tokens/s)", [r.decode_tok_s for r in results], ""),
        row("Beholder over HTTP, 8 streams together (tokens/s)", [r.decode_8_tok_s for r in results], ""),
        row("1 stream / transformers", [r.decode_tok_s / r.reference_decode_tok_s for r in results], ">= 1.2"),
        row("8 streams / transformers' one", [r.decode_8_tok_s / r.reference_decode_tok_s for r in results], ">= 4.5"),
        row("TTFT, 640x480 JPEG over HTTP, p50 (ms)", [statistics.median(r.ttft_ms) for r in results], "<= 90"),
        row("TTFT, p95 of all (ms)", [percentile(all_ttft, 95)], ""),
        row("/health while 8 clients send pictures, p95 (ms)", [percentile(r.health_ms, 95) for r in results], "< 50"),
        row("/health, slowest of all (ms)", [max(all_health)], ""),
        row("resident, all processes (MB)", [r.resident_mb for r in results], "< 1500"),
    ]


def _print(rows: Sequence[tuple[str, float, float, float, str]]) -> None:
    table = Table(title=f"{os.cpu_count()} cores, median (lowest to highest round)")
    for heading in ("figure", "median", "range", "asked"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, median, low, high, asked in rows:
        table.add_row(name, f"{median:.2f}", f"{low:.2f} to {high:.2f}", asked)
    Console(width=110).print(table)


# ---- the client ------------------------------------------------------------------------------------------------------


class _Client:
    """What a client of the server measures."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def decode_rate(self, streams: int, seed: int) -> float:
        """Tokens a second of all streams together, from the moment that all have begun to the end of the first."""
        pictures = [picture(seed + i) for i in range(streams)]
        times = await asyncio.gather(*(self._stream(body, DECODE_TOKENS) for body in pictures))
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        return sum(sum(begin < at <= end for at in t) for t in times) / (end - begin)

    async def first_tokens(self, requests: int, seed: int) -> list[float]:
        """TTFT in ms of requests one after the other, each with a new picture."""
        found = []
        for number in range(requests):
            body = picture(seed + number)
            started = time.perf_counter()
            times = await self._stream(body, 2)
            found.append((times[0] - started) * 1e3)
        return found

    async def health_under_load(self, seed: int) -> list[float]:
        """ms of `/health` every 20 ms while 8 clients send pictures, several each."""

        # Made beforehand: while this process makes a picture, it hears no answer.
        pictures = [[picture(seed + index * 10 + number) for number in range(6)] for index in range(8)]

        async def sender(own: list[bytes]) -> None:
            for body in own:
                await self._stream(body, 24)

        load = asyncio.gather(*(sender(own) for own in pictures))
        found = []
        while not load.done():
            started = time.perf_counter()
            await self._http.get("health")
            found.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(0.02)
        await load
        return found

    async def _stream(self, jpeg: bytes, max_tokens: int) -> list[float]:
        """Arrival times of the content chunks of one streamed chat completion with a picture, one token each."""
        content = [{"type": "image_url", "image_url": {"url": data_url(jpeg)}}, {"type": "text", "text": PROMPT}]
        request = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": False,
            "return_token_ids": True,
        }
        times: list[float] = []
        lines = EventLines()
        async with self._http.post("v1/chat/completions", json.dumps(request).encode()) as response:
            async for now_s, piece in response:
                for text in lines.feed(piece):
                    event: dict[str, Any] = json.loads(text)
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    times += [now_s] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
        if len(times) != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {len(times)}")
        return times


# ---- processes -------------------------------------------------------------------------------------------------------


class _Reference:
    """`server/bench/reference.py` as a process that measures one round at each line it is sent."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self) -> tuple[float, float]:
        """(tokens/s of one stream's decode, ms from picture to first token)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                "the transformers reference ended; it needs the extra 'dev': pip install 'beholder[dev]'"
            )
        found = json.loads(line)
        return float(found["decode_tok_s"]), float(found["first_token_ms"])


@contextlib.contextmanager
def _reference(model: str) -> Iterator[_Reference]:
    script = Path(__file__).with_name("reference.py")
    process = subprocess.Popen(
        [sys.executable, "-P", str(script), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield _Reference(process)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        end(process, REFERENCE_END_TIMEOUT_S)
