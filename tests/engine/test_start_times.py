"""Where a start's seconds go."""

from __future__ import annotations

from engine.start_times import StartTimes


def test_all_time_is_somebodys() -> None:
    now = 100.0

    def clock() -> float:
        return now

    lap = StartTimes(since_s=2.5, clock=clock)
    now += 1
    lap("imports")
    now += 4
    lap("weights")
    lap("nothing")
    now += 0.25
    lap("imports")
    assert lap.seconds() == {"imports": 3.75, "weights": 4.0, "nothing": 0.0}
