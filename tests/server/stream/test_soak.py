"""A quarter of a minute of `make soak`: 50 sessions at 5 frames a second, with lost connections; nothing grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import soak
from serving import Served

LEAST = {"received": 2000, "captioned": 200, "unchanged": 200, "resumed": 4}


def test_fifty_sessions_leave_nothing_behind(tiny_model: Path) -> None:
    with Served(tiny_model, **soak.OPTIONS) as served:
        report = asyncio.run(soak.soak(served, sessions=50, fps=5, seconds=15, max_growth_mb=16, least=LEAST))
    assert report.complaints == []
    assert {name: count for name, count in report.frames.items() if count < LEAST.get(name, 0)} == {}
    assert report.resumed >= LEAST["resumed"]
