"""Drafts on a GPU: graphs of steps that check them compute what kernels compute, size by size, and an engine says with
them what it says without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

from engine.batch import Row, RowSampling
from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import TorchRunner
from engine.sampling import sample
from engine.speculation.lengths import Always
from engine.speculation.replay import Replay
from engine.speculation.tree import lineages
from preprocess.wire import SamplingParams
from tests.engine.gpu import needs_gpu
from tests.engine.test_gpu_runner import (  # noqa: F401
    GREEDY,
    ROWS,
    _answer,
    _error,
    _ids,
    _load,
    _requests,
    folder,
    runner,
    served,
)

pytestmark = needs_gpu

PROMPT = 20


def _start(row: int) -> int:
    return PROMPT + 9 * row


def _checked(row: int, num_drafts: int, sampling: RowSampling = GREEDY, start: int | None = None) -> Row:
    """A decode row with guesses."""
    token_ids = _ids(50 + row, 1 + num_drafts)
    drafted = [
        RowSampling(sampling.params, sampling.output_index + 1 + index, (), token_ids[1 : 2 + index])
        for index in range(num_drafts)
    ]
    first = _start(row) if start is None else start
    return Row(row, first, token_ids, sampling, position_delta=7 * (row % 3), drafted=drafted)


def _asked(rows: Sequence[Row]) -> list[RowSampling]:
    """How each of the tokens that a step samples is drawn."""
    return [how for row in rows if row.sampling is not None for how in (row.sampling, *row.drafted)]


def _branching(row: Row, shapes: random.Random) -> Row:
    """The same guesses as a tree."""
    assert row.sampling is not None
    guesses, how = row.token_ids[1:], row.sampling
    straight = shapes.random()
    parents = [index if shapes.random() < straight else shapes.randint(0, index) for index in range(len(guesses))]
    ways = lineages(guesses, parents)
    drafted = [RowSampling(how.params, how.output_index + len(way), (), way) for way in ways]
    return replace(row, drafted=drafted, parents=parents)


def _sizes(most: int, width: int) -> list[int]:
    from engine.gpu.step_sizes import MOST_CHECKED, row_sizes

    return [size for size in row_sizes(most) if size * width <= MOST_CHECKED]


class Exact:
    """The same model in float32 on the CPU, beside what graphs and kernels compute."""

    def __init__(self, plain: TorchRunner) -> None:
        self._runner = plain
        self._computed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def begin(self, table: torch.Tensor, prompts: Sequence[Row]) -> None:
        """Slots as in `table`, and what stands in them."""
        self._runner.slot_table.copy_(table)
        self._runner.step(prompts)
        self._computed.clear()

    def beside(self, replayed: torch.Tensor, eager: torch.Tensor, rows: Sequence[Row]) -> None:
        """Logits of a step."""
        self._computed.append((replayed.cpu(), eager.cpu(), self.right(rows)))

    def right(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits of a step."""
        with torch.inference_mode():
            return self._runner.logits(rows)

    def check(self) -> None:
        """Both round to bfloat16 in places of their own, so graphs are compared with what is right: over all steps they
        are not farther from it than kernels are.
        """
        replayed, eager, right = (torch.cat(part) for part in zip(*self._computed, strict=True))
        assert _error(replayed, right) < max(1.3 * _error(eager, right), 1e-4)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Exact:  # noqa: F811
    return Exact(_load(folder, "cpu", "float32"))


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_graphs_of_all_sizes_compute_what_kernels_compute(runner: Any, exact: Exact, width: int) -> None:  # noqa: F811
    """With fewer drafts in some rows, and none in others; nothing is written but the rows' own slots."""
    prompts = [Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(ROWS)]
    runner.step(prompts)
    exact.begin(runner.slot_table, prompts)
    for size in _sizes(ROWS, width):
        for count in {size, max(1, size - 1)}:
            drafts = [(width - 1 - 3 * row) % width for row in range(count)]
            rows = [_checked(row, number) for row, number in enumerate(drafts)]
            assert runner.verify_graphs.size_of(rows) is not None
            before, future = runner.kv_pool.clone(), runner._future.clone()
            with torch.inference_mode():
                result = runner.verify_graphs.run(rows)
                replayed, drawn = result.logits[result.picks].clone(), result.tokens[result.picks].clone()
            written = runner.kv_pool.clone()
            changed = (written != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
            own = {1 + 300 * row.table_row + row.start + at for row in rows for at in range(len(row.token_ids))}
            assert set(changed) <= own | {0}
            with torch.inference_mode():
                eager = runner.logits(rows)
            exact.beside(replayed, eager, rows)
            assert _error(written[:, 1:], runner.kv_pool[:, 1:]) < 1e-2
            assert torch.equal(drawn, replayed.max(-1).indices)
            first = 0
            for row, number in enumerate(drafts):  # what stands last of several only the host can say
                assert runner._future[row] == (future[row] if number else drawn[first]), (row, number)
                first += 1 + number
    exact.check()


class Trees:
    """Steps with trees, computed in some way, beside the same guesses as chains, which are known to be right."""

    def __init__(self, exact: Exact, logits: Callable[[Sequence[Row]], torch.Tensor], seed: int) -> None:
        self._exact = exact
        self._logits = logits
        self._shapes = random.Random(seed)
        self._found: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}

    def compute(self, chains: Sequence[Row]) -> None:
        """Steps of these rows, and with three of four of those that have guesses as trees, in any order."""
        trees = [_branching(row, self._shapes) if row.drafted and at % 4 != 3 else row for at, row in enumerate(chains)]
        self._shapes.shuffle(trees)
        assert any(row.parents is not None for row in trees)
        for has_trees, rows in ((False, chains), (True, trees)):
            with torch.inference_mode():
                found = self._logits(rows).cpu()
            self._found[has_trees].append((found, self._exact.right(rows)))

    def check(self) -> None:
        """Those with trees are no farther from float32 than those with chains, but for what chance does."""
        errors = [_error(*(torch.cat(part) for part in zip(*found, strict=True))) for found in self._found.values()]
        assert errors[1] < max(1.5 * errors[0], 1e-4)


@pytest.mark.parametrize("queries", [2, 16])
def test_graphs_compute_trees(runner: Any, exact: Exact, monkeypatch: pytest.MonkeyPatch, queries: int) -> None:  # noqa: F811
    """Of any shape, beside chains and plain rows, at rotary positions that are not those of their slots; and where
    attention reads a row as several.
    """
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)
    monkeypatch.setattr(runner._attention.drafting, "most_queries", queries)

    def replayed(rows: Sequence[Row]) -> torch.Tensor:
        result = fresh.run(rows)
        assert result is not None
        return result.logits[result.picks]

    prompts = [Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(ROWS)]
    runner.step(prompts)
    exact.begin(runner.slot_table, prompts)
    trees = Trees(exact, replayed, queries)
    for width in (4, 16):
        for count in (1, 2, 5, ROWS):
            trees.compute([_checked(row, (width - 1 - 3 * row) % width) for row in range(count)])
    trees.check()


def test_trees_that_no_graph_has_room_for_run_without_one(
    runner: Any,  # noqa: F811
    exact: Exact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several launches of attention, beside chains, plain rows and prompts, in any order of the rows."""
    monkeypatch.setattr("engine.gpu.verify_graphs.MOST_CHECKED", 16)
    monkeypatch.setattr("engine.gpu.tree_parts.MOST_CHECKED", 48)
    prompts = [Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(ROWS - 1)]
    runner.step(prompts)
    exact.begin(runner.slot_table, prompts)
    rows = [
        *(_checked(row, 9 + row) for row in range(5)),
        Row(6, _start(6), [100], GREEDY),
        _checked(7, 2),
        _checked(8, 15),
        Row(ROWS - 1, 0, _ids(9, 30), GREEDY),
    ]
    assert runner.verify_graphs.size_of(rows) is None
    trees = Trees(exact, runner.logits, 5)
    for _ in range(4):
        trees.compute(rows)
    trees.check()
    shapes = random.Random(1)
    drawn = [_branching(row, shapes) if row.drafted else row for row in rows]
    with torch.inference_mode():
        expected = sample(runner.logits(drawn), _asked(drawn))
    assert [token.token_id for token in runner.step(drawn)] == [token.token_id for token in expected]


def test_drafts_beside_prompts_and_many_plain_rows(runner: Any) -> None:  # noqa: F811
    """In two replays, in any order of the rows; rows come out as kernel by kernel."""
    runner.step([Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(ROWS)])
    rows = [
        *(Row(row, _start(row), [100 + row], GREEDY) for row in range(3, ROWS - 2)),
        _checked(0, 15),
        Row(ROWS - 1, 0, _ids(9, 30), GREEDY),
        _checked(1, 2),
        Row(ROWS - 2, 0, _ids(8, 9), None),
    ]
    wanted = _asked(rows)
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        with torch.inference_mode():
            eager = runner.logits(rows).max(-1)
            second = runner.logits(rows).topk(2).values
        sure = (second[:, 0] - second[:, 1] > 0.05).tolist()
        found = [token.token_id for token in runner.step(rows)]
        assert len(found) == len(wanted)
        expected = eager.indices.tolist()
        assert [a for a, is_sure in zip(found, sure, strict=True) if is_sure] == [
            b for b, is_sure in zip(expected, sure, strict=True) if is_sure
        ]


ODD = [
    SamplingParams(max_tokens=30, temperature=1.0, seed=4),
    SamplingParams(max_tokens=30, temperature=0.7, seed=5, top_k=20, top_p=0.8),
    SamplingParams(max_tokens=30, temperature=0.7, seed=5, top_p=0.8, min_p=0.01),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(max_tokens=30, temperature=0.0, logprobs=3),
]


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
def test_each_token_is_drawn_as_its_place_in_the_answer_asks(runner: Any, is_tree: bool) -> None:  # noqa: F811
    """From the step's own logits: whatever way of drawing, each draft has its own noise and its own penalties."""
    runner.step([Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(ROWS)])
    rows = [_checked(row, (3, 0, 5, 7, 2)[row], RowSampling(params, 11)) for row, params in enumerate(ODD)]
    if is_tree:
        shapes = random.Random(7)
        rows = [_branching(row, shapes) if row.drafted else row for row in rows]
    with torch.inference_mode():
        result = runner.verify_graphs.run(rows)
        logits = result.logits[result.picks].clone()
    wanted = _asked(rows)
    assert [token.token_id for token in runner.step(rows)] == [token.token_id for token in sample(logits, wanted)]


def test_a_sequence_shorter_than_a_graph_is_wide_takes_it_all_the_same(runner: Any, exact: Exact) -> None:  # noqa: F811
    prompt = Row(0, 0, _ids(1, 3), GREEDY)
    runner.step([prompt])
    exact.begin(runner.slot_table, [prompt])
    row = _checked(0, 9, start=3)
    assert runner.verify_graphs.size_of([row]) == (1, 16)
    with torch.inference_mode():
        eager = runner.logits([row])
        result = runner.verify_graphs.run([row])
        replayed = result.logits[result.picks].clone()
    exact.beside(replayed, eager, [row])
    exact.check()
    assert [token.token_id for token in runner.step([row])] == replayed.max(-1).indices.tolist()


def test_a_size_is_captured_when_it_first_comes(runner: Any) -> None:  # noqa: F811
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)
    assert fresh._buffers is None
    assert not fresh._captured
    runner.step([Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(3)])
    for is_first in (True, False):
        result = fresh.run([_checked(row, 2) for row in range(3)])
        assert result is not None
        assert result.is_first is is_first
        assert list(fresh._captured) == [(3, 4)]


def test_attention_may_read_a_wide_row_as_several(
    runner: Any,  # noqa: F811
    exact: Exact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where registers do not do for all its queries; some of the several are padding alone."""
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)
    monkeypatch.setattr(runner._attention.drafting, "most_queries", 2)
    prompts = [Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(4)]
    runner.step(prompts)
    exact.begin(runner.slot_table, prompts)
    for drafts in ([7, 0, 3], [15, 2, 8, 0], [1]):
        rows = [_checked(row, number) for row, number in enumerate(drafts)]
        with torch.inference_mode():
            result = fresh.run(rows)
            assert result is not None
            replayed = result.logits[result.picks].clone()
            exact.beside(replayed, runner.logits(rows), rows)
    exact.check()


def test_sizes_are_captured_before_they_come(runner: Any) -> None:  # noqa: F811
    """Fewest tokens first, and they are the graphs that steps then take."""
    from engine.gpu.step_sizes import checked_ahead
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)
    runner.step([Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(3)])
    rows = [_checked(row, 2) for row in range(3)]
    first = fresh.run(rows)
    assert first is not None
    assert first.is_first
    while fresh.capture_next():
        pass
    expected = checked_ahead(ROWS)
    assert list(fresh._captured) == [(3, 4), *(size for size in expected if size != (3, 4))]
    tokens = [rows * width for rows, width in expected]
    assert tokens == sorted(tokens)
    for count in (1, 3, 4):
        for width in (2, 4, 8, 16):
            again = fresh.run([_checked(row, width - 1) for row in range(count)])
            assert again is not None
            assert not again.is_first


def test_when_memory_does_not_do_no_more_sizes_are_captured(
    runner: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)
    assert fresh.capture_next()

    def lacking(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("engine.gpu.verify_graphs.Graph", lacking)
    for _ in range(2):
        assert not fresh.capture_next()
    assert list(fresh._captured.values())[1:] == [None]


def test_without_memory_for_a_graph_steps_run_without_it(
    runner: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.gpu.verify_graphs import VerifyGraphs

    fresh = VerifyGraphs(runner._decoder, runner._attention, runner._future, runner.graphs.memory)

    def lacking(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("engine.gpu.verify_graphs.Graph", lacking)
    monkeypatch.setattr(runner, "verify_graphs", fresh)
    runner.step([Row(0, 0, _ids(1, PROMPT), GREEDY)])
    chain = _checked(0, 2, start=PROMPT)
    for row in (chain, _branching(_checked(0, 7, start=PROMPT), random.Random(3))):
        with torch.inference_mode():
            expected = runner.logits([row]).max(-1).indices.tolist()
        assert [token.token_id for token in runner.step([row])] == expected


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_in_float32_torch_checks_chains_and_trees_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](tmp_path)
    found = []
    for device in ("cuda", "cpu"):
        loaded = _load(model, device, "float32")
        loaded.step([Row(row, 0, _ids(row, _start(row)), GREEDY) for row in range(4)])
        tree = _checked(2, 5)
        rows = [
            _checked(0, 3),
            Row(1, _start(1), [101], GREEDY),
            replace(tree, parents=(0, 0, 1, 2, 1)),
            _checked(3, 7),
        ]
        found.append([token.token_id for token in loaded.step(rows)])
    assert found[0] == found[1]
    assert len(found[0]) == 4 + 1 + 6 + 8


@pytest.mark.parametrize(("length", "branches"), [(1, 0), (3, 0), (7, 0), (15, 0), (15, 3)])
def test_an_engine_with_drafts_serves_every_request(
    served: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    branches: int,
) -> None:
    """Good guesses and bad ones, chains and trees; texts may part where types round, ends and bookkeeping do not."""
    config = EngineConfig("", prefix_cache=False, check=True, max_running=ROWS, speculation="none")
    plain = _answer(Engine(config, served), *_requests())
    engine = Engine(EngineConfig("", prefix_cache=False, check=True, max_running=ROWS), served)
    engine.speculator.controller = Always(length)
    engine.speculator.sources = [Replay(plain, 0.8, served.vocab_size, branches=branches)]
    shapes: list[bool] = []
    launch = served.launch

    def watched(rows: Sequence[Row]) -> Any:
        shapes.extend(row.parents is not None for row in rows)
        return launch(rows)

    monkeypatch.setattr(served, "launch", watched)
    told = _answer(engine, *_requests())
    assert {name: len(ids) for name, ids in told.items()}.items() >= {"r0": 30, "r1": 25, "r4": 20, "r5": 9}.items()
    same = sum(told[name][:8] == ids[:8] for name, ids in plain.items())
    assert same >= len(plain) - 2
    assert engine.speculator.accepted["replay"] > 20
    assert any(shapes) == (branches > 0)
    assert served.verify_graphs._captured
    assert engine.stats().kv_slots_used == 0
