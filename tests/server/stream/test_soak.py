"""Half a minute of `make soak`: 50 sessions at 5 frames a second, with lost connections; nothing grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import soak
from serving import Served


def test_fifty_sessions_leave_nothing_behind(tiny_model: Path) -> None:
    with Served(tiny_model, **soak.OPTIONS) as served:
        report = asyncio.run(soak.soak(served, sessions=50, fps=5, seconds=30, max_growth_mb=32))
    assert report.complaints == []
    assert report.frames["received"] > 2000
    assert report.frames["captioned"] > 200
    assert report.frames["unchanged"] > 200
    assert report.resumed > 3
