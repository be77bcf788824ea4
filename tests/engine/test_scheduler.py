"""What a step computes: budget, chunks, shared prefixes, admission, retraction."""

from __future__ import annotations

import pytest

from preprocess.wire import EngineRequest
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, reference

PROMPT = list(range(10, 40))


def lengths(driver: Driver) -> list[list[int]]:
    """Tokens of every row of every step so far."""
    return [[count for _, _, count in rows] for rows in driver.runner.steps]


def running(driver: Driver) -> list[str]:
    """Who runs."""
    return [sequence.request_id for sequence in driver.engine.scheduler.running]


# ---- budget and chunks ----


def test_decoding_comes_first_and_prompts_fill_the_budget_in_chunks() -> None:
    driver = Driver(max_batched_tokens=8)
    driver.submit(request("a", PROMPT[:6], max_tokens=6), request("b", PROMPT[6:26], max_tokens=2))
    driver.finish()
    assert lengths(driver)[:6] == [[6, 2], [1, 7], [1, 7], [1, 4], [1, 1], [1]]


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    driver = Driver(max_batched_tokens=64)
    driver.run(request("a", PROMPT, max_tokens=3))
    assert lengths(driver) == [[30], [1], [1]]


def test_a_budget_smaller_than_the_rows_lets_no_more_in_than_it_can_serve() -> None:
    driver = Driver(max_batched_tokens=3, max_running=8)
    driver.submit(*[request(f"r{index}", [index, 9], max_tokens=6) for index in range(6)])
    for _ in range(12):
        driver.step()
        assert len(running(driver)) <= 3
    driver.finish()


def test_one_new_picture_a_step_beside_running_streams() -> None:
    driver = Driver(max_batched_tokens=64)
    driver.submit(request("stream", PROMPT[:4], max_tokens=30))
    driver.step(2)
    driver.submit(*[request(f"p{index}", PROMPT, [picture(index, (0, 4))], max_tokens=2) for index in range(3)])
    before = len(driver.told["stream"].ids)
    driver.step(3)
    assert driver.runner.encoded == [1, 1, 1]
    assert len(driver.told["stream"].ids) == before + 3, "the stream missed a step"
    driver.finish()


def test_alone_all_pictures_of_a_chunk_are_encoded_in_one_call() -> None:
    driver = Driver(max_batched_tokens=64)
    driver.run(request("r", PROMPT, [picture(index, (index * 5, 5)) for index in range(4)]))
    assert driver.runner.encoded == [4]


def test_the_same_requests_in_the_same_order_give_the_same_batches() -> None:
    def batches() -> list[list[tuple[int, int, int]]]:
        runner = FakeRunner(num_slots=60, max_rows=4)
        driver = Driver(runner, max_batched_tokens=9, vision_cache_tokens=8, optimistic=True)
        for index in range(12):
            media = [picture(index % 3, (3, 6))] if index % 2 else []
            driver.submit(request(f"r{index}", PROMPT[: 12 + index], media, max_tokens=12, priority=index % 2))
            driver.step(index % 3)
        driver.finish()
        assert driver.engine.stats().num_retracted, "the pool was meant to run out"
        return driver.runner.steps

    assert batches() == batches()


# ---- shared prefixes in one batch ----


def test_a_request_waits_for_another_that_is_computing_its_prefix() -> None:
    driver = Driver(max_batched_tokens=10)
    driver.submit(request("a", PROMPT), request("b", [*PROMPT, 1]), request("c", [1, 2, 3]))
    driver.step()
    assert running(driver) == ["a"]
    driver.step(2)
    assert running(driver) == ["a"]
    driver.step()
    assert running(driver) == ["a", "b", "c"]
    told = driver.finish()
    assert told["b"].usage.cached_tokens == len(PROMPT)
    assert all(told[name].ids == reference(wanted)[0] for name, wanted in (("b", request("b", [*PROMPT, 1])),))


def test_others_pass_the_one_that_waits_for_a_prefix() -> None:
    driver = Driver(max_batched_tokens=32)
    driver.submit(request("a", PROMPT), request("b", PROMPT), request("c", [1, 2]))
    driver.step()
    assert running(driver) == ["a", "c"]
    driver.finish()


def test_who_waits_for_a_prefix_goes_on_when_the_other_is_aborted() -> None:
    driver = Driver(max_batched_tokens=10)
    driver.submit(request("a", PROMPT), request("b", PROMPT))
    driver.step()
    driver.engine.abort("a")
    driver.step()
    assert running(driver) == ["b"]
    assert driver.finish()["b"].usage.cached_tokens == 10


# ---- memory ----


def test_admission_leaves_room_for_what_runs_to_grow() -> None:
    driver = Driver(FakeRunner(num_slots=65), max_batched_tokens=64)
    driver.submit(request("a", PROMPT[:10], max_tokens=50), request("b", PROMPT[10:20], max_tokens=50))
    driver.step()
    assert running(driver) == ["a"]
    driver.finish()
    assert driver.engine.stats().num_retracted == 0


def test_nobody_passes_a_request_that_lacks_only_memory() -> None:
    driver = Driver(FakeRunner(num_slots=65), max_batched_tokens=64)
    driver.submit(request("a", PROMPT[:10], max_tokens=50))
    driver.step()
    driver.submit(request("big", PROMPT, max_tokens=20), request("small", [1], max_tokens=2))
    driver.step(3)
    assert running(driver) == ["a"]
    assert not driver.told["small"].ids
    driver.finish()


@pytest.mark.parametrize("num_slots", [34, 37, 41, 44])
def test_when_memory_runs_out_some_are_retracted_and_say_the_same_later(num_slots: int) -> None:
    driver = Driver(FakeRunner(num_slots=num_slots), max_batched_tokens=64, optimistic=True)
    requests = [
        request("long", PROMPT[:20], max_tokens=12),
        request("short", [9, *PROMPT[20:24]], max_tokens=12),
        request("important", [8, 7], max_tokens=12, priority=1),
    ]
    driver.submit(*requests)
    while driver.engine.has_work:
        before = driver.engine.stats()
        driver.step()
        after = driver.engine.stats()
        assert after.num_retracted == before.num_retracted or after.num_waiting > before.num_waiting, (
            "let in again at once"
        )
        assert "important" in running(driver) or driver.told["important"].reason == "length"
    assert driver.engine.stats().num_retracted
    for wanted in requests:
        assert driver.told[wanted.request_id].ids == reference(wanted)[0]


def test_retraction_prefers_the_lower_class_then_the_least_work_then_the_youngest() -> None:
    driver = Driver(max_batched_tokens=64)
    driver.submit(
        request("high", [1], priority=1, max_tokens=30),
        request("much", PROMPT[:9], max_tokens=30),
        request("little", [2, 3], max_tokens=30),
        request("young", [4, 5], max_tokens=30),
    )
    driver.step(2)
    plan = driver.engine.scheduler.schedule(0.0)
    for _ in range(3):
        driver.engine.scheduler._retract_cheapest(plan)
    assert running(driver) == ["high"]
    assert [sequence.request_id for sequence in driver.engine.waiting] == ["young", "little", "much"]


def test_what_a_retracted_request_computed_stays_for_its_return() -> None:
    driver = Driver(max_batched_tokens=64)
    wanted = request("r", PROMPT, max_tokens=10)
    driver.submit(wanted)
    driver.step(4)
    driver.engine.scheduler.retract(driver.engine.scheduler.running[0])
    driver.step()
    assert lengths(driver)[-1] == [1]
    assert driver.finish()["r"].ids == reference(wanted)[0]
    assert driver.told["r"].usage.cached_tokens == 0, "a request's own return is no cache hit"


def test_prompts_that_fill_the_memory_together_do_not_block_each_other() -> None:
    driver = Driver(FakeRunner(num_slots=41), max_batched_tokens=16, optimistic=True)
    hold = driver.engine.vision.hold
    driver.engine.vision.hold = lambda *_: None  # type: ignore[method-assign]
    requests = [
        request("seeing", PROMPT, [picture(1, (0, 9))], max_tokens=2),
        *[request(f"r{index}", [index, *PROMPT, *PROMPT[:8]], max_tokens=2) for index in range(2)],
    ]
    driver.submit(*requests)
    driver.step(2)
    assert [sequence.num_computed for sequence in driver.engine.scheduler.running] == [0, 32]
    driver.engine.vision.hold = hold  # type: ignore[method-assign]
    told = driver.finish()
    assert all(told[wanted.request_id].ids == reference(wanted)[0] for wanted in requests)
    assert driver.engine.stats().num_retracted


@pytest.mark.parametrize("num_slots", range(31, 60, 7))
@pytest.mark.parametrize("optimistic", [True, False])
def test_whatever_fits_alone_is_served(num_slots: int, optimistic: bool) -> None:
    driver = Driver(
        FakeRunner(num_slots=num_slots, max_rows=4), max_batched_tokens=8, vision_cache_tokens=9, optimistic=optimistic
    )
    requests: list[EngineRequest] = [
        request(f"r{index}", PROMPT[index : index + 16], [picture(index, (4, 9))], max_tokens=14) for index in range(9)
    ]
    told = driver.run(*requests)
    assert all(told[wanted.request_id].ids == reference(wanted)[0] for wanted in requests)
