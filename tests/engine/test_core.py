"""Lives of single requests: how they end, what they are charged, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Row
from engine.vision_ids import FIRST_VISION_ID
from preprocess.wire import Admitted, EngineRequest, OutputStart, SamplingParams, TextOptions, TokenEvents
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, embed, load, reference

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def outputs_of(wanted: EngineRequest) -> list[int]:
    return reference(wanted)[0]


# ---- ends ----


def test_a_stop_token_ends_the_answer_and_is_its_last_id() -> None:
    answer = outputs_of(request("r", PROMPT, max_tokens=20))
    wanted = request("r", PROMPT, max_tokens=20, stop_token_ids=[answer[4]])
    told = Driver().run(wanted)["r"]
    assert told.ids == answer[: answer.index(answer[4]) + 1]
    assert told.finish is not None
    assert (told.reason, told.finish.stop_token_id) == ("stop", answer[4])
    assert told.usage.completion_tokens == len(told.ids)


def test_a_stop_token_is_banned_before_min_tokens() -> None:
    first = outputs_of(request("r", PROMPT))[0]
    wanted = request("r", PROMPT, stop_token_ids=[first], min_tokens=3, max_tokens=20)
    told = Driver().run(wanted)["r"]
    assert first not in told.ids[:3]
    assert (told.ids, told.reason) == reference(wanted)


def test_max_tokens_ends_with_length() -> None:
    told = Driver().run(request("r", PROMPT, max_tokens=5))["r"]
    assert (len(told.ids), told.reason) == (5, "length")
    assert told.finish is not None
    assert told.finish.stop_token_id is None


def test_the_end_of_the_context_ends_with_length() -> None:
    told = Driver(max_context=14).run(request("r", PROMPT, max_tokens=50))["r"]
    assert (len(told.ids), told.reason) == (4, "length")


def test_a_stop_string_discards_what_was_generated_beyond() -> None:
    driver = Driver()
    driver.submit(request("r", PROMPT, max_tokens=50))
    driver.step(8)
    told = driver.told["r"]
    generated = len(told.ids)
    driver.engine.stop("r", generated - 3)
    driver.step()
    assert told.reason == "stop"
    assert len(told.ids) == generated, "a token came after the stop"
    assert told.usage.completion_tokens == generated - 3
    assert told.finish is not None
    assert (told.finish.stop_token_id, told.finish.token_ids) == (None, [])
    driver.engine.stop("r", 1)
    driver.engine.stop("nobody", 1)
    assert driver.finish()["r"] is told


def test_a_stop_for_a_retracted_request_is_kept() -> None:
    driver = Driver()
    driver.submit(request("r", PROMPT, max_tokens=50))
    driver.step(8)
    driver.engine.scheduler.retract(driver.engine.scheduler.running[0])
    driver.engine.stop("r", 2)
    driver.step()
    assert driver.finish()["r"].usage.completion_tokens == 2


def test_an_abort_takes_a_waiting_request_out_before_it_is_computed() -> None:
    driver = Driver(max_running=1)
    driver.submit(request("a", PROMPT), request("b", PROMPT[::-1]))
    driver.step()
    driver.engine.abort("b")
    driver.step()
    assert (driver.told["b"].reason, driver.told["b"].usage.completion_tokens) == ("abort", 0)
    assert driver.told["a"].reason is None
    driver.finish()


def test_an_abort_ends_a_running_request_once_and_within_a_step() -> None:
    driver = Driver()
    driver.submit(request("a", PROMPT, max_tokens=50), request("b", PROMPT[::-1], max_tokens=50))
    driver.step(4)
    count = len(driver.told["a"].ids)
    driver.engine.abort("a")
    driver.engine.abort("a")
    driver.engine.stop("a", 1)
    driver.engine.abort("nobody")
    driver.step()
    assert driver.told["a"].reason == "abort"
    assert driver.told["a"].usage.completion_tokens == len(driver.told["a"].ids) == count
    driver.engine.abort("a")
    assert driver.finish()["b"].reason == "length"


def test_abort_and_stop_during_a_batch_wait_for_its_results() -> None:
    driver = Driver()
    driver.submit(*[request(name, PROMPT, max_tokens=50) for name in "abc"])
    driver.step(5)
    counts = {name: len(driver.told[name].ids) for name in "abc"}

    def interfere() -> None:
        driver.engine.abort("a")
        driver.engine.stop("b", 1)
        driver.runner.before_step = lambda: None

    driver.runner.before_step = interfere
    driver.step()
    assert [driver.told[name].reason for name in "abc"] == ["abort", "stop", None]
    assert [len(driver.told[name].ids) - counts[name] for name in "abc"] == [0, 0, 1]
    driver.finish()


def test_reset_forgets_everybody_without_a_word() -> None:
    driver = Driver(max_running=2)
    driver.submit(*[request(name, PROMPT, [picture(1, (2, 4))]) for name in "abc"])
    driver.step(3)
    driver.submit(request("d", PROMPT))
    driver.engine.reset()
    driver.engine.check()
    assert not driver.engine.has_work
    assert driver.engine.step() == []
    driver.told.clear()
    wanted = request("a", PROMPT)
    assert driver.run(wanted)["a"].ids == outputs_of(wanted)


# ---- what is told ----


def test_a_start_comes_before_the_first_event_even_of_an_aborted_request() -> None:
    driver = Driver()
    driver.engine.submit(request("r", PROMPT), load)
    driver.engine.abort("r")
    start, events = driver.engine.step()
    assert start == OutputStart("r", TextOptions())
    assert isinstance(events, TokenEvents)
    assert events.events[0].finish_reason == "abort"
    assert driver.engine.step() == []


def test_usage_counts_tokens_and_times() -> None:
    driver = Driver(max_batched_tokens=4)
    wanted = request("r", PROMPT, [picture(1, (2, 4))], max_tokens=3)

    def take_time() -> None:
        driver.now_s += 0.5

    driver.now_s = 10.0
    driver.submit(wanted)
    driver.now_s = 12.0
    driver.runner.before_step = take_time
    driver.runner.before_encode = lambda: setattr(driver, "now_s", driver.now_s + 0.25)
    usage = driver.run()["r"].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.image_tokens) == (10, 3, 0, 4)
    assert usage.queue_ms == pytest.approx(2_001)
    assert usage.vision_ms == pytest.approx(250)
    assert usage.prefill_ms == pytest.approx(1_502)
    assert usage.decode_ms == pytest.approx(1_002)
    again = driver.run(request("again", PROMPT, [picture(1, (2, 4))], max_tokens=3))["again"]
    assert again.usage.cached_tokens == 9
    assert again.usage.vision_ms == 0


def test_penalties_see_the_vocabulary_only_and_nothing_is_copied_without_them() -> None:
    driver = Driver()
    seen: list[Row] = []
    original = driver.runner.step
    driver.runner.step = lambda rows: (seen.extend(rows), original(rows))[1]  # type: ignore[method-assign]
    driver.run(request("r", PROMPT, [picture(1, (2, 4))], repetition_penalty=1.2, max_tokens=3))
    samplings = [row.sampling for row in seen if row.sampling is not None]
    assert [list(sampling.prompt_ids) for sampling in samplings] == [[1, 2, 7, 8, 9, 10]] * 3
    assert [len(sampling.output_ids) for sampling in samplings] == [0, 1, 2]
    seen.clear()
    driver.run(request("plain", PROMPT))
    assert all(not row.sampling.prompt_ids and not row.sampling.output_ids for row in seen if row.sampling)


def test_vision_tokens_have_ids_of_their_own_by_picture_and_place() -> None:
    driver = Driver()
    driver.submit(request("r", PROMPT, [picture(1, (1, 2), (4, 2)), picture(2, (6, 2)), picture(1, (8, 2))]))
    keys = next(iter(driver.engine.waiting)).prompt_keys
    first = FIRST_VISION_ID
    assert keys.tolist() == [1, first, first + 1, 4, first + 2, first + 3, first + 4, first + 5, first + 6, first + 7]
    driver.finish()


def test_stats_count() -> None:
    driver = Driver()
    driver.run(request("a", PROMPT, [picture(1, (2, 4))], max_tokens=3), request("b", [9], max_tokens=2))
    driver.run(request("c", PROMPT, [picture(1, (2, 4))], max_tokens=3))
    driver.run(request("d", [5, *PROMPT], [picture(1, (3, 4))], max_tokens=3))
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_slots_used, stats.kv_slots_total) == (0, 0, 0, 512)
    assert (stats.prompt_tokens, stats.generated_tokens) == (32, 11)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (32, 9)
    assert (stats.vision_queries, stats.vision_hits) == (2, 1)
    assert stats.vision_cache_bytes == 4 * FakeRunner.embedding_bytes


# ---- refusals ----


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


# ---- failures ----


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


def test_a_request_that_alone_fills_the_memory_ends_with_an_error() -> None:
    driver = Driver(FakeRunner(num_slots=17))
    wanted = request("r", PROMPT, max_tokens=50)
    told = driver.run(wanted)["r"]
    assert told.finish is not None
    assert told.finish.error is not None
    assert told.finish.error.code == "kv_exhausted"
    assert "16 tokens" in told.finish.error.message
    assert told.ids == outputs_of(wanted)[:7]


def test_an_engine_that_schedules_nothing_fails_the_request_at_the_head() -> None:
    driver = Driver()
    driver.engine.vision.hold = lambda *_: None  # type: ignore[method-assign]
    driver.submit(request("stuck", PROMPT, [picture(1, (0, 4))]), request("next", PROMPT))
    told = driver.finish(max_steps=60)
    assert told["stuck"].finish is not None
    assert told["stuck"].finish.error is not None
    assert told["stuck"].finish.error.code == "engine_stalled"
    assert told["next"].reason == "length"
