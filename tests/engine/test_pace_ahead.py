"""New pictures beside running streams on a GPU, by the figures of an H200: steady streams, first words soon, and no
answer a second less.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.timed_device import (
    MS,
    QWEN2_5_VL_3B,
    QWEN3_VL_2B,
    QWEN3_VL_8B,
    QWEN3_VL_8B_BESIDE,
    Server,
    Shape,
    closed_loop,
    interference,
)


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.2])
def test_pictures_ten_a_second_do_not_make_32_streams_of_an_8b_model_stutter(slower: float) -> None:
    """On a device as measured, and on one that is slower at pictures and prompts."""
    times = {name: getattr(QWEN3_VL_8B, name) * slower for name in ("token_s", "chunk_s", "picture_s")}
    seen = interference(Server.of(dataclasses.replace(QWEN3_VL_8B, **times)))
    assert seen.p99 <= 1.5
    assert seen.ttft_p50_ms <= 130
    assert seen.ttft_p90_ms <= 140


@pytest.mark.parametrize("chunks_ms", [0.0, 0.4, 0.8])
def test_nor_where_chunks_are_dear_and_steps_are_noisy(chunks_ms: float) -> None:
    """For a second: streams' contexts grow all the while."""
    seen = interference(Server.of(dataclasses.replace(QWEN3_VL_8B, chunks_s=chunks_ms * MS), noise=0.01), seconds=1)
    assert seen.p99 <= 1.5
    assert seen.ttft_p50_ms <= 130


@pytest.mark.parametrize("slower", [1.0, 1.05, 1.1])
def test_nor_where_so_much_comes_that_no_step_decodes_alone(slower: float) -> None:
    """Texts grow meanwhile: what that takes is not taken to be the pictures', of which steps then would hold less."""
    seen = interference(Server.of(QWEN3_VL_8B_BESIDE.slower(slower)))
    assert seen.p99 <= 1.5
    assert seen.ttft_p50_ms <= 130
    assert seen.ttft_p90_ms <= 130


@pytest.mark.parametrize(("slower", "p99"), [(1.4, 1.5), (1.5, 1.5), (1.6, 2.5), (1.8, 4.0)])
def test_a_device_that_falls_behind_takes_as_much_more_as_it_must_within_the_target_for_first_words(
    slower: float, p99: float
) -> None:
    """Two and more wait there most of the time."""
    times = {name: getattr(QWEN3_VL_8B, name) * slower for name in ("token_s", "chunk_s", "picture_s")}
    seen = interference(Server.of(dataclasses.replace(QWEN3_VL_8B, **times)))
    assert seen.p99 <= p99
    assert seen.ttft_p90_ms <= 300


def test_as_they_come_they_do() -> None:
    seen = interference(Server.of(QWEN3_VL_8B, ttft_target_ms=0))
    assert seen.p99 > 4


@pytest.mark.parametrize(
    ("shape", "clients"), [(QWEN3_VL_2B, 8), (QWEN3_VL_2B, 64), (QWEN3_VL_8B, 8), (QWEN3_VL_8B, 64)]
)
def test_clients_that_ask_again_and_again_are_answered_as_often_as_without_a_target(shape: Shape, clients: int) -> None:
    kept, given_up = closed_loop(Server.of(shape), clients), closed_loop(Server.of(shape, ttft_target_ms=0), clients)
    assert kept.requests_per_s >= 0.985 * given_up.requests_per_s
    assert kept.ttft_p50_ms <= 1.45 * given_up.ttft_p50_ms


@pytest.mark.parametrize("media_s", [(0.0, 0.0), (0.006, 0.046)])
@pytest.mark.parametrize(("shape", "more"), [(QWEN3_VL_2B, 1.05), (QWEN2_5_VL_3B, 1.06), (QWEN3_VL_8B, 1.09)])
def test_clients_that_would_ask_together_for_good_are_answered_more_often_where_prompts_are_spread(
    shape: Shape, more: float, media_s: tuple[float, float]
) -> None:
    """However long their pictures take until they come, each as long as the last or not."""
    kept = closed_loop(Server.of(shape), 64, media_s=media_s)
    given_up = closed_loop(Server.of(shape, ttft_target_ms=0), 64, media_s=media_s)
    assert kept.requests_per_s >= more * given_up.requests_per_s
    assert kept.ttft_p50_ms <= 1.1 * given_up.ttft_p50_ms
