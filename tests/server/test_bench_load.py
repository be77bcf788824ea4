"""`beholder bench load`: what clients send, and that what they saw is told, failures too."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from serving import Served

from server.bench import command
from server.bench.load import Level, Scenario, measure


@pytest.mark.parametrize("kind", command.KINDS)
def test_every_benchmark_says_what_it_measures(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([kind, "--help"])
    assert not ended.value.code
    assert f"usage: beholder bench {kind}" in capsys.readouterr().out
    assert command.main(["--help"]) == 0
    assert f"\n  {kind} " in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lod"]) == 2
    told = capsys.readouterr().err
    assert "'lod'" in told
    assert "load" in told


def pictures_of(messages: list[dict[str, object]]) -> list[str]:
    return [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def test_unique_pictures_are_all_different_and_the_same_for_the_same_seed() -> None:
    scenario = Scenario(image_size=(64, 48), images=2)
    sent = scenario.chains(3, seed=7)
    assert sent == scenario.chains(3, seed=7)
    assert [len(chain) for chain in sent] == [1, 1, 1]
    assert len({url for chain in sent for url in pictures_of(chain[0])}) == 6


def test_turns_ask_about_one_picture_in_a_conversation_that_grows() -> None:
    for chain in Scenario(reuse="turns", turns=3, image_size=(64, 48)).chains(2, seed=0):
        assert [len(messages) for messages in chain] == [1, 3, 5]
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(chain))
        assert len(pictures_of(chain[-1])) == 1


def test_a_camera_shows_one_scene_that_moves() -> None:
    frames = Scenario(reuse="camera", image_size=(64, 48)).chains(3, seed=0)
    assert len({pictures_of(chain[0])[0] for chain in frames}) == 3
    assert len({chain[0][0]["content"][-1]["text"] for chain in frames}) == 1


def test_clients_are_answered_by_a_server_and_refusals_are_counted(tiny_model: Path) -> None:
    scenario = Scenario(reuse="turns", turns=2, image_size=(80, 60), max_tokens=4)
    with Served(tiny_model, dtype="float32", max_running=8, kv_tokens=4096, api_key="secret") as server:
        one, two = asyncio.run(measure(server.url, scenario, [1, 2], 2, 0, api_key="secret"))
        (refused,) = asyncio.run(measure(server.url, scenario, [1], 1, 0, model="another", api_key="secret"))
    for level, requests in ((one, 4), (two, 8)):
        row = level.row()
        assert (row["requests"], row["failed"], level.num_tokens) == (requests, 0, requests * 4)
        assert row["tokens/s"] == pytest.approx(row["requests/s"] * 4)
        assert 0 < row["TTFT p50"] <= row["TTFT p99"]
    assert (refused.row()["requests"], refused.row()["failed"], refused.row()["TTFT p50"]) == (2, 2, None)
    assert "404" in refused.errors[0]


def test_figures_follow_from_what_was_seen() -> None:
    level = Level(2, elapsed_s=2.0, ttft_ms=[10.0, 30.0], itl_ms=[1.0, 3.0], num_tokens=100, errors=["broken"])
    row = level.row()
    assert json.loads(json.dumps(row)) == row
    assert (row["requests"], row["failed"]) == (3, 1)
    assert (row["requests/s"], row["tokens/s"]) == (1.0, 50.0)
    assert (row["TTFT p50"], row["ITL p50"]) == (20.0, 2.0)


@pytest.mark.parametrize("wrong", ["--clients 0", "--clients 1,x", "--rounds 0", "--image-size 7", "--reuse often"])
def test_options_that_make_no_sense_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["load", *wrong.split()])
    assert ended.value.code == 2
    assert wrong.split()[1].split(",")[-1] in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["load", "--base-url", "http://127.0.0.1:9", "--clients", "1"]) == 1
    assert capsys.readouterr().err.startswith("beholder: ")
