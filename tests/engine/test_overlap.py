"""One batch ahead of its results: the same answers, never more than the next batch in flight, and none where results
decide.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.engine.driving import Driver, request
from tests.engine.fake_runner import LateRunner, reference

TEXT = [1, 2, 3, 4, 5, 6]


def test_decode_steps_are_launched_before_the_last_ones_results_are_asked_for() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    wanted = [request(f"r{index}", [*TEXT, index], max_tokens=9) for index in range(3)]
    told = driver.run(*wanted)
    assert runner.most_in_flight == 2
    for one in wanted:
        assert (told[one.request_id].ids, told[one.request_id].reason) == reference(one)


def test_an_answer_as_long_as_asked_for_costs_no_step_in_vain() -> None:
    runner = LateRunner()
    Driver(runner).run(request("r", TEXT, max_tokens=5))
    assert [tokens for rows in runner.steps for _, _, tokens in rows] == [6, 1, 1, 1, 1]


def test_what_a_stop_id_ends_computes_one_token_more_that_nobody_sees() -> None:
    plain = request("r", TEXT, max_tokens=20)
    ids, _ = reference(plain)
    stopped = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, stop_token_ids=[ids[7]]))
    wanted, _ = reference(stopped)
    assert len(wanted) < 20
    runner = LateRunner()
    told = Driver(runner).run(stopped)["r"]
    assert (told.ids, told.reason) == (wanted, "stop")
    assert len(runner.steps) == len(wanted) + 1


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_wait_for_every_token(penalty: str) -> None:
    runner = LateRunner()
    plain = request("r", TEXT, max_tokens=9)
    wanted = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **{penalty: 1.5}))
    told = Driver(runner).run(wanted)["r"]
    assert told.ids == reference(plain)[0]  # the fake runner knows no penalties
    assert runner.most_in_flight == 1


def test_an_abort_ends_a_request_whose_token_is_in_flight() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    wanted = request("r", TEXT, max_tokens=50), request("other", TEXT[::-1], max_tokens=9)
    driver.submit(*wanted)
    driver.step(4)
    assert runner.in_flight
    driver.engine.abort("r")
    driver.step()
    assert driver.told["r"].reason == "abort"
    driver.finish()
    assert driver.told["r"].ids == reference(wanted[0])[0][: len(driver.told["r"].ids)]
    assert driver.told["other"].ids == reference(wanted[1])[0]


def test_a_stop_keeps_the_tokens_before_it() -> None:
    driver = Driver(LateRunner())
    wanted = request("r", TEXT, max_tokens=50)
    driver.submit(wanted)
    driver.step(6)
    driver.engine.stop("r", 2)
    driver.finish()
    told = driver.told["r"]
    assert told.reason == "stop"
    assert told.usage.completion_tokens == 2


def test_a_reset_forgets_what_is_in_flight() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    driver.submit(request("r", TEXT, max_tokens=50))
    driver.step(3)
    driver.engine.reset()
    driver.told.clear()
    wanted = request("next", TEXT, max_tokens=6)
    told = driver.run(wanted)["next"]
    assert told.ids == reference(wanted)[0]
