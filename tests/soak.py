"""Many live sessions for a long time: nothing may grow.

    python tests/soak.py --seconds 300 --sessions 50 --fps 5          (make soak)

Half of the sessions caption continuously, half on change; some lose their connection now and then and resume. At the
end every session's account must be right, and memory, descriptors and queues of all processes must be where they were
after the first third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from serving import PATIENCE_S, Served
from streaming import Camera, framed, picture
from websockets.exceptions import ConnectionClosed

OPTIONS = {"stream_max_sessions": 100, "stream_send_queue_kb": 128, "kv_tokens": 8192, "vision_cache_mb": 4}
"""Of the server: caches so small that they are full after a third of the time, and what grows then is a leak."""
MAX_GROWTH_MB = 8.0
"""Per process, over the last two thirds of five minutes. In a shorter run caches and allocators still fill."""


@dataclass
class Sample:
    """What is looked at, twice a second."""

    at_s: float
    resident_mb: dict[str, float]
    descriptors: dict[str, int]
    queued_bytes: float
    held_bytes: float


@dataclass
class Report:
    """What came of it."""

    seconds: float
    max_growth_mb: float
    samples: list[Sample] = field(default_factory=list)
    frames: dict[str, int] = field(default_factory=dict)
    responses: int = 0
    frame_age_ms: list[float] = field(default_factory=list)
    resumed: int = 0
    complaints: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Compare the last third with the end of the first."""
        first = [s for s in self.samples if s.at_s <= self.seconds / 3][-5:]
        last = self.samples[-5:]
        for name in last[-1].resident_mb:
            before = statistics.median(s.resident_mb.get(name, 0) for s in first)
            after = statistics.median(s.resident_mb.get(name, 0) for s in last)
            if after - before > self.max_growth_mb:
                self.complaints.append(f"{name} grew from {before:.0f} to {after:.0f} MB")
        for name, count in last[-1].descriptors.items():
            before = max(s.descriptors.get(name, 0) for s in first)
            if count > before + 8:  # connections come and go
                self.complaints.append(f"{name} holds {count} descriptors, {before} before")
        queued = min(sample.queued_bytes for sample in last)
        if queued > 1 << 20:
            self.complaints.append(f"{queued:.0f} bytes wait for readers who read")


async def film(
    camera: Camera, number: int, fps: float, goes_on: Callable[[], bool], report: Report, start: asyncio.Event
) -> None:
    """One client: sends, reads, loses its connection at times."""
    chance = random.Random(number)
    still = number % 2 == 1
    pictures = [picture(number, box) for box in (10, 60, 110)]
    await camera.open(
        trigger={"mode": "on_change" if still else "continuous"}, max_tokens=12, context_frames=number % 3
    )
    await start.wait()

    async def read() -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await camera.next()
                del camera.events[1:-400]  # the first is needed to resume

    reading = asyncio.ensure_future(read())
    index = 0
    await asyncio.sleep(chance.random() / fps)
    while goes_on():
        index += 1
        seed = index // 20 if still else index
        with contextlib.suppress(ConnectionClosed):
            await camera.send(framed(index, pictures[seed % 3]))
        if chance.random() < 0.004:
            camera.cut()
            await reading
            await camera.resume()
            report.resumed += 1
            reading = asyncio.ensure_future(read())
        await asyncio.sleep(1 / fps)
    await camera.say("session.update", session={"trigger": {"mode": "manual"}})
    deadline = time.monotonic() + PATIENCE_S
    while camera_runs(camera) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.2)  # a last statistic
    await camera.close()
    await reading
    totals = [event for event in camera.events if event["type"] == "frames.stats"][-1]
    for name, count in counted(camera).items():
        report.frames[name] = report.frames.get(name, 0) + count
    if totals["received"] != totals["captioned"] + sum(totals["dropped"].values()) + totals["pending"]:
        report.complaints.append(f"session {number}: {totals}")
    done = [event for event in camera.events if event["type"] == "response.done"]
    report.responses += totals["captioned"]
    report.frame_age_ms += [event["frame_age_ms"] for event in done if event["frame_age_ms"] is not None]
    if camera_runs(camera):
        report.complaints.append(f"session {number}: its last response never ended")


def counted(camera: Camera) -> dict[str, int]:
    """What became of its frames, as it was told last."""
    told = [event for event in camera.events if event["type"] == "frames.stats"]
    if not told:
        return {}
    return {**{name: told[-1][name] for name in ("received", "captioned", "pending")}, **told[-1]["dropped"]}


def camera_runs(camera: Camera) -> bool:
    """Whether its last response still runs."""
    kinds = [event["type"] for event in camera.events if event["type"] in {"response.created", "response.done"}]
    return bool(kinds) and kinds[-1] == "response.created"


async def watch(served: Served, report: Report, goes_on: Callable[[], bool], started_s: float) -> None:
    """Sample the processes."""
    names = {served.process.pid: "launcher"}
    for role in ("server", "preprocess", "detokenizer", "engine"):
        for index, pid in enumerate(served.pids(role)):
            names[pid] = f"{role} {index}"
    processes = {name: psutil.Process(pid) for pid, name in names.items()}
    while goes_on():
        queued, held = await asyncio.to_thread(
            lambda: [served.metric(f"beholder_stream_{what}_bytes") for what in ("queued", "held")]
        )
        report.samples.append(
            Sample(
                time.monotonic() - started_s,
                {name: process.memory_info().rss / 1e6 for name, process in processes.items()},
                {name: process.num_fds() for name, process in processes.items()},
                queued,
                held,
            )
        )
        await asyncio.sleep(0.5)


async def soak(
    served: Served,
    *,
    sessions: int,
    fps: float,
    seconds: float,
    max_growth_mb: float = MAX_GROWTH_MB,
    least: Mapping[str, int] | None = None,
) -> Report:
    """Run it against a server: for `seconds`, and longer where a busy machine takes longer to do `least`: so many
    frames received, captioned and so on, and so many sessions resumed.
    """
    report = Report(seconds, max_growth_mb)
    start = asyncio.Event()
    cameras = [Camera(served.url) for _ in range(sessions)]
    until_s = time.monotonic() + seconds + sessions * 0.02

    def goes_on() -> bool:
        if time.monotonic() < until_s:
            return True
        if least is None or time.monotonic() > until_s + PATIENCE_S:
            return False
        totals = Counter({"resumed": report.resumed})
        for camera in cameras:
            totals.update(counted(camera))
        return any(totals[name] < count for name, count in least.items())

    films = [asyncio.ensure_future(film(c, i, fps, goes_on, report, start)) for i, c in enumerate(cameras)]
    while not all(camera.events and camera.events[-1]["type"] == "session.updated" for camera in cameras):
        await asyncio.sleep(0.05)
        for task in films:
            if task.done():
                task.result()
    start.set()
    watching = asyncio.ensure_future(watch(served, report, goes_on, time.monotonic()))
    await asyncio.gather(*films, watching)
    report.judge()
    deadline = time.monotonic() + PATIENCE_S
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "beholder_arena_used_bytes")
    while left := {name: value for name in names if (value := served.metric(name))}:
        if time.monotonic() > deadline:
            report.complaints.append(f"not idle at the end: {left}")
            break
        await asyncio.sleep(0.2)
    return report


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--fps", type=float, default=5)
    parser.add_argument("--model", default="", help="model folder; a tiny random one when not given")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(given.model) if given.model else Path(folder) / "tiny"
        if not given.model:
            import tiny_smolvlm

            tiny_smolvlm.tiny_smolvlm(model)
        with Served(model, **OPTIONS) as served:
            try:
                report = asyncio.run(soak(served, sessions=given.sessions, fps=given.fps, seconds=given.seconds))
            except BaseException:
                print(served.text(), file=sys.stderr)
                raise
    print(json.dumps(summary(report), indent=1))
    return 1 if report.complaints else 0


def summary(report: Report) -> dict[str, Any]:
    """The numbers for people."""
    ages = sorted(report.frame_age_ms) or [0.0]
    first = [s for s in report.samples if s.at_s <= report.seconds / 3][-1]
    last = report.samples[-1]
    return {
        "seconds": report.seconds,
        "frames": report.frames,
        "resumed": report.resumed,
        "frame age ms": {"p50": round(ages[len(ages) // 2]), "p99": round(ages[int(len(ages) * 0.99)])},
        "resident MB, after a third and at the end": {
            name: [round(first.resident_mb[name]), round(value)] for name, value in last.resident_mb.items()
        },
        "descriptors, the same": {name: [first.descriptors[name], n] for name, n in last.descriptors.items()},
        "most bytes that waited for readers": max(s.queued_bytes for s in report.samples),
        "complaints": report.complaints,
    }


if __name__ == "__main__":
    raise SystemExit(main())
