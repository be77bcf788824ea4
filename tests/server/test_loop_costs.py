"""How long others wait while a request is taken in: processor time, since a busy machine's waiting does not count."""

from __future__ import annotations

import asyncio

from tests.server.measure_loop import of_picture

LONGEST_S = 0.005
"""What is usual is a millisecond; to read a body of 5 MB as one piece takes several times this."""


def test_no_callback_takes_long_for_a_picture_of_5_mb() -> None:
    runs = [asyncio.run(of_picture(5_000_000)) for _ in range(3)]
    assert min(map(max, runs)) < LONGEST_S
    assert len(runs[0]) > 5_000_000 / (64 << 10)  # piece by piece
