"""What breaks (a step, an encoding, memory, progress) ends its requests with a clear error, and the engine goes on."""

from __future__ import annotations

import pytest
import torch

from preprocess.wire import Admitted, EngineRequest
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, embed, reference

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def outputs_of(wanted: EngineRequest) -> list[int]:
    return reference(wanted)[0]


def test_a_broken_step_fails_its_requests_and_the_engine_goes_on() -> None:
    driver = Driver(max_running=2)
    requests = [request(name, [index, *PROMPT], max_tokens=30) for index, name in enumerate("abc")]
    driver.submit(*requests)
    driver.step(5)

    def break_once() -> None:
        driver.runner.before_step = lambda: None
        raise RuntimeError("secret detail of the device")

    driver.runner.before_step = break_once
    driver.step()
    assert [driver.told[name].reason for name in "abc"] == ["error", "error", None]
    finish = driver.told["a"].finish
    assert finish is not None
    assert finish.error is not None
    assert (finish.error.status, finish.error.code, finish.error.request_id) == (500, "engine_error", "a")
    assert "secret" not in finish.error.message
    assert driver.finish()["c"].ids == outputs_of(requests[2])
    again = request("again", [0, *PROMPT], max_tokens=30)
    assert driver.run(again)["again"].ids == outputs_of(again)


def test_a_runner_that_loses_a_token_is_a_broken_step() -> None:
    driver = Driver()
    original = driver.runner.step
    driver.runner.step = lambda rows: original(rows)[1:]  # type: ignore[method-assign]
    assert driver.run(request("r", PROMPT))["r"].reason == "error"


@pytest.mark.parametrize("fault", ["raises", "too few tokens", "too few pictures", "pixels are gone"])
def test_a_picture_that_cannot_be_encoded_fails_its_requests_only(fault: str) -> None:
    driver = Driver()
    text = request("text", PROMPT, max_tokens=30)
    driver.submit(text)
    driver.step(3)
    original = driver.runner.encode

    def encode(pixels: list[torch.Tensor]) -> list[torch.Tensor]:
        if fault == "raises":
            raise RuntimeError("the encoder broke")
        return [embed(picture)[1:] for picture in pixels] if fault == "too few tokens" else []

    def gone(_: object) -> torch.Tensor:
        raise OSError("the arena is gone")

    wanted = request("seen", PROMPT, [picture(1, (2, 4))])
    if fault == "pixels are gone":
        assert driver.engine.submit(wanted, gone) == Admitted("seen")
    else:
        driver.runner.encode = encode  # type: ignore[method-assign,assignment]
        driver.submit(wanted)
    driver.step(3)
    finish = driver.told["seen"].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.code == "engine_error"
    driver.runner.encode = original  # type: ignore[method-assign]
    again = request("again", PROMPT, [picture(1, (2, 4))])
    told = driver.run(again)
    assert told["again"].ids == outputs_of(again)
    assert told["text"].ids == outputs_of(text)


def test_a_request_that_alone_fills_the_memory_ends_with_what_it_has_said() -> None:
    driver = Driver(FakeRunner(num_slots=17))
    wanted = request("r", PROMPT, max_tokens=50)
    told = driver.run(wanted)["r"]
    assert told.reason == "length"
    assert told.ids == outputs_of(wanted)[:7]
    assert told.usage.completion_tokens == 7


def test_an_engine_that_schedules_nothing_fails_the_request_at_the_head() -> None:
    driver = Driver()
    driver.engine.vision.hold = lambda *_: None  # type: ignore[method-assign]
    driver.submit(request("stuck", PROMPT, [picture(1, (0, 4))]), request("next", PROMPT))
    told = driver.finish(max_steps=60)
    assert told["stuck"].finish is not None
    assert told["stuck"].finish.error is not None
    assert told["stuck"].finish.error.code == "engine_stalled"
    assert told["next"].reason == "length"
