"""What a replay of a graph takes, by a device of made-up time."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.graph import LONG_S, Graph

TIMES_MS = [4.0, 2.0, 1.5, 1.0]


@pytest.mark.parametrize(("times", "replays", "expected_ms"), [(1.0, 3, 1.5), (2.0, 3, 3.0), (3.0, 1, 12.0)])
def test_short_replays_are_timed_until_the_graph_is_there_and_long_ones_once(
    monkeypatch: pytest.MonkeyPatch, times: float, replays: int, expected_ms: float
) -> None:
    """Streams wait for it."""
    assert TIMES_MS[0] * 2 < LONG_S * 1e3 < TIMES_MS[0] * 3
    now_ms, sent, waits = [0.0], [0], [0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = now_ms[0]

        def synchronize(self) -> None:
            waits[0] += 1

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    def replay(graph: Graph[None]) -> None:
        now_ms[0] += times * TIMES_MS[sent[0]]
        sent[0] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Graph, "replay", replay)
    assert Graph.__new__(Graph).seconds() == pytest.approx(expected_ms / 1e3)
    assert sent == [replays]
    assert waits == [1 + (replays > 1)]
