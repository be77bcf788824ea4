"""The benchmark of pictures beside streams: what it sends is answered, and what it tells follows from what it saw."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from serving import Served

from server.bench.interference import Round, Scenario, figures, gaps_of, measure
from server.bench.picture_sender import LONGEST_WAIT_S, PictureSender, Sending


def scenario(streams: int, *, stream_tokens: int = 200) -> Scenario:
    """Two pictures beside streams."""
    return Scenario(
        streams=streams,
        every_s=0.05,
        seconds=0.1,
        turns=1,
        stream_words=14,
        stream_tokens=stream_tokens,
        picture_tokens=3,
    )


def test_every_picture_is_answered_beside_streams_and_a_server_that_refuses_is_told_of(tiny_model: Path) -> None:
    served = Served(tiny_model, dtype="float32", max_running=8, kv_tokens=4096, api_key="secret")
    with served as server, PictureSender((80, 80), 2) as sender:
        found = asyncio.run(measure(server.url, scenario(2), sender, api_key="secret"))
        assert len(found.ttft_ms) == 2
        assert found.failed == 0
        assert found.quiet_ms
        assert found.beside_ms
        with pytest.raises(RuntimeError, match="404"):
            asyncio.run(measure(server.url, scenario(2), sender, model="another", api_key="secret"))
        sending = Sending(server.url, "another", "secret", first=0, count=2, every_s=0.05, max_tokens=3)
        sent = asyncio.run(sender.send(sending))
    assert (sent.ttft_ms, sent.failed) == ([], 2)
    assert 0.1 <= sent.ended_s - sent.begun_s < 60


def test_who_leaves_does_not_wait_for_answers() -> None:
    """As when a stream fails while pictures are under way."""

    async def left_s(url: str) -> float:
        with PictureSender((80, 80), 1) as sender:
            await sender.draw()
            sending = Sending(url, "model", "", first=0, count=1, every_s=0.01, max_tokens=3)
            task = asyncio.create_task(sender.send(sending))
            await asyncio.sleep(0.2)
            assert not task.done()
            started_s = time.perf_counter()
        task.cancel()
        return time.perf_counter() - started_s

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert asyncio.run(left_s(f"http://127.0.0.1:{silent.getsockname()[1]}")) < LONGEST_WAIT_S / 4


def test_figures_compare_with_the_streams_alone() -> None:
    total = Round()
    for _ in range(2):
        total.add(Round([10.0] * 100, [12.0] * 99 + [30.0], [1.2] * 99 + [3.0], [50.0, 70.0], 1))
    told = figures(total)
    assert told["alone ITL p50"] == 10
    assert told["ITL p50"] == 12
    assert told["slowest"] == 30
    assert told["TTFT p50"] == 60
    assert (told["pictures"], told["failed"]) == (4, 2)
    assert figures(Round())["p99 / alone"] is None


def test_gaps_are_compared_with_the_median_alone_before_and_after_them() -> None:
    found = gaps_of([[10.0, 10.0, 0.0], [20.0], [], []], [[30.0, 0.0], [30.0], [5.0]])
    assert found == Round([10.0, 10.0, 0.0, 20.0], [30.0, 0.0, 30.0, 5.0], [3.0, 0.0, 1.5])


def test_where_events_come_several_at_a_time_gaps_between_reads_count_in_all_turns() -> None:
    bursts = [0.0, 0.0, 30.0]
    found = gaps_of([bursts, [0.0, 30.0, 30.0], [0.0]], [[0.0, 45.0], [0.0, 60.0]])
    assert found == Round([30.0, 30.0, 30.0], [45.0, 60.0], [1.5, 2.0])
    assert figures(found)["alone ITL p50"] == 30
