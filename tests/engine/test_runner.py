"""The runner behind the border of `engine.batch`: shapes it promises, order of results, and what it must not touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES

from engine.batch import Row, RowSampling, Runner, SampledToken, VisionRows
from engine.config import EngineConfig
from engine.decode_speed import decode_steps_per_s
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.blocks.linear import Linear
from preprocess.wire import SamplingParams
from tests.engine.family_parity import Checked, pixels_of

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
FIRST = RowSampling(GREEDY, 0)


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> TorchRunner:
    loaded = load_runner(EngineConfig(str(tiny_model), dtype="float32", threads=1, kv_tokens=600, max_running=4))
    assert isinstance(loaded, TorchRunner)
    for row in range(4):
        loaded.slot_table[row, :140] = torch.arange(1 + 140 * row, 141 + 140 * row)
    return loaded


def _prompt(row: int, length: int = 10, sampling: RowSampling | None = FIRST) -> Row:
    return Row(row, 0, [(31 * row + 7 * index) % 400 + 30 for index in range(length)], sampling)


def test_attributes_describe_the_pool_and_the_model(runner: Runner) -> None:
    assert runner.num_slots == 601  # slot 0 is the dummy
    assert (runner.max_rows, runner.max_positions, runner.vocab_size) == (4, 600, 512)  # no more than the pool holds
    assert runner.slot_table.shape == (4, 600)
    assert runner.slot_table.dtype is torch.int32
    assert runner.embedding_bytes == 48 * 4


def test_warming_up_leaves_no_trace(tiny_model: Path) -> None:
    """It runs on the dummy slot alone, which stays finite, since masked attention reads it."""
    fresh = load_runner(EngineConfig(str(tiny_model), dtype="float32", threads=1, kv_tokens=100, max_running=2))
    assert isinstance(fresh, TorchRunner)
    fresh.warm_up()
    assert not fresh.slot_table.any()
    assert not fresh.kv_pool[:, 1:].any()
    assert fresh.kv_pool[:, 0].isfinite().all()


def test_results_come_in_the_order_of_the_rows(runner: TorchRunner) -> None:
    """Decode rows and chunks are laid out in another order inside; rows without sampling give nothing."""
    rows = [_prompt(0, 12), _prompt(1, 7), _prompt(2, 9, None), _prompt(3, 1)]
    alone = {row.table_row: runner.step([row]) for row in rows}
    assert alone[2] == []
    expected = alone[0] + alone[1] + alone[3]
    assert runner.step(rows) == expected
    assert runner.step(rows[::-1]) == expected[::-1]
    assert runner.step([_prompt(2, 9, None)]) == []


def test_each_row_is_sampled_as_it_asks(runner: TorchRunner) -> None:
    seeded = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)
    rows = [_prompt(0), _prompt(1, sampling=RowSampling(seeded, 3))]
    greedy, drawn = runner.step(rows)
    assert greedy.logprobs is None
    assert drawn.logprobs is not None
    assert len(drawn.logprobs.top) == 2
    assert runner.step(rows) == [greedy, drawn]
    assert runner.step(rows[1:])[0].token_id == drawn.token_id


def test_encode_keeps_order_and_sizes(runner: TorchRunner) -> None:
    """Pictures of different tile counts and sizes in one call equal each alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 32, 32, 3), (5, 32, 32, 3), (1, 16, 48, 3), (33, 32, 32, 3)]
    pictures = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    together = runner.encode(pictures)
    assert [tuple(tokens.shape) for tokens in together] == [(4, 48), (20, 48), (3, 48), (132, 48)]
    for picture, tokens in zip(pictures, together, strict=True):
        torch.testing.assert_close(runner.encode([picture])[0], tokens, atol=1e-5, rtol=1e-5)
    assert runner.encode([]) == []


@pytest.mark.parametrize("height", [0, 7, 24])
def test_encode_refuses_tiles_that_give_no_whole_tokens(runner: TorchRunner, height: int) -> None:
    with pytest.raises(ValueError, match=f"tile of {height}×32 pixels"):
        runner.encode([torch.zeros(1, height, 32, 3, dtype=torch.uint8)])


def test_embeddings_replace_ids_and_are_not_changed(runner: TorchRunner) -> None:
    embeddings = torch.randn(6, 48, generator=torch.Generator().manual_seed(2))
    before = embeddings.clone()
    ids = [50, 51, 10**17, 10**17 + 1, 10**17 + 2, 60]
    sampling = RowSampling(GREEDY, 0)
    logits = runner.logits([Row(0, 0, ids, sampling, [VisionRows(2, 1, 3, embeddings)])])
    taps = embeddings.unsqueeze(1)  # (tokens, taps, hidden)
    assert torch.equal(logits, runner.logits([Row(0, 0, ids, sampling, [VisionRows(2, 1, 3, taps)])]))
    assert not torch.equal(logits, runner.logits([Row(0, 0, ids, sampling, [VisionRows(2, 2, 3, embeddings)])]))
    assert torch.equal(embeddings, before)


def test_decoding_does_not_read_slots_beyond_the_sequence(runner: TorchRunner) -> None:
    token = runner.step([_prompt(0)])[0].token_id
    decode = Row(0, 10, [token], RowSampling(GREEDY, 1))
    expected = runner.logits([decode])
    runner.kv_pool[:, runner.slot_table[0, 11:].unique().long()] = torch.nan
    assert torch.equal(runner.logits([decode]), expected)
    runner.kv_pool.zero_()


def test_a_poisoned_sequence_leaves_its_neighbours_alone(runner: TorchRunner) -> None:
    """Embeddings that are no numbers give that row some id, and the others what they would have said anyway."""
    bad = Row(0, 0, [0] * 20, RowSampling(GREEDY, 0), [VisionRows(0, 0, 20, torch.full((20, 48), torch.nan))])
    healthy = _prompt(1)
    expected = runner.step([healthy])
    poisoned, after = runner.step([bad, healthy])
    assert 0 <= poisoned.token_id < runner.vocab_size
    assert [after] == expected
    tokens: list[SampledToken] = runner.step(
        [Row(0, 20, [poisoned.token_id], RowSampling(GREEDY, 1)), Row(1, 10, [after.token_id], RowSampling(GREEDY, 1))]
    )
    assert tokens[1:] == runner.step([Row(1, 10, [after.token_id], RowSampling(GREEDY, 1))])
    runner.kv_pool.zero_()


def test_the_type_that_a_cpu_serves_in_takes_the_same_steps(tiny_model: Path) -> None:
    """bfloat16 takes weights laid out for oneDNN: chunks without a token, single rows and pictures work as well."""
    runner = load_runner(EngineConfig(str(tiny_model), dtype="bfloat16", threads=1, kv_tokens=200, max_running=2))
    runner.slot_table[0, :20] = torch.arange(1, 21)
    picture = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    embeddings = runner.encode([picture])[0]
    assert embeddings.dtype is torch.bfloat16
    assert runner.step([Row(0, 0, [0] * 8, None, [VisionRows(0, 0, 8, embeddings)])]) == []
    token = runner.step([Row(0, 8, [40, 41], FIRST)])[0].token_id
    assert 0 <= runner.step([Row(0, 10, [token], RowSampling(GREEDY, 1))])[0].token_id < 512


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_layers_laid_out_for_the_processor_equal_plain_ones(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    layer = Linear(weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(layer(x), exact.bfloat16(), atol=1e-2, rtol=1e-2)
    for approximate in ("tanh", "none"):
        expected = F.gelu(exact, approximate=approximate).bfloat16()
        torch.testing.assert_close(layer.gelu(x, approximate), expected, atol=1e-2, rtol=1e-2)


def test_decode_speed_runs_and_refuses_what_does_not_fit(runner: TorchRunner) -> None:
    assert decode_steps_per_s(runner, rows=2, context=8, steps=3) > 0
    with pytest.raises(ValueError, match="do not fit"):
        decode_steps_per_s(runner, rows=4, context=200, steps=3)


def test_loading_does_not_import_transformers(tiny_model: Path) -> None:
    """It would take seconds at every start."""
    program = (
        "import sys; from engine.load import load_runner; from engine.config import EngineConfig;"
        f"load_runner(EngineConfig({str(tiny_model)!r}));"
        "sys.exit(' '.join(sys.modules.keys() & {'transformers', 'compressed_tensors'}) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_tells_of_its_progress_at_every_layer(family: str, tmp_path: Path) -> None:
    """So that a picture which takes a CPU minutes is not taken for a hang."""
    checked = Checked(FAMILIES[family](tmp_path))
    request = checked.request("picture before text", max_tokens=1)
    heard: list[None] = []
    checked.runner.report_to(lambda: heard.append(None))
    checked.runner.encode([pixels_of(item.pixels) for item in request.media])
    num_layers = len(checked.runner.encoder.layers)  # type: ignore[attr-defined]
    assert len(heard) == num_layers
    checked.answer(request)
    assert len(heard) == 2 * num_layers + checked.runner.model.config.num_layers
