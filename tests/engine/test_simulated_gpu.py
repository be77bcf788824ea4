"""The tests of the GPU's runner where there is no GPU, on a simulated one: all but what its kernels compute is real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

from engine.batch import Row
from tests.engine.simulated_gpu import load_simulated, no_device, rows_of_table, simulate
from tests.engine.test_gpu_runner import (  # noqa: F401  the same tests, on the fixtures below
    GREEDY,
    ROWS,
    _ids,
    test_a_future_token_is_the_last_one_drawn,
    test_fused_kernels_and_flashinfer_compute_what_torch_computes,
    test_graphs_of_all_sizes_compute_what_they_were_captured_from,
    test_graphs_of_mixed_steps_compute_what_they_were_captured_from,
    test_large_pictures_are_encoded_without_a_graph,
    test_one_batch_ahead_says_what_one_at_a_time_says,
    test_pictures_are_encoded_alike_with_a_graph_and_without,
)

pytestmark = no_device


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        yield


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    loaded = load_simulated(folder, max_rows=ROWS)
    rows_of_table(loaded, ROWS, 300)
    assert loaded.graphs is not None
    loaded.graphs.capture()
    while loaded.graphs.capture_next():
        pass
    return loaded


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    loaded = load_simulated(folder, max_rows=ROWS)
    loaded.warm_up()
    return loaded


@pytest.mark.parametrize("rows", [1, 3, 9, 25, 40])
def test_every_number_of_rows_has_a_graph_beside_chunks(tiny_model: Path, rows: int) -> None:
    """However many may run at once, the largest captured size holds all of them."""
    from engine.gpu.step_layout import StepRows

    runner = load_simulated(tiny_model, max_rows=rows)
    rows_of_table(runner, rows, 90)
    assert runner.graphs is not None
    runner.graphs.capture()
    decodes = [Row(row, 9, [40 + row], GREEDY) for row in range(rows - 1)]
    step = [*decodes, Row(rows - 1, 0, _ids(3, 30), GREEDY)]
    assert runner.graphs.fits(StepRows.of(step))
    with torch.inference_mode():
        expected = runner.logits(step).max(-1).indices.tolist()
    assert [token.token_id for token in runner.step(step)] == expected
