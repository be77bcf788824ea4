"""In which order requests come in: priority, cached prefix, ageing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.waiting import AGED_AFTER, OVERDUE_AFTER
from tests.engine.driving import Driver, request

PROMPT = list(range(10, 40))


def running(driver: Driver) -> list[str]:
    """Who runs."""
    return [sequence.request_id for sequence in driver.engine.scheduler.running]


def admissions(driver: Driver) -> list[str]:
    """Run to the end and return the order of first admission."""
    order: list[str] = []
    while driver.engine.has_work:
        driver.step()
        order.extend(name for name in running(driver) if name not in order)
        assert len(running(driver)) <= 1
    return order


def test_higher_priority_comes_first() -> None:
    driver = Driver(max_running=1)
    driver.submit(*[request(f"r{index}", [index], max_tokens=3, priority=index % 3) for index in range(6)])
    assert admissions(driver) == ["r2", "r5", "r1", "r4", "r0", "r3"]


def test_the_longest_cached_prefix_comes_first() -> None:
    driver = Driver(max_running=1)
    driver.run(request("seed", PROMPT))
    driver.submit(
        request("none", [1, *PROMPT], max_tokens=2),
        request("half", PROMPT[:15] * 2, max_tokens=2),
        request("all", [*PROMPT, 1], max_tokens=2),
    )
    assert admissions(driver) == ["all", "half", "none"]


def test_a_request_without_cached_prefix_is_overtaken_a_bounded_number_of_times() -> None:
    driver = Driver(max_running=1)
    driver.run(request("seed", PROMPT))
    driver.submit(request("first", PROMPT, max_tokens=3), request("poor", [1, 2, 3], max_tokens=2))
    passed = 0
    for index in range(100):
        driver.submit(request(f"rich{index}", [*PROMPT, index % 9], max_tokens=3))
        driver.step(3)
        passed = index
        if driver.told["poor"].ids:
            break
    assert passed <= AGED_AFTER + 2
    driver.finish()


def test_a_low_class_waits_long_but_not_for_ever() -> None:
    driver = Driver(max_running=1, max_waiting=1000)
    driver.submit(request("first", [5], max_tokens=2), request("low", [1, 2, 3], max_tokens=2, priority=0))
    passed = 0
    for index in range(1000):
        driver.submit(request(f"high{index}", [index % 50], max_tokens=1, priority=9))
        driver.step()
        passed = index
        if driver.told["low"].ids:
            break
    assert OVERDUE_AFTER <= passed <= OVERDUE_AFTER + 3
    driver.finish()


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 20)), min_size=30, max_size=140)
)
def test_nobody_is_overtaken_without_bound(arrivals: list[tuple[int, int, int]]) -> None:
    driver = Driver(max_running=1, max_waiting=1000, max_batched_tokens=64)
    priorities: list[int] = []
    order: list[int] = []

    def step() -> None:
        driver.step()
        order.extend(int(name) for name in running(driver) if int(name) not in order)

    for pause, priority, length in arrivals:
        name = str(len(priorities))
        driver.submit(request(name, [*PROMPT[:length], len(priorities) % 9], max_tokens=2, priority=priority))
        priorities.append(priority)
        for _ in range(pause):
            step()
    while driver.engine.has_work:
        step()
    assert sorted(order) == list(range(len(priorities)))
    for index, name in enumerate(order):
        passed_by = [other for other in order[:index] if other > name]
        assert len(passed_by) <= OVERDUE_AFTER + 1
        peers = [other for other in passed_by if priorities[other] == priorities[name]]
        assert len(peers) <= AGED_AFTER
