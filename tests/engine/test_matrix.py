"""The same requests give the same tokens: cache on or off, any chunk size, alone or together, retracted or not, any
pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from preprocess.wire import EngineRequest
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, LateRunner, reference

TEXT = [1, 2, 3, 4, 5, 6]

Build = Callable[[], list[EngineRequest]]


def text_requests() -> list[EngineRequest]:
    """Short and long, one a prefix of another, two equal."""
    prompts = [TEXT, TEXT * 5, [*TEXT * 5, 9, 9], [9, *TEXT * 4], TEXT * 5, [3]]
    return [request(f"r{index}", prompt, max_tokens=9 + index) for index, prompt in enumerate(prompts)]


def one_picture_requests() -> list[EngineRequest]:
    """Same text with other pictures, the same picture in other places, split by text, and at the very end."""
    long = TEXT * 5
    return [
        request("p0", long, [picture(1, (4, 12))]),
        request("p1", long, [picture(2, (4, 12))]),
        request("p2", long, [picture(1, (5, 12))]),
        request("p3", long, [picture(1, (4, 5), (12, 7))]),
        request("p4", long, [picture(1, (18, 12))]),
        request("p5", long, [picture(1, (4, 12))]),
        request("p6", long, [picture(1, (0, 12))]),
    ]


def several_picture_requests() -> list[EngineRequest]:
    """Two pictures in both orders, one twice, three in a row."""
    long = TEXT * 5
    return [
        request("s0", long, [picture(1, (2, 8)), picture(2, (11, 8))]),
        request("s1", long, [picture(2, (2, 8)), picture(1, (11, 8))]),
        request("s2", long, [picture(1, (2, 8)), picture(1, (11, 8))]),
        request("s3", long, [picture(1, (2, 8)), picture(2, (10, 8)), picture(3, (18, 8))]),
    ]


def three_axis_requests() -> list[EngineRequest]:
    """Pictures whose tokens stand at times, rows and columns: gaps behind them, and tokens that share a position."""
    long = TEXT * 5
    return [
        request("t0", long, [picture(1, (4, 8)), picture(2, (14, 6))], three_axes=True),
        request("t1", long, [picture(2, (4, 8)), picture(1, (14, 6))], three_axes=True),
        request("t2", long, [picture(2, (4, 5), (12, 3)), picture(1, (22, 8))], three_axes=True),
        request("t3", [*long, 9], [picture(1, (4, 8)), picture(2, (14, 6))], three_axes=True),
        request("t4", long, [picture(1, (0, 12))], three_axes=True),
        request("t5", long, three_axes=True),
    ]


@cache
def expected(build: Build) -> dict[str, tuple[list[int], str]]:
    """What the reference says to each, worked out once for all ways."""
    return {wanted.request_id: reference(wanted) for wanted in build()}


@pytest.mark.parametrize("build", [text_requests, one_picture_requests, several_picture_requests, three_axis_requests])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("way", ["alone", "batched", "retracted", "repeated"])
@pytest.mark.parametrize("make", [FakeRunner, LateRunner])
@pytest.mark.parametrize(
    ("drafts", "branches"), [(0, 0), (1, 0), (7, 0), (9, 2)], ids=["plain", "drafts-1", "drafts-7", "trees-9"]
)
def test_tokens_are_those_of_the_reference(
    make: type[FakeRunner], build: Build, prefix_cache: bool, chunk: int, way: str, drafts: int, branches: int
) -> None:
    requests = build()
    runner = make(num_slots=61 if way == "retracted" else 513)
    driver = Driver(runner, max_batched_tokens=chunk, prefix_cache=prefix_cache, vision_cache_tokens=17)
    if drafts:
        driver.draft(0.7, drafts, branches=branches).answers = {name: ids for name, (ids, _) in expected(build).items()}
    if way == "alone":
        for wanted in requests:
            driver.run(wanted)
    elif way == "repeated":
        driver.run(*requests)
        driver.told.clear()
        driver.run(*requests)
        assert any(told.usage.cached_tokens for told in driver.told.values()) == prefix_cache
    else:
        driver.submit(*requests)
        while driver.engine.has_work:
            driver.step()
            running = [sequence for sequence in driver.engine.scheduler.running if sequence.num_retracted < 2]
            if way == "retracted" and running and len(runner.steps) % 3 == 0:
                driver.engine.scheduler.retract(running[0])
                driver.engine.check()
        driver.finish()
    assert (way != "retracted") or driver.engine.stats().num_retracted
    accepted = driver.engine.speculator.accepted["replay"]
    assert accepted > 0 if drafts and chunk >= 16 else drafts or not accepted
    for wanted in requests:
        told = driver.told[wanted.request_id]
        assert (told.ids, told.reason) == expected(build)[wanted.request_id]


def test_a_sequence_of_a_chat_reuses_prompt_and_answer() -> None:
    driver = Driver()
    first = request("turn-1", TEXT * 3, [picture(1, (2, 8))], max_tokens=10)
    answer = driver.run(first)["turn-1"].ids
    second = request("turn-2", [*TEXT * 3, *answer, 1, 2], [picture(1, (2, 8))])
    told = driver.run(second)["turn-2"]
    assert told.usage.cached_tokens == len(TEXT * 3) + len(answer) - 1  # the last answer token was never computed
    assert told.ids == reference(second)[0]
    assert driver.runner.encoded == [1]
