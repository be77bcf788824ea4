"""Drafts on a simulated GPU: with them a float32 model says what it says without, token for token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.batch import FUTURE_TOKEN, Row
from engine.config import EngineConfig
from engine.core import Engine
from engine.sequence import has_penalties
from engine.speculation.lengths import Always
from engine.speculation.replay import Replay
from preprocess.wire import EngineRequest
from tests.engine.simulated_gpu import load_simulated, no_device
from tests.engine.speculation import test_same_text as same_text
from tests.engine.speculation.random_trees import RandomTrees
from tests.engine.speculation.test_same_text import Heard, answers, every_kind, run, said_plainly
from tests.engine.test_gpu_drafts import (  # noqa: F401  the same tests, on the fixtures of the simulator
    exact,
    test_a_sequence_shorter_than_a_graph_is_wide_takes_it_all_the_same,
    test_a_size_is_captured_when_it_first_comes,
    test_an_engine_with_drafts_serves_every_request,
    test_attention_may_read_a_wide_row_as_several,
    test_drafts_beside_prompts_and_many_plain_rows,
    test_each_token_is_drawn_as_its_place_in_the_answer_asks,
    test_graphs_compute_trees,
    test_graphs_of_all_sizes_compute_what_kernels_compute,
    test_sizes_are_captured_before_they_come,
    test_trees_that_no_graph_has_room_for_run_without_one,
    test_when_memory_does_not_do_no_more_sizes_are_captured,
    test_without_memory_for_a_graph_steps_run_without_it,
)
from tests.engine.test_simulated_gpu import folder, runner, served, simulated  # noqa: F401

pytestmark = no_device

RUNNING = 6


@pytest.fixture(scope="module")
def talker(folder: Path) -> Any:  # noqa: F811
    """A runner for answers that are compared."""
    loaded = load_simulated(folder, max_rows=RUNNING, kv_tokens=2500)
    loaded.warm_up()
    return loaded


def _moved(request: EngineRequest) -> EngineRequest:
    """With rotary positions of its own, so that its answer's are not those of the text; alike where prompts are."""
    tokens = np.arange(len(request.prompt_ids) // 8)
    positions = np.stack([tokens // 2, tokens // 3, 2 * tokens // 3]).astype("<i4")
    return msgspec.structs.replace(request, positions=positions.tobytes())


@pytest.fixture(scope="module")
def requests(talker: Any) -> list[EngineRequest]:
    return [_moved(one) for one in every_kind(talker)]


@pytest.fixture(scope="module")
def plain(talker: Any, requests: list[EngineRequest], folder: Path) -> dict[str, Heard]:  # noqa: F811
    return said_plainly(talker, folder, requests)


@pytest.fixture
def engine_of(talker: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:  # noqa: F811
    def make(length: int = 7, script: Any = None, *, shape: str = "chain", **options: Any) -> Engine:
        config = EngineConfig(str(folder), **{"check": True, "max_running": RUNNING} | options)
        monkeypatch.setattr(talker, "drafts_beside_prompts", True)  # it does not ask for them, but takes them
        engine = Engine(config, talker)
        engine.speculator.controller = Always(length)
        if script is not None:
            branches = 3 if shape == "branches" else 0
            engine.speculator.sources = [Replay(script, 0.8, talker.vocab_size, branches=branches)]
            if shape == "any tree":
                RandomTrees(script, 0.8, talker.vocab_size, length).guide(engine)
        return engine

    return make


@pytest.mark.parametrize("retract_every", [0, 5], ids=["straight", "retracted"])
@pytest.mark.parametrize("chunk", [24, 512])
@pytest.mark.parametrize(
    ("length", "shape"), [(1, "chain"), (7, "chain"), (15, "chain"), (9, "branches"), (15, "any tree")]
)
def test_scripted_drafts_change_nothing(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    chunk: int,
    retract_every: int,
    length: int,
    shape: str,
) -> None:
    same_text.test_scripted_drafts_change_nothing(
        engine_of, requests, plain, bool(length % 3), chunk, retract_every, length, shape
    )


@pytest.mark.parametrize("mode", ["auto", "ngram", "echo", "grammar", "habit"])
def test_every_source_changes_nothing(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard], mode: str
) -> None:
    engine = engine_of(15, speculation=mode)
    for _ in range(2):  # the second time the session has answered before
        heard = run(engine, requests)
        assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
    assert sum(engine.speculator.drafted.values()) > 0


def test_acceptance_in_a_batch_equals_acceptance_alone(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard]
) -> None:
    same_text.test_acceptance_in_a_batch_equals_acceptance_alone(engine_of, requests, plain, None)


def test_an_answer_that_is_said_again_takes_few_steps(
    engine_of: Callable[..., Engine], requests: list[EngineRequest]
) -> None:
    """Though steps run ahead of results: the first token of an answer that may repeat another is waited for."""
    engine = engine_of(15, speculation="echo")
    first = run(engine, requests[:1])["r0"]
    again = run(engine, requests[:1])["r0"]
    assert again.ids == first.ids
    assert len(first.ids) == first.num_events == 24
    assert again.num_events == 3  # one for the prompt, sixteen tokens, and the rest


def test_abort_and_stop_in_the_middle_of_a_verifying_step(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    talker: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(7, answers(plain))
    launch = talker.launch

    def interrupted(rows: Ordered[Row]) -> Any:
        if any(row.drafted for row in rows):
            engine.abort("r0")
            engine.stop("r2", 3)
        return launch(rows)

    monkeypatch.setattr(talker, "launch", interrupted)
    heard = run(engine, requests[:5])
    assert (heard["r0"].end, heard["r2"].end) == (("abort", None), ("stop", None))
    for name in ("r0", "r2"):
        assert heard[name].ids == plain[name].ids[: len(heard[name].ids)]
    assert all(heard[name].same_as(plain[name]) for name in ("r1", "r3", "r4"))
    engine.check()
    assert engine.stats().kv_slots_used == 0


@pytest.mark.parametrize("shape", ["chain", "branches", "any tree"])
def test_what_verified_steps_computed_serves_the_next_request(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard], shape: str
) -> None:
    same_text.test_what_verified_steps_computed_serves_the_next_request(engine_of, requests, plain, shape)


def test_steps_run_ahead_again_after_drafts(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    talker: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that the device takes from the future is the last that stood, whatever was checked in between."""
    checked: set[int] = set()
    ahead: set[int] = set()
    launch = talker.launch

    def watched(rows: Ordered[Row]) -> Any:
        for row in rows:
            (checked if row.drafted else ahead if row.token_ids[0] == FUTURE_TOKEN else set()).add(row.table_row)
        return launch(rows)

    monkeypatch.setattr(talker, "launch", watched)
    wanted = [one for one in requests if not one.sampling.grammar and not has_penalties(one.sampling)][:4]
    engine = engine_of(3, {name: heard.ids[:9] for name, heard in plain.items()})  # nobody guesses what comes later
    heard = run(engine, wanted)
    assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
    assert sum(engine.speculator.accepted.values()) > 4
    assert checked & ahead
