"""Draft models and heads on a simulated GPU: guesses in graphs are those that plain torch makes, and answers in float32
are what they are without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import FAMILIES

from engine.batch import RowSampling
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.sampling import CANDIDATES, is_filtered, sample
from engine.speculation.draft_times import FEW
from engine.speculation.drafter import ChainDrafter, DraftRow
from engine.speculation.lengths import Always
from preprocess.wire import EngineRequest, SamplingParams
from tests.engine.simulated_gpu import load_simulated, no_device, simulate
from tests.engine.speculation.test_model_sources import guesses_of
from tests.engine.speculation.test_same_text import Heard, every_kind, run, said_plainly
from tests.engine.test_gpu_guesses import (  # noqa: F401  the same tests, on the fixtures of the simulator
    EACH,
    GREEDY,
    LAYERS,
    RUNNING,
    draft_rows,
    exactly,
    prompts,
    rows_of_table,
    steps_of_all_kinds,
    test_an_engine_that_guesses_serves_every_request,
    test_graphs_of_guesses_compute_what_plain_torch_computes,
    test_rows_that_have_their_guesses_write_nowhere_else,
)
from tests.engine.test_simulated_drafts import _moved

pytestmark = no_device

DRAFTERS = [
    ("head", "qwen3_vl"),
    ("head of a part of the vocabulary", "smolvlm"),
    ("same model", "qwen3_vl"),
    ("another model", "smolvlm"),
]
DRAWS = [
    SamplingParams(max_tokens=30, temperature=0.0),
    SamplingParams(max_tokens=30, temperature=1.0, seed=4),
    SamplingParams(max_tokens=30, temperature=0.7, seed=5, top_k=20, top_p=0.8),
    SamplingParams(max_tokens=30, temperature=0.8, seed=6, top_k=30, min_p=0.05),
    SamplingParams(max_tokens=30, temperature=2.0, seed=7, top_k=2**31 - 1),
]


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, token_sizes=[64, 256])
        patch.setattr("engine.gpu.drafters.HEAD_DIMS", range(128))  # those of tiny models
        yield


def options_of(drafter: str, folder: Path, place: Path) -> dict[str, Any]:
    if drafter == "same model":
        return {"draft_model": str(folder)}
    if drafter == "another model":
        from tests.engine.speculation.test_model_sources import another_model

        return {"draft_model": str(another_model(folder, place / "another"))}
    part = 60 if "part" in drafter else None
    return {"draft_head": str(tiny_head(place / f"head{part}", folder, draft_vocab_size=part, fields=LAYERS))}


@pytest.fixture(scope="module", params=DRAFTERS, ids=" of ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    drafter, family = request.param
    return drafter, family


@pytest.fixture(scope="module")
def folder(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[case[1]](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talker(case: tuple[str, str], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = options_of(case[0], folder, tmp_path_factory.mktemp("drafters"))
    loaded = load_simulated(folder, max_rows=RUNNING, kv_tokens=2500, **options)
    loaded.warm_up()
    assert isinstance(loaded.drafter, ChainDrafter)
    assert loaded.drafter.draws(GREEDY)
    loaded.exact = exactly(folder, **options)  # type: ignore[attr-defined]
    return loaded


def one_by_one(drafter: Any, rows: list[DraftRow], lengths: list[int], sampling: list[RowSampling]) -> list[list[int]]:
    """What `guess` should give, kernel by kernel."""
    found: list[list[int]] = [[] for _ in rows]
    logits = drafter.forward(rows, guessed=False)
    asked = list(range(len(rows)))
    while asked:
        how = [
            replace(sampling[row], output_index=sampling[row].output_index + len(found[row]))
            if not found[row]
            else replace(sampling[row], output_index=sampling[row].output_index + len(found[row]), allowed=None)
            for row in asked
        ]
        for row, token in zip(asked, sample(logits, how), strict=True):
            found[row].append(token.token_id)
        asked = [row for row in asked if len(found[row]) < lengths[row]]
        ends = [rows[row].start + len(rows[row].token_ids) - 1 + len(found[row]) for row in asked]
        further = [
            DraftRow(rows[row].table_row, end, found[row][-1:], position_delta=rows[row].position_delta)
            for row, end in zip(asked, ends, strict=True)
        ]
        if further:
            logits = drafter.forward(further, guessed=True)
    return found


@pytest.mark.parametrize("missing", [None, 1, 5, 16])
def test_guesses_in_graphs_are_those_of_plain_torch(talker: Any, missing: int | None) -> None:
    """Alone and together, whatever was missing before, however they are drawn; and nothing but the rows' own entries
    is written.
    """
    rows_of_table(talker)
    drafter = talker.drafter
    for count in (1, 3, RUNNING):
        texts = prompts(talker, count)
        talker.step(texts)
        lengths = [(5, 1, 15, 2, 3, 7)[index] for index in range(count)]
        sampling = [RowSampling(DRAWS[index % len(DRAWS)], 3 + index) for index in range(count)]
        whole = draft_rows(talker, texts)
        drafter.forward([replace(row, asks=False) for row in whole], guessed=False)
        rows = draft_rows(talker, texts, missing)
        expected = one_by_one(drafter, rows, lengths, sampling)
        before = drafter.pool.clone()
        drafter.forward([replace(row, asks=False) for row in whole], guessed=False)
        assert drafter.guess(rows, lengths, sampling) == expected
        changed = (drafter.pool != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
        torch.testing.assert_close(drafter.pool[:, 1:], before[:, 1:], atol=1e-4, rtol=1e-4)
        own = {
            1 + EACH * row.table_row + at
            for row, length in zip(rows, lengths, strict=True)
            for at in range(row.start + len(row.token_ids) + length - 1)
        }
        assert set(changed) <= own | {0}


@pytest.mark.parametrize("missing", [None, 3])
@pytest.mark.parametrize("drafter", ["head", "same model"])
def test_more_sequences_than_a_graph_has_are_several_calls(
    drafter: str, missing: int | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.guess_graphs.MOST_ROWS", 4)
    monkeypatch.setattr("engine.gpu.guess_graphs.MOST_TOKENS", 32)
    runner = load_simulated(tiny_model, max_rows=RUNNING, **options_of(drafter, tiny_model, tmp_path))
    rows_of_table(runner)
    assert runner._guess_graphs is not None
    runner._guess_graphs.capture()
    texts = prompts(runner, RUNNING)
    runner.step(texts)
    lengths = [5, 1, 15, 2, 3, 7]
    sampling = [RowSampling(DRAWS[index % len(DRAWS)], 3 + index) for index in range(RUNNING)]
    whole = draft_rows(runner, texts)
    found = []
    for guess in (one_by_one, runner.drafter.guess):  # type: ignore[union-attr]
        runner.drafter.forward([replace(row, asks=False) for row in whole], guessed=False)  # type: ignore[union-attr]
        given = (runner.drafter,) if guess is one_by_one else ()
        found.append(guess(*given, draft_rows(runner, texts, missing), lengths, sampling))
    assert found[0] == found[1]


def test_a_first_guess_is_one_that_may_come(talker: Any) -> None:
    """A grammar's mask is of the target's ids, whatever the drafter knows; the row beside it has none."""
    rows_of_table(talker)
    drafter = talker.drafter
    texts = prompts(talker, 2)
    talker.step(texts)
    rows = draft_rows(talker, texts)
    logits = drafter.forward(rows, guessed=False)
    known = logits[0].isfinite().nonzero().flatten()
    allowed = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:9]]
    bits = np.zeros(32 * -(-talker.vocab_size // 32), np.uint8)
    bits[allowed.numpy()] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    how = replace(GREEDY, allowed=SimpleNamespace(words=lambda: words))  # type: ignore[arg-type]
    assert drafter.guess(rows, [3, 3], [how, GREEDY]) == one_by_one(drafter, rows, [3, 3], [how, GREEDY])
    assert drafter.guess(rows, [1, 1], [how, GREEDY])[0][0] in allowed.tolist()


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "qwen3_vl_moe"])
def test_a_head_reads_what_plain_torch_would_have_told_it(family: str, tmp_path: Path) -> None:
    """In prompts with pictures, in pieces, in steps of one token, in those that check drafts; in graphs and without."""
    folder = FAMILIES[family](tmp_path / "model")
    options = {"draft_head": str(tiny_head(tmp_path / "head", folder, fields=LAYERS))}
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", threads=1, kv_tokens=4000, max_running=RUNNING, **options
    )
    plain = load_runner(config)
    assert isinstance(plain, TorchRunner)
    for is_captured in (False, True):
        runner = load_simulated(folder, max_rows=RUNNING, **options)
        for own in (plain, runner):
            rows_of_table(own)
        if is_captured:
            assert runner.graphs is not None
            runner.graphs.capture()
        told, expected = runner._told, plain._told
        assert told is not None
        assert expected is not None
        steps = steps_of_all_kinds(runner)
        for own in (plain, runner):
            own._told.features.zero_()  # type: ignore[union-attr]
            own._told.seen.zero_()  # type: ignore[union-attr]
            for rows in steps:
                own.step(rows)
        torch.testing.assert_close(told.features[1:], expected.features[1:], atol=1e-4, rtol=1e-4)
        vision = expected.seen[1:].abs().sum(1) > 0
        assert int(vision.sum()) == sum(part.count for row in steps[0] + steps[1] for part in row.vision) > 0
        assert torch.equal(told.seen[1:][vision], expected.seen[1:][vision])


@pytest.fixture(scope="module")
def requests(talker: Any) -> list[EngineRequest]:
    return [_moved(one) for one in every_kind(talker)]


@pytest.fixture(scope="module")
def plain(talker: Any, requests: list[EngineRequest], folder: Path) -> dict[str, Heard]:
    return said_plainly(talker, folder, requests)


@pytest.fixture
def engine_of(talker: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def make(length: int, **options: Any) -> Engine:
        monkeypatch.setattr(talker, "drafts_beside_prompts", True)  # it does not ask for them, but takes them
        given = {"check": True, "max_running": RUNNING, "speculation": talker.drafter.kind.source} | options
        engine = Engine(EngineConfig(str(folder), **given), talker)
        engine.speculator.controller = Always(length)
        return engine

    return make


@pytest.mark.parametrize(("length", "retract_every"), [(2, 5), (15, 0)])
def test_no_drafter_changes_anything(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    length: int,
    retract_every: int,
) -> None:
    engine = engine_of(length, max_batched_tokens=64 if length == 2 else 512)
    heard = run(engine, requests, retract_every=retract_every)
    assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
    assert sum(engine.speculator.drafted.values()) > 40
    assert engine.speculator.model is not None
    assert not engine.speculator.model.is_broken


@pytest.mark.parametrize("penalties", [(1.5,), (1.0,), (1.5, 1.0)])
def test_what_was_missed_is_caught_up_with_before_anybody_asks(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    penalties: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the guesses are drawn that follow: attention over all that a head may catch up with takes memory."""
    engine = engine_of(3)
    wanted = [
        msgspec.structs.replace(
            one, sampling=msgspec.structs.replace(one.sampling, repetition_penalty=penalties[index % len(penalties)])
        )
        for index, one in enumerate(requests[:RUNNING])
    ]
    drafter = engine.speculator.model._drafter  # type: ignore[union-attr]
    forward, asked, before = drafter.forward, [0.0], [0]

    def watched(rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        asked.append(sum(len(row.token_ids) for row in rows if row.asks) / len(rows))
        before.append(sum(len(row.token_ids) for row in rows if not row.asks))
        return forward(rows, guessed=guessed)

    monkeypatch.setattr(drafter, "forward", watched)
    run(engine, wanted)
    assert max(asked) <= 1 + FEW
    assert max(before) > FEW
    assert engine.speculator.model is not None
    assert not engine.speculator.model.is_broken


def test_all_sources_together_change_nothing(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard]
) -> None:
    engine = engine_of(7, speculation="auto")
    for _ in range(2):
        heard = run(engine, requests)
        assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []


def test_guesses_hang_on_the_text_alone(engine_of: Callable[..., Engine], requests: list[EngineRequest]) -> None:
    """Whoever else is served, and however they are drawn: were rows, slots or the embeddings of vision tokens mixed up,
    those of a batch would differ.
    """
    wanted = requests[:RUNNING]
    together = engine_of(3)
    guessed = guesses_of(together)
    run(together, wanted)
    num_compared = 0
    for one in wanted:
        engine = engine_of(3)
        alone = guesses_of(engine)
        run(engine, [one])
        common = alone.keys() & guessed.keys()  # nobody drafts while others' prompts are computed
        assert [key for key in common if alone[key] != guessed[key]] == []
        num_compared += len(common)
    assert num_compared > 20


def test_the_model_itself_is_always_right(
    case: tuple[str, str], engine_of: Callable[..., Engine], requests: list[EngineRequest]
) -> None:
    """Were an entry missing, another text's, or drawn otherwise, it would be wrong sometimes."""
    if case[0] != "same model":
        pytest.skip("another model is not")
    wanted = [one for one in requests if not one.media and not one.sampling.grammar and _is_bounded(one.sampling)]
    heard = run(engine_of(3), wanted)
    assert [name for name, own in heard.items() if own.predictions[1]] == []
    assert sum(own.predictions[0] for own in heard.values()) > 20


def _is_bounded(params: SamplingParams) -> bool:
    """Whether guesses are drawn exactly as the model draws: without filters, or among few ids."""
    return params.temperature == 0.0 or not is_filtered(params) or 0 < params.top_k <= CANDIDATES


def test_without_memory_for_graphs_guesses_are_made_without(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model
    options = options_of("head", folder, tmp_path)
    runner = load_simulated(folder, max_rows=2, kv_tokens=500, **options)
    drafter = runner.drafter
    assert isinstance(drafter, ChainDrafter)
    from engine.gpu.graph import Graph

    capture, calls = Graph.__init__, itertools.count()

    def short(graph: Any, run: Any, memory: Any) -> None:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        capture(graph, run, memory)

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "__init__", short)
        assert runner._guess_graphs is not None
        runner._guess_graphs.capture()
    assert "guesses are made without graphs" in caplog.text
    assert not drafter.draws(GREEDY)
    runner._guess_graphs.capture()
    assert drafter.draws(GREEDY)
