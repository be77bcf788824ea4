"""The runners on a GPU: float32 as on the CPU; FlashInfer and fused kernels as plain torch; graphs as what they were
captured from; one batch ahead as one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES
from tiny_qwen2_vl import tiny_qwen2_vl
from tiny_qwen3_vl import tiny_qwen3_vl
from tiny_smolvlm import tiny_smolvlm

from engine.batch import FUTURE_TOKEN, Row, RowSampling, VisionRows
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.wire import EngineRequest, SamplingParams, TextOptions, TokenEvents
from tests.engine.gpu import needs_gpu

pytestmark = needs_gpu

GREEDY = RowSampling(SamplingParams(max_tokens=8, temperature=0.0), 0)
ROWS = 13


def _load(folder: Path, device: str, dtype: str) -> TorchRunner:
    options = EngineConfig(str(folder), device=device, dtype=dtype, kv_tokens=4000, max_running=ROWS)  # type: ignore[arg-type]
    runner = load_runner(options)
    assert isinstance(runner, TorchRunner)
    for row in range(ROWS):
        runner.slot_table[row, :300] = torch.arange(1 + 300 * row, 301 + 300 * row)
    return runner


def _ids(seed: int, count: int) -> list[int]:
    return [(31 * seed + 7 * index) % 400 + 30 for index in range(count)]


def _mixed(runner: TorchRunner) -> list[list[Row]]:
    """Steps: prompts with a picture and without, then decode rows beside chunks of other prompts."""
    pixels = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    embeddings = runner.encode([pixels])[0]
    count = len(embeddings)
    axes = np.stack([np.arange(40) // 2, np.arange(40), 40 - np.arange(40)]).astype(np.int32)
    picture = [VisionRows(3, 0, count, embeddings)]
    return [
        [
            Row(0, 0, _ids(1, 40), GREEDY, picture, axes, 7),
            Row(1, 0, _ids(2, 130), GREEDY),
            Row(2, 0, _ids(3, 33), None),
            Row(5, 0, _ids(6, 1), GREEDY),
        ],
        [
            Row(2, 33, _ids(4, 60), GREEDY),
            Row(0, 40, [77], GREEDY, position_delta=7),
            Row(1, 130, [78], GREEDY),
            Row(3, 0, _ids(5, 7), None),
        ],
        [Row(0, 41, [80], GREEDY, position_delta=7), Row(1, 131, [81], GREEDY), Row(2, 93, [82], GREEDY)],
    ]


def _logits(runner: TorchRunner) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([runner.logits(rows).float().cpu() for rows in _mixed(runner)])


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_it_is_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    on_gpu, on_cpu = _load(folder, "cuda", "float32"), _load(folder, "cpu", "float32")
    assert _error(_logits(on_gpu), _logits(on_cpu)) < 1e-4
    for row in (0.0, 1.0):
        sampling = RowSampling(SamplingParams(max_tokens=8, temperature=row, seed=3, top_p=0.9), 0)
        step = [Row(4, 0, _ids(9, 25), sampling)]
        assert on_gpu.step(step) == on_cpu.step(step)


def _big_enough(tmp_path: Path, family: str) -> Path:
    """Models with heads that FlashInfer has kernels for."""
    if family == "smolvlm":
        return tiny_smolvlm(
            tmp_path, text={"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
    text: dict[str, Any] = {"head_dim": 64, "rope_parameters": rope}
    if family == "qwen2_5_vl":
        text = {**text, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        return tiny_qwen2_vl(tmp_path, model_type=family, text=text, vision={"out_hidden_size": 128})
    return tiny_qwen3_vl(tmp_path, experts=family == "qwen3_vl_moe", text=text)


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _big_enough(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    from engine.gpu.runner import CudaRunner

    loaded = _load(folder, "cuda", "bfloat16")
    assert isinstance(loaded, CudaRunner)
    assert loaded.graphs is not None
    loaded.graphs.capture()
    while loaded.graphs.capture_next():
        pass
    return loaded


def test_fused_kernels_and_flashinfer_compute_what_torch_computes(folder: Path, runner: Any) -> None:
    """Both are compared with float32, and the fused kernels are not farther from it than plain torch is."""
    exact = _logits(_load(folder, "cpu", "float32"))
    config = EngineConfig(str(folder), device="cpu", dtype="bfloat16", kv_tokens=4000, max_running=ROWS)
    plain = load_runner(config)
    assert isinstance(plain, TorchRunner)
    plain.slot_table.copy_(runner.slot_table)
    assert _error(_logits(runner), exact) < max(1.3 * _error(_logits(plain), exact), 1e-2)


def test_the_hopper_kernel_computes_what_the_other_does(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel by kernel, and captured: with padding, and in a graph that was captured for other chunks."""
    modules, graphs = runner._modules, runner.graphs
    if modules.hopper is None:
        pytest.skip("FlashInfer's Hopper kernel is not compiled for heads of this size; `Modules.wait` does that")
    from engine.gpu.step_layout import StepRows
    from engine.gpu.step_sizes import Size

    rows = [Row(0, 0, _ids(1, 150), GREEDY), Row(1, 0, _ids(2, 70), GREEDY), Row(2, 0, _ids(3, 5), GREEDY)]
    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr("engine.attention.flashinfer_backend.TOGETHER", (-1e6, 0.0))
            expected = runner.logits(rows)
        assert _error(runner.logits(rows), expected) < 1e-2
        for costs, reader in ((1e6, "hopper"), (-1e6, "split")):
            monkeypatch.setattr("engine.attention.flashinfer_backend.TOGETHER", (costs, 0.0))
            size = Size(0, 256, splits=reader == "split")
            assert size in graphs.sizes()
            monkeypatch.setitem(graphs._captured, size, graphs._capture(size))
            graphs.size_table.add(size, 0.0)  # the quickest
            assert graphs.size_table.choose(Size(0, 225, reader == "split")) == size
            for order in ([0, 1, 2], [2, 1, 0]):
                result = graphs.run(StepRows.of([rows[index] for index in order]))
                actual = torch.stack([result.logits[pick] for pick in result.picks])
                assert _error(actual, expected[order]) < 1e-2


def test_graphs_of_all_sizes_compute_what_they_were_captured_from(runner: Any) -> None:
    """Padded or not; and the padding writes nothing but the dummy slot."""
    from engine.gpu.step_layout import StepRows

    prompts = [Row(row, 0, _ids(row, 20 + 9 * row), GREEDY) for row in range(ROWS)]
    runner.step(prompts)
    for count in range(1, ROWS + 1):
        rows = [Row(row, 20 + 9 * row, [100 + row], GREEDY) for row in range(count)]
        before = runner.kv_pool.clone()
        with torch.inference_mode():
            result = runner.graphs.run(StepRows.of(rows))
        replayed, drawn = result.logits[:count].clone(), result.tokens[:count].clone()
        written = {1 + 300 * row + 20 + 9 * row for row in range(count)}
        changed = (runner.kv_pool != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
        assert set(changed) <= written | {0}
        with torch.inference_mode():
            eager = runner.logits(rows)
        assert _error(replayed, eager) < 1e-2, count
        assert torch.equal(drawn, replayed.max(-1).indices)
        assert runner._future[:count].tolist() == drawn.tolist()


def test_graphs_of_mixed_steps_compute_what_they_were_captured_from(runner: Any) -> None:
    """Pictures, taps and three axes included; no slot is written that is not the step's."""
    from engine.gpu.step_layout import StepRows

    for rows in _mixed(runner):
        before = runner.kv_pool.clone()
        with torch.inference_mode():
            result = runner.graphs.run(StepRows.of(rows))
            replayed = result.logits[result.picks].clone()
        written = runner.kv_pool.clone()
        changed = (written != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
        own = {1 + 300 * row.table_row + row.start + at for row in rows for at in range(len(row.token_ids))}
        assert set(changed) <= own | {0}
        with torch.inference_mode():
            eager = runner.logits(rows)
        assert _error(replayed, eager) < 1e-2
        assert _error(written[:, 1:], runner.kv_pool[:, 1:]) < 1e-2


def test_pictures_are_encoded_alike_with_a_graph_and_without(runner: Any) -> None:
    pictures = [torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8) for _ in range(4)]
    for _ in range(3):
        replayed = runner.encode(pictures)
    for picture, tokens in zip(pictures, replayed, strict=True):
        with torch.inference_mode():
            assert _error(tokens, runner.encoder([picture.to(runner.device)])[0]) < 1e-3
    assert runner._encoder_graphs.knows(pictures[0])


def test_a_future_token_is_the_last_one_drawn(runner: Any) -> None:
    """In graphs, and in steps that hold a chunk besides."""
    runner.step([Row(row, 0, _ids(row, 20), GREEDY) for row in range(3)])
    first = [row.token_id for row in runner.launch([Row(row, 20, [50 + row], GREEDY) for row in range(3)]).result()]
    ahead = runner.launch([Row(row, 21, [FUTURE_TOKEN], GREEDY) for row in range(3)])
    with_chunk = [*(Row(row, 22, [FUTURE_TOKEN], GREEDY) for row in range(3)), Row(7, 0, _ids(8, 9), None)]
    third = [token.token_id for token in runner.launch(with_chunk).result()]
    second = [token.token_id for token in ahead.result()]
    runner.step([Row(row, 20, [50 + row], GREEDY) for row in range(3)])
    again = [token.token_id for token in runner.step([Row(row, 21, [first[row]], GREEDY) for row in range(3)])]
    assert again == second
    known = [*(Row(row, 22, [second[row]], GREEDY) for row in range(3)), Row(7, 0, _ids(8, 9), None)]
    assert [token.token_id for token in runner.step(known)] == third


def _requests() -> list[EngineRequest]:
    params = [
        SamplingParams(max_tokens=30, temperature=0.0),
        SamplingParams(max_tokens=25, temperature=1.0, seed=4),
        SamplingParams(max_tokens=20, temperature=0.7, seed=5, top_k=20, top_p=0.8),
        SamplingParams(max_tokens=20, temperature=0.7, seed=5, top_p=0.8, min_p=0.01),
        SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=3),
        SamplingParams(max_tokens=40, temperature=1.5, seed=6, stop_token_ids=list(range(30, 60))),
    ]
    return [
        EngineRequest(f"r{index}", np.array(_ids(index, 30 + 20 * index)).tobytes(), [], sampling, TextOptions(), 0.0)
        for index, sampling in enumerate(params)
    ]


def _answer(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    for wanted in requests:
        engine.submit(wanted, lambda pixels: torch.empty(0))
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                assert event.error is None
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
    return outputs


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    """A runner as an engine gets it."""
    loaded = load_runner(EngineConfig(str(folder), device="cuda", dtype="bfloat16", kv_tokens=4000, max_running=ROWS))
    loaded.warm_up()
    return loaded


def test_one_batch_ahead_says_what_one_at_a_time_says(served: Any) -> None:
    """Alone and without drafts, where batches are of one shape; together every request ends, and nothing leaks."""
    config = EngineConfig("", prefix_cache=False, check=True, max_running=ROWS, speculation="none")
    ahead, stepwise = Engine(config, served), Engine(config, served)
    stepwise._overlapped = None
    for wanted in _requests():
        assert _answer(ahead, wanted) == _answer(stepwise, wanted)
    together = _answer(ahead, *_requests())
    assert {name: len(ids) for name, ids in together.items()}.items() >= {"r0": 30, "r1": 25, "r4": 20, "r5": 9}.items()
    ahead.check()


def test_large_pictures_are_encoded_without_a_graph(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep the memory that they take."""
    monkeypatch.setattr("engine.gpu.encoder_graphs.MOST_BYTES", 32 * 32)
    picture = torch.randint(0, 256, (1, 64, 32, 3), dtype=torch.uint8)
    if runner.encoder.image_size == 32:
        picture = picture[:, :32]
    known = set(runner._encoder_graphs._captured)
    first, *_, last = (runner.encode([picture])[0] for _ in range(4))
    assert torch.equal(first, last)
    assert set(runner._encoder_graphs._captured) == known
