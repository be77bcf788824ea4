"""How long a GPU worked and stood idle, from a trace in Chrome's format as torch's profiler writes it.

    time      ───▶
    launch 1  [kernel][copy] ·· [kernel]                            ·· idle inside a launch: between kernels of a graph
    launch 2                              ▁▁▁ [kernel] ·· [kernel]  ▁▁ idle between launches: nothing had been sent

Kernels that one call of the host has sent, those of a graph above all, carry its number in common.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a device does."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel or copy: when it ran, in µs, and the number of the launch that it came with."""

    name: str
    begin_us: float
    end_us: float
    launch: int


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """From the begin of the first piece of work to the end of the last, in µs."""

    span_us: float
    busy_us: float
    inside_us: float
    between_us: float
    longest_us: float
    """Of the gaps between launches."""

    @property
    def idle(self) -> float:
        """Share of the time in which nothing ran."""
        return 1 - self.busy_us / self.span_us

    @property
    def idle_between(self) -> float:
        """Share of the time in which nothing ran because nothing had been sent."""
        return self.between_us / self.span_us


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of the work of one name."""

    name: str
    count: int
    total_us: float


def read_trace(path: Path) -> list[Work]:
    """The device's work in a trace, in the order of its begin; a name that ends with ``.gz`` is unpacked."""
    data = path.read_bytes()
    events: Iterable[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)[
        "traceEvents"
    ]
    work = [
        Work(event["name"], event["ts"], event["ts"] + event["dur"], event.get("args", {}).get("correlation", -1))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in WORK
    ]
    return sorted(work, key=lambda piece: piece.begin_us)


def device_time(work: Sequence[Work]) -> DeviceTime:
    """Sums up work, in the order of its begin, of one device; what runs at the same time counts once.

    Raises:
        RuntimeError: There is none.
    """
    if not work:
        raise RuntimeError("the trace holds no work of a device")
    busy_us = inside_us = between_us = longest_us = 0.0
    last = work[0]  # what ends last of all so far
    reached_us = work[0].begin_us
    for piece in work:
        gap_us = piece.begin_us - reached_us
        if gap_us > 0:
            if piece.launch == last.launch:
                inside_us += gap_us
            else:
                between_us += gap_us
                longest_us = max(longest_us, gap_us)
        if piece.end_us >= reached_us:
            busy_us += piece.end_us - max(piece.begin_us, reached_us)
            reached_us, last = piece.end_us, piece
    return DeviceTime(reached_us - work[0].begin_us, busy_us, inside_us, between_us, longest_us)


def kernel_times(work: Iterable[Work]) -> list[KernelTime]:
    """By name, what takes longest first."""
    found: dict[str, tuple[int, float]] = {}
    for piece in work:
        count, total_us = found.get(piece.name, (0, 0.0))
        found[piece.name] = count + 1, total_us + piece.end_us - piece.begin_us
    times = [KernelTime(name, count, total_us) for name, (count, total_us) in found.items()]
    return sorted(times, key=lambda time: -time.total_us)
