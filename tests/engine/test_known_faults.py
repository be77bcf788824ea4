"""Faults that other engines had and this one must not have. Each test says what went wrong there."""

from __future__ import annotations

import pytest

from engine import scheduler
from preprocess.wire import EngineRequest
from tests.engine.driving import PLACEHOLDER, Driver, picture, request
from tests.engine.fake_runner import FakeRunner, reference

TEXT = list(range(10, 30))


def alone(wanted: EngineRequest) -> list[int]:
    return reference(wanted)[0]


# ---- pictures and the prefix cache ----


def test_two_pictures_of_equal_size_do_not_share_a_prefix() -> None:
    """A user was told about the previous user's picture, because all pictures had the same placeholder ids."""
    driver = Driver()
    for content in range(4):
        wanted = request(f"r{content}", TEXT, [picture(content, (3, 8))])
        told = driver.run(wanted)[wanted.request_id]
        assert told.ids == alone(wanted)
        assert told.usage.cached_tokens == (3 if content else 0)


def test_two_pictures_swapped_in_order_are_told_apart() -> None:
    """The second picture was answered as the first: one key for all pictures of a prompt."""
    driver = Driver()
    straight = request("straight", TEXT, [picture(1, (2, 6)), picture(2, (9, 6))])
    swapped = request("swapped", TEXT, [picture(2, (2, 6)), picture(1, (9, 6))])
    told = driver.run(straight, swapped)
    assert told["straight"].ids == alone(straight)
    assert told["swapped"].ids == alone(swapped)
    assert told["straight"].ids != told["swapped"].ids


@pytest.mark.parametrize("shift", range(1, 9))
def test_the_same_picture_at_another_place_is_computed_anew(shift: int) -> None:
    """Only the picture was in the key, not where it begins, and KV of another offset was used."""
    driver = Driver()
    driver.run(request("first", [PLACEHOLDER] * 20, [picture(1, (0, 8))]))
    moved = request("moved", [PLACEHOLDER] * 20, [picture(1, (shift, 8))])
    told = driver.run(moved)["moved"]
    assert told.ids == alone(moved)
    assert told.usage.cached_tokens == 0


def test_placeholders_in_the_text_are_not_a_picture() -> None:
    """Text with the placeholder's own id matched a picture."""
    driver = Driver()
    seen, text = (
        request("seen", TEXT, [picture(1, (2, 6))]),
        request("text", [*TEXT[:2], *[PLACEHOLDER] * 6, *TEXT[8:]]),
    )
    told = driver.run(seen, text)
    assert told["seen"].ids == alone(seen)
    assert told["text"].ids == alone(text)
    assert told["text"].usage.cached_tokens <= 2


def test_embeddings_of_a_batch_go_to_their_own_requests() -> None:
    """Hashes of all requests of a batch were combined, and rows got embeddings of others."""
    driver = Driver(max_batched_tokens=64)
    requests = [request(f"r{index}", [index, *TEXT], [picture(index % 2, (3 + index, 5))]) for index in range(4)]
    told = driver.run(*requests)
    assert all(told[wanted.request_id].ids == alone(wanted) for wanted in requests)
    assert sum(driver.runner.encoded) == 2, "each picture is encoded once, whoever asks"


def test_a_longer_picture_with_the_same_name_has_other_ids() -> None:
    """A digest that did not cover the picture's size let one stand for the other."""
    driver = Driver()
    item = picture(1, (3, 8))
    small = request("small", TEXT, [picture(1, (3, 4))])
    large = request("large", TEXT, [type(item)(small.media[0].digest, item.pixels, item.spans)])
    told = driver.run(small, large)
    assert told["large"].ids == alone(large)


def test_pictures_do_hit_the_prefix_cache_and_are_not_encoded_again() -> None:
    """The hit rate was 0 % with pictures, and a hit over a picture still ran the encoder."""
    driver = Driver(vision_cache_tokens=8)
    for index in range(3):
        driver.run(request(f"r{index}", [*TEXT, index], [picture(1, (2, 8))]))
        driver.run(request(f"other{index}", [index, *TEXT], [picture(index + 2, (2, 8))]))  # evicts the embeddings
    assert driver.told["r1"].usage.cached_tokens == driver.told["r2"].usage.cached_tokens == 20
    assert sum(driver.runner.encoded) == 4


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_prefix_that_ends_inside_a_picture_is_right(cut: int) -> None:
    """A picture cut by the cache or by a chunk got embeddings from its beginning."""
    wanted = request("whole", TEXT, [picture(1, (4, 10))], max_tokens=4)
    driver = Driver(FakeRunner(num_slots=40))
    driver.run(wanted)
    driver.engine.kv.pool.free(driver.engine.kv.tree.evict(driver.engine.kv.tree.num_tokens - cut))
    driver.engine.check()
    again = request("again", TEXT, [picture(1, (4, 10))], max_tokens=4)
    told = driver.run(again)["again"]
    assert told.ids == alone(wanted)
    assert told.usage.cached_tokens == min(cut, 19)


# ---- slots ----


def test_two_equal_prompts_in_one_batch_keep_their_own_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the duplicate were freed while its sequence went on reading them, and others wrote over them."""
    monkeypatch.setattr(scheduler, "MIN_SHARED", 1000)
    driver = Driver(FakeRunner(num_slots=70), max_batched_tokens=60)
    driver.submit(request("a", TEXT, max_tokens=9), request("b", TEXT, max_tokens=9))
    driver.step()
    first, second = (sequence.hold for sequence in driver.engine.scheduler.running)
    assert first is not None
    assert second is not None
    assert not first.duplicates
    assert sum(map(len, second.duplicates)) == len(TEXT)
    before = driver.runner.slot_table[second.row, : len(TEXT)].tolist()
    driver.submit(request("c", [1, *TEXT], max_tokens=3))
    driver.step(3)
    assert driver.runner.slot_table[second.row, : len(TEXT)].tolist() == before, "remapped while running"
    told = driver.finish()
    assert told["a"].ids == told["b"].ids == alone(request("r", TEXT, max_tokens=9))
    assert told["c"].ids == alone(request("r", [1, *TEXT], max_tokens=3))


def test_a_fully_cached_prompt_computes_one_token() -> None:
    """A prompt that was cached whole crashed, or gave an answer without logits."""
    driver = Driver()
    driver.run(request("first", TEXT, max_tokens=3))
    driver.runner.steps.clear()
    told = driver.run(request("again", TEXT, max_tokens=3))["again"]
    assert told.ids == alone(request("r", TEXT, max_tokens=3))
    assert (told.usage.cached_tokens, driver.runner.steps[0][0][2]) == (19, 1)


def test_an_abort_inside_a_batch_frees_once_and_after_it() -> None:
    """An abort during prefill cached the request twice, or freed blocks in use: the next turn was wrong."""
    driver = Driver(FakeRunner(num_slots=60), max_batched_tokens=8)
    driver.submit(request("a", TEXT, [picture(1, (2, 9))]), request("b", TEXT[::-1]))
    driver.step()
    free = driver.engine.kv.pool.num_free

    def abort() -> None:
        driver.engine.abort("a")
        assert driver.engine.kv.pool.num_free <= free
        driver.runner.before_step = lambda: None

    driver.runner.before_step = abort
    driver.step()
    assert driver.told["a"].reason == "abort"
    again = request("again", TEXT, [picture(1, (2, 9))])
    told = driver.run(again)
    assert told["again"].ids == alone(again)
    assert told["b"].ids == alone(request("b", TEXT[::-1]))


def test_after_an_abort_nothing_more_is_computed() -> None:
    """The client had gone, tokens were still generated."""
    driver = Driver()
    driver.submit(request("r", TEXT, max_tokens=50))
    driver.step(5)
    steps = len(driver.runner.steps)
    driver.engine.abort("r")
    driver.finish()
    assert len(driver.runner.steps) == steps


def test_an_id_that_begins_like_another_is_not_aborted_with_it() -> None:
    """Abort matched the beginning of ids."""
    driver = Driver()
    driver.submit(request("r1", TEXT), request("r10", TEXT))
    driver.engine.abort("r1")
    told = driver.finish()
    assert (told["r1"].reason, told["r10"].reason) == ("abort", "length")


# ---- vision cache and progress ----


def test_two_requests_with_a_cache_for_one_picture_both_finish() -> None:
    """Waiting requests held the encoder cache that the others needed: the scheduler span for ever."""
    driver = Driver(vision_cache_tokens=8, max_batched_tokens=5)
    requests = [
        request(f"r{index}", [index, *TEXT], [picture(index, (2, 8)), picture(index + 5, (11, 8))])
        for index in range(4)
    ]
    driver.submit(*requests)
    told = driver.finish(max_steps=200)
    assert all(told[wanted.request_id].ids == alone(wanted) for wanted in requests)
    assert all(len(rows) for rows in driver.runner.steps)


def test_a_picture_larger_than_the_cache_is_refused_at_once() -> None:
    """A picture that could never be held hung the engine."""
    driver = Driver(vision_cache_tokens=7)
    refused = driver.refuse(request("r", TEXT, [picture(1, (2, 8))]))
    assert (refused.status, refused.code) == (400, "image_too_large")
    driver.run(request("fits", TEXT, [picture(1, (2, 7))]))


def test_aborts_leave_no_embeddings_held() -> None:
    """Entries of aborted requests stayed referenced, until the cache was full of them."""
    driver = Driver(vision_cache_tokens=16, max_batched_tokens=6)
    for index in range(12):
        driver.submit(request(f"r{index}", TEXT, [picture(index, (2, 12))]))
        driver.step()
        driver.engine.abort(f"r{index}")
    driver.finish()
    assert driver.engine.vision.num_bytes <= 16 * FakeRunner.embedding_bytes


def test_embeddings_are_given_up_once_prefill_has_passed_and_made_again_after_retraction() -> None:
    """Embeddings were kept for as long as the request lived; or they were gone when retraction needed them."""
    driver = Driver(vision_cache_tokens=12, prefix_cache=False)
    wanted = request("r", TEXT, [picture(1, (2, 12))], max_tokens=20)
    driver.submit(wanted)
    driver.step(4)
    assert all(not held.held for held in driver.engine.scheduler.running[0].pictures)
    driver.submit(request("evicts", TEXT, [picture(2, (2, 12))], max_tokens=2))
    driver.step(4)
    driver.engine.scheduler.retract(driver.engine.scheduler.running[0])
    told = driver.finish()
    assert told["r"].ids == alone(wanted)
    assert driver.runner.encoded == [1, 1, 1]


def test_every_step_with_work_computes_something() -> None:
    """Passes of zero tokens, 156,000 of them in 25 minutes."""
    driver = Driver(FakeRunner(num_slots=45, max_rows=4), max_batched_tokens=4, vision_cache_tokens=9)
    for index in range(10):
        driver.submit(request(f"r{index}", TEXT, [picture(index, (index, 9))], max_tokens=18))
    while driver.engine.has_work:
        before = len(driver.runner.steps)
        driver.step()
        assert len(driver.runner.steps) == before + 1 or not driver.engine.has_work


def test_more_requests_than_the_queue_holds_are_all_answered() -> None:
    """An unbounded queue died under 72 picture requests; a bounded one lost its refusals, and clients hung."""
    driver = Driver(max_waiting=8, max_running=2)
    requests = [request(f"r{index}", TEXT, [picture(index, (2, 8))]) for index in range(72)]
    driver.submit(*requests[:8])
    for wanted in requests[8:]:
        refused = driver.refuse(wanted)
        assert (refused.request_id, refused.status) == (wanted.request_id, 429)
        assert refused.retry_after_s is not None
        assert refused.retry_after_s >= 1
    assert all(told.reason == "length" for told in driver.finish().values())


# ---- positions ----


@pytest.mark.parametrize("chunk", range(1, 22))
def test_any_chunk_size_equals_one_shot_with_pictures_after_retraction_too(chunk: int) -> None:
    """Positions or embeddings of later chunks were those of the first; retraction did not count its output."""
    wanted = request("r", TEXT, [picture(1, (3, 5)), picture(2, (9, 7))], max_tokens=10)
    for prefix_cache in (True, False):
        driver = Driver(max_batched_tokens=chunk, prefix_cache=prefix_cache)
        driver.submit(wanted)
        driver.step(20 // chunk + 5)
        driver.engine.scheduler.retract(driver.engine.scheduler.running[0])
        assert driver.finish()["r"].ids == alone(wanted)


def test_decoding_goes_on_at_the_position_after_the_last() -> None:
    """Every decoded token stood at position 0."""
    driver = Driver(max_batched_tokens=64)
    driver.run(request("r", TEXT, max_tokens=6))
    assert [rows[0][1] for rows in driver.runner.steps] == [0, 20, 21, 22, 23, 24]


@pytest.mark.parametrize("num_slots", [40, 75, 300])
def test_the_cache_changes_no_answer_under_load(num_slots: int) -> None:
    """With prefix caching on, equal text with slightly different pictures came out garbled under load."""
    requests = [
        request(f"r{index}", TEXT, [picture(index % 5, (2, 6)), picture(index % 3, (9, 6))], max_tokens=5 + index % 9)
        for index in range(40)
    ]
    for prefix_cache in (True, False):
        driver = Driver(FakeRunner(num_slots=num_slots), prefix_cache=prefix_cache, optimistic=True)
        told = driver.run(*requests)
        assert all(told[wanted.request_id].ids == alone(wanted) for wanted in requests)
