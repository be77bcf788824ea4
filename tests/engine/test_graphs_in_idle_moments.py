"""Graphs that stand before the first user, those that follow while nobody waits, and kernels swapped in later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

from engine.batch import Row
from tests.engine.simulated_gpu import HopperModule, load_simulated, no_device, rows_of_table, simulate
from tests.engine.test_gpu_runner import GREEDY, _ids

pytestmark = no_device

ROWS = 13
PROMPTS = (32, 64, 96, 128)


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, token_sizes=PROMPTS)
        patch.setattr("engine.attention.flashinfer_backend.ENOUGH_TILES", 5)  # enough tokens for it: 96
        yield


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    loaded = load_simulated(FAMILIES["qwen3_vl"](tmp_path), max_rows=ROWS)
    rows_of_table(loaded, ROWS, 300)
    assert loaded.graphs is not None
    loaded.graphs.capture()
    return loaded


def _steps() -> list[list[Row]]:
    """Prompts that fill sizes and that do not, then decode rows beside a chunk, and alone."""
    prompts = [Row(row, 0, _ids(row, 9 + 5 * row), GREEDY) for row in range(5)]
    decodes = [Row(row, 9 + 5 * row, [50 + row], GREEDY) for row in range(5)]
    beside = [Row(row, 10 + 5 * row, [60 + row], GREEDY) for row in range(3)]
    return [prompts, decodes, [*beside, Row(7, 0, _ids(8, 40), GREEDY)], [Row(7, 40, [7], GREEDY)]]


def _said(runner: Any) -> list[list[int]]:
    return [[token.token_id for token in runner.step(step)] for step in _steps()]


def _eager(runner: Any) -> list[list[int]]:
    graphs, runner.graphs = runner.graphs, None
    said = _said(runner)
    runner.graphs = graphs
    return said


def test_coarse_sizes() -> None:
    from engine.gpu.step_sizes import coarse, decode_sizes

    assert coarse([5]) == [5]
    assert coarse([1, 2, 3, 4, 6, 8, 12, 13]) == [1, 3, 6, 13]
    assert coarse(decode_sizes(64)) == [1, 2, 4, 8, 16, 32, 64]


def test_few_sizes_stand_at_first_and_serve_every_step(runner: Any) -> None:
    from engine.gpu.step_sizes import Size

    graphs = runner.graphs
    first, every = set(graphs._captured), set(graphs.sizes())
    assert first == set(graphs.first_sizes()) < every
    assert len(first) == 4 + 3 + 4, "rows, alone; chunks, alone; both, once more for as many chunks as there are alone"
    expected = _eager(runner)
    assert _said(runner) == expected
    for decode, prompt, splits in every:
        chosen = graphs.size_table.choose(Size(decode, prompt, splits))
        assert chosen in first
        assert chosen.decode >= decode
        assert chosen.prompt >= prompt
        assert (chosen.prompt > 0) == (prompt > 0)


def test_the_others_follow_one_at_a_time_largest_first(runner: Any) -> None:
    graphs = runner.graphs
    missing = [size for size in graphs.sizes() if size not in graphs._captured]
    expected = _said(runner)
    followed = []
    while True:
        known = set(graphs._captured)
        more = runner.idle()
        new = set(graphs._captured) - known
        assert len(new) == more
        followed += list(new)
        assert _said(runner) == expected
        if not more:
            break
    assert followed == missing
    assert [size.decode + size.prompt for size in followed] == sorted(
        (size.decode + size.prompt for size in missing), reverse=True
    )
    assert all(graphs.size_table.choose(size) == size for size in graphs.sizes())


def test_sizes_that_are_quicker_though_they_are_larger_serve_with_the_same_answers(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As products by tiles may make it."""
    from engine.gpu.graph import Graph
    from engine.gpu.step_layout import StepRows
    from engine.gpu.step_sizes import Size

    seconds = itertools.count(1)
    monkeypatch.setattr(Graph, "seconds", lambda graph: next(seconds) * 1e-3)  # largest first, and quickest
    graphs = runner.graphs
    graphs.capture()
    expected = _eager(runner)
    while True:
        assert _said(runner) == expected
        if not runner.idle():
            break
    assert graphs.size_table.choose(Size(2, 0)) == Size(ROWS, 0)
    assert graphs.size_table.choose(Size(2, 40)) == Size(ROWS, PROMPTS[-1])
    assert graphs.added_s(2, 40) == 0.0, "they take no longer than those without chunks"
    for step in _steps():
        runner.step(step)
        with torch.inference_mode():
            result = graphs.run(StepRows.of(step))
            shown = result.logits[result.picks].clone()
            torch.testing.assert_close(shown, runner.logits(step), rtol=1e-5, atol=1e-5)


def test_what_is_timed_computes_tokens_that_differ_and_writes_nothing_but_the_dummy_slot(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all would choose the same experts."""
    from engine.gpu.graph import Graph

    graphs = runner.graphs
    vocab_size = runner.vocab_size
    distinct: list[int] = []

    @torch.inference_mode()
    def seconds(graph: Any) -> float:
        graphs._token_ids.zero_()
        graph.replay()
        distinct.append(len(graphs._token_ids.unique()))
        return 1e-3

    monkeypatch.setattr(Graph, "seconds", seconds)
    expected = _said(runner)
    pool, future = runner.kv_pool.clone(), graphs._future.clone()
    sizes = []
    while True:
        known = set(graphs._captured)
        if not runner.idle():
            break
        sizes += set(graphs._captured) - known
    assert distinct == [min(size.tokens, vocab_size) for size in sizes]
    assert {size.prompt > 0 for size in sizes} == {False, True}
    changed = (runner.kv_pool != pool).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    assert set(changed) <= {0}
    assert torch.equal(graphs._future[:ROWS], future[:ROWS])
    assert _said(runner) == expected


def test_graphs_of_drafts_follow_all_others_where_somebody_drafts(runner: Any) -> None:
    from engine.gpu.step_sizes import checked_ahead

    while runner.idle():
        pass
    assert not runner.verify_graphs._captured
    runner._drafts = True
    expected = _said(runner)
    followed = 0
    while runner.idle():
        followed += 1
        assert len(runner.verify_graphs._captured) == followed
        assert _said(runner) == expected
    assert list(runner.verify_graphs._captured) == checked_ahead(ROWS)
    assert set(runner.graphs._captured) == set(runner.graphs.sizes())


def test_a_kernel_that_comes_later_serves_at_once_and_graphs_follow(runner: Any) -> None:
    graphs = runner.graphs
    expected = _said(runner)
    while runner.idle():
        pass
    assert runner._modules.looks == 1
    hopper = runner._modules.hopper = HopperModule()
    assert _said(runner) == expected
    assert hopper.num_runs == 0, "graphs were captured with the other one"
    eager = [Row(row, 0, _ids(row, 70), GREEDY) for row in range(4)]
    runner.graphs = None
    runner.step(eager)
    runner.graphs = graphs
    assert hopper.num_runs > 0
    turns = 0
    while runner.idle():
        turns += 1
        assert _said(runner) == expected
    assert turns == sum(size.prompt > 0 for size in graphs.sizes())
    runs = hopper.num_runs
    assert _said(runner) == expected
    assert hopper.num_runs > runs
    assert _readers(graphs) == {(False, False): {"split"}, (True, False): {"hopper"}, (True, True): {"split"}}


def test_a_kernel_that_is_there_at_start_serves_from_the_first_step(tmp_path: Path) -> None:
    loaded = load_simulated(FAMILIES["qwen3_vl"](tmp_path), max_rows=ROWS)
    modules: Any = loaded._modules
    rows_of_table(loaded, ROWS, 300)
    expected = _eager(loaded)
    modules.hopper = HopperModule()
    assert loaded.graphs is not None
    loaded.graphs.capture()
    assert _readers(loaded.graphs)[True, False] == {"hopper"}
    assert _readers(loaded.graphs)[True, True] == {"split"}
    assert _said(loaded) == expected


def test_many_keys_of_few_tokens_are_split_whatever_is_captured(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper kernel cannot: a small chunk behind a long context has a graph of its own, or a larger one."""
    long = [Row(0, 200, _ids(0, 30), GREEDY), Row(1, 0, _ids(1, 30), GREEDY)]
    short = [Row(0, 40, _ids(0, 30), GREEDY), Row(1, 0, _ids(1, 30), GREEDY)]
    expected = [[token.token_id for token in runner.step(rows)] for rows in (long, short)]
    hopper = runner._modules.hopper = HopperModule()
    monkeypatch.setattr("engine.attention.flashinfer_backend.TOGETHER", (0.1, 0.0))  # as long as a hundred keys
    is_more = True
    while is_more:
        is_more = runner.idle()
        for rows, said in zip((long, short), expected, strict=True):
            assert [token.token_id for token in runner.step(rows)] == said
    runs = hopper.num_runs
    runner.step(long)
    assert hopper.num_runs == runs
    runner.step(short)
    assert hopper.num_runs > runs


def test_a_failed_capture_is_the_last(runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What stands serves on."""
    expected = _said(runner)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner.graphs, "_capture", fails)
    assert runner.idle() is False
    assert runner.idle() is False
    assert caplog.text.count("no more graphs") == 1
    assert _said(runner) == expected


def test_a_dry_run_launches_every_kernel_of_a_step_and_changes_nothing(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one layer of each kind, and without attention, which may still be compiled."""
    from engine.attention.flashinfer_modules import NoModules
    from engine.gpu import forward, step_graphs

    launched: set[str] = set()
    for module, name in (
        (forward, "rms_norm"),
        (forward, "rotate_and_write"),
        (forward, "silu_mul"),
        (step_graphs, "gather_slots"),
        (step_graphs, "decode_inputs"),
        (step_graphs, "draw"),
    ):
        function = getattr(module, name)

        def noted(*args: Any, function: Any = function, name: str = name, **options: Any) -> Any:
            launched.add(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, noted)
    expected = _said(runner)
    of_steps, modules = set(launched), runner._attention.modules
    launched.clear()
    runner._attention.modules = NoModules()
    runner.graphs.send_all()
    runner._attention.modules = modules
    assert launched == of_steps
    assert _said(runner) == expected


def test_a_dry_run_launches_the_kernels_of_drafts_where_somebody_drafts(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention has one for each number of queries a row; other numbers only have to be alike for the compiler."""
    from engine.gpu.decode_attention import DecodeAttention
    from engine.gpu.skinny import kind_of
    from engine.gpu.step_sizes import checked_ahead

    read = DecodeAttention.read
    seen: set[tuple[int, bool, int]] = set()  # queries; whether tokens are a multiple of 16, and how few

    def noted(attention: Any, layer: int, rows: Any, query: torch.Tensor, out: torch.Tensor) -> None:
        if rows.queries > 1:
            seen.add((rows.queries, len(query) % 16 == 0, kind_of(len(query))))
        read(attention, layer, rows, query, out)

    monkeypatch.setattr(DecodeAttention, "read", noted)
    runner._send_all()
    assert not seen
    runner._drafts = True
    runner._send_all()
    sent = set(seen)
    assert not runner.verify_graphs._captured
    seen.clear()
    while runner.verify_graphs.capture_next():
        pass
    assert len(runner.verify_graphs._captured) == len(checked_ahead(ROWS))
    for sent_ones, seen_ones in zip(zip(*sent, strict=True), zip(*seen, strict=True), strict=True):
        assert set(sent_ones) == set(seen_ones)


def _readers(graphs: Any) -> dict[tuple[bool, bool], set[str]]:
    """Who reads chunks in graphs that have some or not, by whether they are for keys that are split."""
    readers: dict[tuple[bool, bool], set[str]] = {}
    for size, captured in graphs._captured.items():
        readers.setdefault((size.prompt > 0, size.splits), set()).add(captured.reader)
    return readers
