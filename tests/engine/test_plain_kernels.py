"""The simulated GPU says the same with plain torch in the kernels' place and with the kernels, in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engine/test_plain_kernels.py     # needs triton, no device
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES

from engine.batch import Row, RowSampling
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
            simulate(patch, interpreted=interpreted, prompt_sizes=[8, 32])
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
