"""`beholder bench live`: how live sessions do: age of frames, how many are looked at, and what a still scene costs.

    beholder bench live [--model FOLDER] [--fps 5] [--seconds 15]

A camera is 640 × 480 JPEGs in which a square moves a little from frame to frame, so no two are alike. The server is
started for the purpose; the client shares the machine with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
from PIL import Image, ImageDraw
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from server.bench.arguments import count, positive
from server.bench.figures import percentile, print_rows
from server.bench.http_client import HttpClient
from server.bench.serving import serving

NUM_PICTURES: Final = 64
SETTLE_S: Final = 1.5


@dataclass
class Result:
    """Of all sessions of one run together."""

    frame_age_ms: list[float] = field(default_factory=list)
    received: int = 0
    captioned: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    engine_steps: float = 0.0
    processor_s: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--fps", type=positive, default=5, help="of each camera (default: 5)")
    parser.add_argument("--seconds", type=positive, default=15, help="of each run (default: 15)")
    parser.add_argument("--max-tokens", type=count, default=24, help="of a caption, always all of them (default: 24)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    rows = []
    with serving(given.model) as (url, process):
        asyncio.run(_run(url, process, 1, given.fps, 2, given.max_tokens))  # warm
        for sessions, is_still in ((1, False), (8, False), (1, True), (8, True)):
            result = asyncio.run(_run(url, process, sessions, given.fps, given.seconds, given.max_tokens, is_still))
            rows.append(_row(sessions, is_still, result))
    print_rows(rows, as_json=given.json)
    return 0


def _row(sessions: int, is_still: bool, result: Result) -> dict[str, Any]:
    received = max(result.received, 1)
    return {
        "sessions": sessions,
        "scene": "still, on_change" if is_still else "moving, continuous",
        "frames": result.received,
        "frame age p50 ms": round(percentile(result.frame_age_ms, 50), 1) if result.frame_age_ms else None,
        "p99 ms": round(percentile(result.frame_age_ms, 99), 1) if result.frame_age_ms else None,
        "captioned %": round(100 * result.captioned / received, 1),
        "dropped %": {reason: round(100 * count / received, 1) for reason, count in result.dropped.items()},
        "engine steps": result.engine_steps,
        "processor ms a frame": {role: round(1e3 * s / received, 2) for role, s in result.processor_s.items()},
    }


async def _run(
    url: str,
    process: psutil.Process,
    sessions: int,
    fps: float,
    seconds: float,
    max_tokens: int,
    is_still: bool = False,
) -> Result:
    """Some cameras for some seconds."""
    result = Result()
    async with HttpClient(url) as http:
        before = await _steps(http), _processor_s(process)
        await asyncio.gather(
            *(_film(url, number, fps, seconds, max_tokens, is_still, result) for number in range(sessions))
        )
        await asyncio.sleep(SETTLE_S)
        after = await _steps(http), _processor_s(process)
    result.engine_steps = after[0] - before[0]
    result.processor_s = {role: after[1][role] - before[1].get(role, 0.0) for role in after[1]}
    return result


async def _film(
    url: str, number: int, fps: float, seconds: float, max_tokens: int, is_still: bool, result: Result
) -> None:
    """One camera.

    Raises:
        RuntimeError: The server refused the session, broke off, or did not tell its totals.
    """
    try:
        await _session(url, number, fps, seconds, max_tokens, is_still, result)
    except (WebSocketException, OSError) as error:  # a TimeoutError is an OSError too
        raise RuntimeError(f"camera {number}: the session broke off: {str(error) or type(error).__name__}") from error


async def _session(
    url: str, number: int, fps: float, seconds: float, max_tokens: int, is_still: bool, result: Result
) -> None:
    pictures = [_picture(number, 0 if is_still else step) for step in range(1 if is_still else NUM_PICTURES)]
    mode = "on_change" if is_still else "continuous"
    session = {"trigger": {"mode": mode}, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    address = url.replace("http", "ws", 1) + "/v1/stream"
    async with connect(address, subprotocols=["vlm.stream.v1"], max_size=None) as socket:  # type: ignore[list-item]
        totals: dict[str, Any] = {}
        complaints: list[str] = []

        async def read() -> None:
            with contextlib.suppress(ConnectionClosed):
                async for message in socket:
                    event = json.loads(message)
                    if event["type"] == "response.done" and event["frame_age_ms"] is not None:
                        result.frame_age_ms.append(event["frame_age_ms"])
                    elif event["type"] == "frames.stats":
                        totals.update(event)
                    elif event["type"] == "error" and not (event["error"]["param"] or "").startswith("frame "):
                        complaints.append(event["error"]["message"])

        reading = asyncio.ensure_future(read())
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        started = time.monotonic() + number / fps / 8
        for index in range(max(round(seconds * fps), 1)):
            await asyncio.sleep(started + index / fps - time.monotonic())
            header = json.dumps({"k": "frame", "id": index, "ts": time.monotonic() * 1e3}).encode()
            await socket.send(struct.pack(">H", len(header)) + header + pictures[index % len(pictures)])
        await asyncio.sleep(SETTLE_S)
        await socket.close()
        await reading
    if complaints or not totals:
        raise RuntimeError(f"camera {number}: {complaints[0] if complaints else 'the session told no totals'}")
    result.received += totals["received"]
    result.captioned += totals["captioned"]
    for reason, dropped in totals["dropped"].items():
        result.dropped[reason] = result.dropped.get(reason, 0) + dropped


def _picture(number: int, step: int) -> bytes:
    """A plain ground with noise, and a square that moves."""
    image = Image.effect_noise((640, 480), 24).convert("RGB")
    left = 40 + step * 7
    ImageDraw.Draw(image).rectangle((left, 80 + number * 30, left + 90, 170 + number * 30), fill=(220, 40, 40))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=75)
    return encoded.getvalue()


async def _steps(http: HttpClient) -> float:
    """Steps of the engine since its start."""
    for line in (await http.get("metrics")).decode().splitlines():
        if line.startswith("beholder_engine_steps_total"):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def _processor_s(launcher: psutil.Process) -> dict[str, float]:
    """Processor time of the children, by role."""
    seconds: dict[str, float] = {}
    for child in launcher.children(recursive=True):
        try:
            words, times = child.cmdline(), child.cpu_times()
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
        module = words[-1] if words else ""  # one that has ended, and that nobody has asked about, has no words
        role = {"server.process": "server", "engine.process": "engine"}.get(module, module.rpartition(".")[2])
        seconds[role] = seconds.get(role, 0.0) + times.user + times.system
    return seconds
