"""Lives of single requests: how they end, and what is told and charged for them."""

from __future__ import annotations

import pytest

from engine.batch import Row
from engine.vision_ids import FIRST_VISION_ID
from preprocess.wire import EngineRequest, OutputStart, TextOptions, TokenEvents
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, load, reference

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
