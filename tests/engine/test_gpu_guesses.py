"""Draft models and heads on a GPU: graphs of guesses compute what plain torch computes, a head is told what a float32
model makes of tokens, and an engine serves with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import FAMILIES

from engine.batch import Row, RowSampling, VisionRows
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.speculation.drafter import ChainDrafter, DraftRow
from engine.speculation.lengths import Always
from preprocess.wire import SamplingParams
from tests.engine.gpu import needs_gpu
from tests.engine.test_gpu_runner import _answer, _big_enough, _error, _requests

pytestmark = needs_gpu

RUNNING = 6
EACH = 120
LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "head_dim": 64}
GREEDY = RowSampling(SamplingParams(max_tokens=8, temperature=0.0), 0)


def rows_of_table(runner: TorchRunner) -> None:
    """So many positions of each row, one after the other."""
    slots = torch.arange(1, 1 + RUNNING * EACH, dtype=torch.int32)
    runner.slot_table[:RUNNING, :EACH] = slots.view(RUNNING, EACH).to(runner.device)


def prompts(runner: TorchRunner, count: int) -> list[Row]:
    """Of several lengths, every second with a picture behind which more text stands."""
    side = runner.encoder.image_size
    made = []
    for row in range(count):
        ids = [(31 * row + 7 * index) % 100 + 30 for index in range(18 + 5 * row)]
        vision = []
        if row % 2:
            generator = torch.Generator().manual_seed(row)
            pixels = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8, generator=generator)
            embeddings = runner.encode([pixels])[0][:9]
            vision = [VisionRows(3, 0, len(embeddings), embeddings)]
            ids = [*ids[:3], *[100_000 + index for index in range(len(embeddings))], *ids[3:]]
        made.append(Row(row, 0, ids, GREEDY, vision, position_delta=3 * (row % 3)))
    return made


def draft_rows(runner: Any, rows: Sequence[Row], missing: int | None = None) -> list[DraftRow]:
    """All of these texts, or so many of their last tokens, to be followed by guesses."""
    made = []
    for row in rows:
        first = runner.drafter.lag if missing is None else len(row.token_ids) - missing
        ids = [own if own < runner.vocab_size else 5 for own in row.token_ids[first:]]
        vision = np.zeros(len(row.token_ids), np.bool_)
        for part in row.vision:
            vision[part.start : part.start + part.count] = True
        seen = vision[first:] if vision[first:].any() else None
        made.append(DraftRow(row.table_row, first, ids, seen, position_delta=row.position_delta))
    return made


def steps_of_all_kinds(runner: TorchRunner) -> list[list[Row]]:
    """Prompts with pictures, in pieces, steps of one token, and one that checks drafts."""
    texts = prompts(runner, 4)
    ends = [len(text.token_ids) for text in texts]
    drafted = replace(GREEDY, output_index=1)
    return [
        [texts[0], texts[1], replace(texts[2], token_ids=texts[2].token_ids[:7], sampling=None)],
        [replace(texts[2], token_ids=texts[2].token_ids[7:], start=7), texts[3]],
        [Row(row, ends[row], [50 + row], GREEDY, position_delta=3 * (row % 3)) for row in range(4)],
        [Row(row, ends[row], [40, 41 + row], GREEDY, (), None, 3 * row, [drafted]) for row in range(3)],
    ]


def _load(folder: Path, device: str, dtype: str, **options: Any) -> Any:
    given: dict[str, Any] = {"kv_tokens": 4000, "max_running": RUNNING, "threads": 1} | options
    return load_runner(EngineConfig(str(folder), device=device, dtype=dtype, **given))  # type: ignore[arg-type]


def exactly(folder: Path, **options: Any) -> Any:
    """The same in float32, where plain torch computes."""
    return _load(folder, "cpu", "float32", **options)


CASES = [
    ("smolvlm", "head"),
    ("qwen3_vl", "head of a part of the vocabulary"),
    ("qwen3_vl_moe", "head"),
    ("smolvlm", "draft model"),
    ("qwen3_vl", "draft model"),
]


@pytest.fixture(scope="module", params=CASES, ids=" with a ".join)
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, drafter = request.param
    folder = _big_enough(tmp_path_factory.mktemp("model"), family)
    options = {"draft_model": str(folder)}
    if drafter != "draft model":
        part = 60 if "part" in drafter else None
        head = tiny_head(tmp_path_factory.mktemp("head"), folder, draft_vocab_size=part, fields=LAYERS)
        options = {"draft_head": str(head)}
    loaded = _load(folder, "cuda", "bfloat16", **options)
    loaded.warm_up()
    loaded.exact = exactly(folder, **options)
    return loaded


@pytest.mark.parametrize("missing", [None, 1, 3])
@pytest.mark.parametrize("count", [1, 2, RUNNING])
def test_graphs_of_guesses_compute_what_plain_torch_computes(talker: Any, count: int, missing: int | None) -> None:
    """The logits that each guess was drawn from, along what the graphs have guessed: not farther from those of float32
    than plain torch's are.
    """
    drafter = talker.drafter
    assert isinstance(drafter, ChainDrafter)
    assert drafter.draws(GREEDY)
    greedy = [GREEDY] * count
    for runner in (talker, talker.exact):
        rows_of_table(runner)
        texts = prompts(runner, count)
        runner.step(texts)
        whole = draft_rows(runner, texts)
        runner.drafter.forward([replace(row, asks=False) for row in whole], guessed=False)
    rows = draft_rows(talker, texts, missing)
    found = []
    for length in range(1, 5):
        drafter.forward([replace(row, asks=False) for row in whole], guessed=False)
        guesses = drafter.guess(rows, [length] * count, greedy)
        found.append(talker._guess_graphs._logits[:count].clone())
        assert [own[-1] for own in guesses] == found[-1].max(-1).indices.tolist()
        assert {len(own) for own in guesses} == {length}
    plain, exact = drafter.forward(rows, guessed=False), talker.exact.drafter.forward(rows, guessed=False)
    computed = []
    for length in range(4):
        known = exact[0].isfinite()
        assert torch.equal(found[length][0].isfinite().cpu(), known)
        computed.append([logits.cpu()[:, known] for logits in (found[length], plain, exact)])
        ends = [row.start + len(row.token_ids) + length for row in rows]
        further = [
            DraftRow(row.table_row, end, own[length : length + 1], position_delta=row.position_delta)
            for row, own, end in zip(rows, guesses, ends, strict=True)
        ]
        plain, exact = drafter.forward(further, guessed=True), talker.exact.drafter.forward(further, guessed=True)
    graphs, kernels, right = (torch.cat(part) for part in zip(*computed, strict=True))
    assert _error(graphs, right) < max(1.3 * _error(kernels, right), 1e-2)


def test_rows_that_have_their_guesses_write_nowhere_else(talker: Any) -> None:
    rows_of_table(talker)
    drafter = talker.drafter
    texts = prompts(talker, 3)
    talker.step(texts)
    drafter.forward([replace(row, asks=False) for row in draft_rows(talker, texts)], guessed=False)
    rows = draft_rows(talker, texts, 1)
    before = drafter.pool.clone()
    lengths = [6, 1, 3]
    drafter.guess(rows, lengths, [GREEDY] * 3)
    changed = (drafter.pool != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    own = {
        1 + EACH * row.table_row + row.start + at for row, most in zip(rows, lengths, strict=True) for at in range(most)
    }
    assert set(changed) <= own | {0}


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "qwen3_vl_moe"])
def test_a_head_is_told_what_a_float32_model_makes_of_tokens(family: str, tmp_path: Path) -> None:
    """In graphs and without. In bfloat16 some tokens go to other experts."""
    most = 0.2 if family == "qwen3_vl_moe" else 3e-2
    folder = _big_enough(tmp_path / "model", family)
    options = {"draft_head": str(tiny_head(tmp_path / "head", folder, fields=LAYERS))}
    exact = _load(folder, "cpu", "float32", **options)
    for is_captured in (False, True):
        runner = _load(folder, "cuda", "bfloat16", **options)
        if is_captured:
            runner.graphs.capture()
        for own in (exact, runner):
            rows_of_table(own)
            own._told.features.zero_()
            own._told.seen.zero_()
            for rows in steps_of_all_kinds(own):
                own.step(rows)
        expected, told = exact._told, runner._told
        assert _error(told.features[1:].cpu(), expected.features[1:]) < most
        vision = expected.seen[1:].abs().sum(1) > 0
        assert int(vision.sum()) > 0
        assert _error(told.seen[1:].cpu()[vision], expected.seen[1:][vision]) < 2e-2


def test_an_engine_that_guesses_serves_every_request(talker: Any) -> None:
    """However tokens are drawn; nothing leaks, and the model is never given up."""
    mode = talker.drafter.kind.source
    engine = Engine(EngineConfig("", check=True, max_running=RUNNING, speculation=mode), talker)
    engine.speculator.controller = Always(3)
    together = _answer(engine, *_requests())
    assert {name: len(ids) for name, ids in together.items()}.items() >= {"r0": 30, "r1": 25, "r4": 20, "r5": 9}.items()
    assert sum(engine.speculator.drafted.values()) > 20
    assert engine.speculator.model is not None
    assert not engine.speculator.model.is_broken
    engine.check()
    assert engine.stats().kv_slots_used == 0


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_in_float32_a_head_changes_nothing(family: str, tmp_path: Path) -> None:
    """Where torch computes on the device."""
    folder = FAMILIES[family](tmp_path / "model")
    head = tiny_head(tmp_path / "head", folder, fields={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    runner = _load(folder, "cuda", "float32", draft_head=str(head))
    answers = []
    for mode in ("none", "head"):
        engine = Engine(EngineConfig("", check=True, max_running=RUNNING, speculation=mode), runner)
        engine.speculator.controller = Always(3)
        answers.append(_answer(engine, *_requests()))
        assert (sum(engine.speculator.drafted.values()) > 0) == (mode == "head")
    assert answers[0] == answers[1]
