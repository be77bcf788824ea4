"""The simulated GPU says the same with plain torch in the kernels' place and with the kernels, in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_plain_kernels.py     # needs triton, no device
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import FAMILIES

from engine.batch import Row, RowSampling
from engine.speculation.drafter import ChainDrafter, DraftRow
from preprocess.wire import SamplingParams
from tests.engine.simulated_gpu import load_simulated, needs_interpreter, rows_of_table, simulate

pytestmark = needs_interpreter

GREEDY = RowSampling(SamplingParams(max_tokens=8, temperature=0.0), 0)
DRAWN = RowSampling(SamplingParams(max_tokens=8, temperature=1.0, seed=3), 5)


def _ids(seed: int, count: int) -> list[int]:
    return [(31 * seed + 7 * index) % 400 + 30 for index in range(count)]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "qwen3_vl_moe"])
def test_tritons_kernels_say_what_plain_torch_says(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    steps = [
        [Row(0, 0, _ids(1, 20), GREEDY), Row(1, 0, _ids(2, 7), GREEDY)],
        [Row(0, 20, [77], GREEDY), Row(1, 7, [78], GREEDY), Row(2, 0, _ids(5, 6), None)],
        [Row(0, 21, [79], GREEDY), Row(1, 8, [80], DRAWN)],
        [Row(0, 22, [81, 82, 83], GREEDY, drafted=[DRAWN, GREEDY]), Row(1, 9, [84], DRAWN)],
    ]
    found = []
    for interpreted in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            simulate(patch, interpreted=interpreted, token_sizes=[8, 32])
            runner = load_simulated(folder, max_rows=3)
            rows_of_table(runner, 3, 40)
            assert runner.graphs is not None
            runner.graphs.capture()
            tokens = [runner.step(rows) for rows in steps]
            with torch.inference_mode():
                found.append((tokens, runner.logits(steps[-1]), runner.kv_pool[:, 1:].clone()))
    (plain, plain_logits, plain_pool), (real, real_logits, real_pool) = found
    assert real == plain
    assert _error(real_logits, plain_logits) < 1e-5
    assert _error(real_pool, plain_pool) < 1e-5


def test_guesses_by_tritons_kernels_are_those_of_plain_torch(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that want unlike many, drawn in all ways."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "head_dim": 64}
    head = tiny_head(tmp_path / "head", tiny_model, fields=layers, draft_vocab_size=80)
    sampled = [GREEDY, DRAWN, RowSampling(SamplingParams(max_tokens=8, temperature=0.7, seed=3, top_k=9), 5)]
    monkeypatch.setattr("engine.gpu.guess_graphs.WIDTHS", (2, 4))
    found = []
    for interpreted in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            simulate(patch, interpreted=interpreted, token_sizes=[8, 32])
            runner = load_simulated(tiny_model, max_rows=3, draft_head=str(head))
            rows_of_table(runner, 3, 40)
            runner.step([Row(row, 0, _ids(row, 6 + row), None) for row in range(3)])
            drafter = runner.drafter
            assert isinstance(drafter, ChainDrafter)
            assert runner._guess_graphs is not None
            runner._guess_graphs.capture()
            drafter.forward([DraftRow(row, 1, _ids(row, 6 + row)[1:], asks=False) for row in range(3)], guessed=False)
            rows = [DraftRow(row, 6 + row, [70 + row, 80, 90][: 3 - row]) for row in range(3)]
            runner.step([Row(row.table_row, row.start, row.token_ids, None) for row in rows])
            found.append(drafter.guess(rows, [4, 1, 3], sampled))
    assert found[0] == found[1]
