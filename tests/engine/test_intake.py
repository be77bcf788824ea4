"""What the engine refuses, in which words, and that a refused request leaves nothing behind."""

from __future__ import annotations

import msgspec
import pytest

from preprocess.wire import EngineRequest, SamplingParams, TextOptions
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [
        (request("r", []), "empty_prompt", "empty"),
        (request("r", [1], max_tokens=0), "invalid_max_tokens", "0; at least 1"),
        (request("r", [1] * 20), "context_length_exceeded", "20 tokens (0 of them from 0 pictures), but the context"),
        (request("r", [1] * 18), "kv_capacity_exceeded", "18 tokens (0 of them from 0 pictures), but the server"),
        (request("r", [1, 50]), "invalid_token_id", "outside 0 … 49"),
        (request("r", [1, -1]), "invalid_token_id", "outside 0 … 49"),
        (request("r", PROMPT, [picture(1, (0, 9))]), "image_too_large", "9 vision tokens"),
        (request("r", PROMPT, [picture(1)]), "invalid_media_spans", "no place"),
        (request("r", PROMPT, [picture(1, (4, 3)), picture(2, (5, 3))]), "invalid_media_spans", "(5, 3)"),
    ],
)  # fmt: skip
def test_what_could_never_be_served_is_refused_with_counts(wanted: EngineRequest, code: str, words: str) -> None:
    refused = Driver(FakeRunner(num_slots=17), max_context=20, vision_cache_tokens=8).refuse(wanted)
    assert (refused.status, refused.code, refused.retry_after_s) == (400, code, None)
    assert words in refused.message


def test_spans_outside_the_prompt_are_refused() -> None:
    item = picture(1, (4, 3))
    prompt = request("r", PROMPT[:6]).prompt_ids
    wanted = EngineRequest("r", prompt, [item], SamplingParams(max_tokens=1), TextOptions(), 0.0)
    assert Driver().refuse(wanted).code == "invalid_media_spans"


def test_half_a_token_id_is_refused() -> None:
    wanted = EngineRequest("r", b"\0" * 12, [], SamplingParams(max_tokens=1), TextOptions(), 0.0)
    assert Driver().refuse(wanted).code == "invalid_prompt"


@pytest.mark.parametrize(
    "num_bytes",
    [
        12 * 6,  # the picture ends behind them
        12 * 11,  # longer than the prompt
        12 * 7 + 4,
    ],
)
def test_positions_of_another_prompt_are_refused(num_bytes: int) -> None:
    wanted = msgspec.structs.replace(request("r", PROMPT, [picture(1, (4, 3))]), positions=bytes(num_bytes))
    assert Driver().refuse(wanted).code == "invalid_positions"


def test_an_id_that_is_being_served_is_refused() -> None:
    driver = Driver()
    driver.submit(request("r", PROMPT))
    assert driver.refuse(request("r", PROMPT)).code == "duplicate_request_id"
    driver.finish()


def test_a_full_queue_refuses_with_a_time_that_follows_the_recent_rate() -> None:
    driver = Driver(max_waiting=3, max_running=1)
    driver.submit(*[request(f"r{index}", [index], max_tokens=1) for index in range(3)])
    refused = driver.refuse(request("late", [9], [picture(1, (0, 1))]))
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "queue_full", 1.0)
    for index in range(6):  # one request comes in every 10 seconds
        driver.step()
        driver.now_s += 10
        driver.submit(request(f"s{index}", [index], max_tokens=1))
    assert driver.refuse(request("late", [9])).retry_after_s == 11.0
    driver.finish()
    driver.submit(*[request(f"t{index}", [index], max_tokens=1) for index in range(3)])
    assert driver.refuse(request("late", [9])).retry_after_s == 1.0
    driver.finish()


def test_a_queue_full_of_tokens_refuses_but_an_empty_one_takes_any() -> None:
    driver = Driver(max_waiting_tokens=8)
    driver.submit(request("big", PROMPT))
    assert driver.refuse(request("late", [1])).status == 429
    driver.step()
    driver.submit(request("small", [1] * 8))
    assert driver.refuse(request("late", [1])).status == 429
    driver.finish()
