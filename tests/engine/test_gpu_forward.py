"""The decoder in fused kernels gives what the decoder in torch layers gives, with many rows and with few: those go
through products of their own. Attention is torch's in both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import FAMILIES
from tiny_smolvlm import tiny_smolvlm

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchAttention, TorchPlan
from engine.batch import Row, RowSampling
from engine.config import EngineConfig
from engine.load import load_runner
from engine.models.decoder import DeepStack
from engine.models.experts import Experts
from engine.runner import TorchRunner
from engine.speculation.torch_drafters import Head
from preprocess.wire import SamplingParams
from tests.engine.gpu import KERNEL_DEVICE, needs_triton

pytestmark = needs_triton

GREEDY = RowSampling(SamplingParams(max_tokens=8, temperature=0.0), 0)


class ReadPlan:
    """What the fused decoder asks of a plan, from torch's: keys and values are in the pool already."""

    def __init__(self, plan: TorchPlan, pool: torch.Tensor, slots: torch.Tensor) -> None:
        self.slots = slots
        self._plan = plan
        self._pool = pool

    def read(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._plan.attend(layer, query, self._pool[layer][self.slots.long()])


MAKERS = {
    **{family: FAMILIES[family] for family in ("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")},
    "biases everywhere": partial(tiny_smolvlm, text={"attention_bias": True, "mlp_bias": True}),
}


def let_products_be(few: bool, patch: pytest.MonkeyPatch) -> None:
    """Of few rows or of many, whatever they have."""
    from engine.gpu import skinny

    patch.setattr("engine.gpu.forward.is_skinny", lambda x, inputs: few)
    patch.setattr("engine.gpu.forward.is_skinny_for_heads", lambda x, inputs: few)
    for tiles in ("residual_tiles", "heads_tiles"):  # such small products would not be split
        cut = replace(getattr(skinny, tiles)(7, 64, 64), splits=2)
        patch.setattr(f"engine.gpu.forward.{tiles}", lambda *_, cut=cut: cut)


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_logits_are_the_decoders(family: str, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.gpu.forward import FusedDecoder, Shown

    let_products_be(few, monkeypatch)
    folder = MAKERS[family](tmp_path)
    config = EngineConfig(str(folder), device=KERNEL_DEVICE, dtype="float32", kv_tokens=200, max_running=3)  # type: ignore[arg-type]
    runner = load_runner(config)
    assert isinstance(runner, TorchRunner)
    model = runner.model
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):
            weights = layer.mlp.gate_up, layer.mlp.down
            layer.mlp.stacked = tuple(torch.stack([linear.weight for linear in part]) for part in weights)  # type: ignore[assignment]
    for row in range(3):
        runner.slot_table[row, :60] = torch.arange(1 + 60 * row, 61 + 60 * row)
    ids = [(7 * index) % 400 + 30 for index in range(20)]
    runner.step([Row(0, 0, ids, GREEDY), Row(1, 0, ids[:9], GREEDY)])

    segments = [Segment(0, 20, 1), Segment(1, 9, 1), Segment(2, 0, 5)]
    positions = torch.tensor([20, 9, *range(5)], device=KERNEL_DEVICE)
    places = torch.tensor([0, 1, *[2] * 5], device=KERNEL_DEVICE)
    rotary = positions if model.config.rope.sections is None else torch.stack((positions, positions + 1, positions + 3))
    embedded = model.embed(torch.tensor([40, 50, *ids[:5]], device=KERNEL_DEVICE))
    width = model.config.hidden_size
    taps = torch.tensor(np.random.default_rng(1).normal(size=(2, 5, width)), dtype=torch.float32, device=KERNEL_DEVICE)
    ends = torch.tensor([0, 1, 6], device=KERNEL_DEVICE)
    with torch.inference_mode():
        plan = runner.attention.plan(segments, positions)
        seen = DeepStack(torch.arange(2, 7, device=KERNEL_DEVICE), taps)
        expected = model.logits(model.forward(embedded.clone(), rotary, plan, seen)[ends])
        keys = runner.kv_pool.clone()
        runner.kv_pool[:, runner.slot_table[places, positions].long()] = 0  # the fused kernels write it again
        read = ReadPlan(plan, runner.kv_pool, runner.slot_table[places, positions])
        fused = FusedDecoder(model, runner.kv_pool)
        for given in (seen, Shown(2, taps)):
            logits = fused.logits(embedded.clone(), rotary, read, given, ends)  # type: ignore[arg-type]
            error = (logits.double() - expected.double()).norm() / expected.double().norm()
            assert error < (1e-5 if KERNEL_DEVICE == "cpu" else 5e-3)  # tensor cores take float32 as tf32
    assert (runner.kv_pool - keys).abs().max() < 1e-2


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_what_a_head_guesses_by_is_what_its_layers_give(
    few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the last tokens of two texts, and for a guess behind each of them."""
    from engine.gpu.drafters import FusedHead
    from engine.gpu.guess_graphs import GuessStep

    let_products_be(few, monkeypatch)
    folder = tiny_smolvlm(tmp_path / "model")
    head = tiny_head(tmp_path / "head", folder, fields={"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "head_dim": 16})
    config = EngineConfig(
        str(folder),
        device=KERNEL_DEVICE,  # type: ignore[arg-type]
        dtype="float32",
        kv_tokens=200,
        max_running=2,
        draft_head=str(head),
    )
    runner = load_runner(config)
    assert isinstance(runner, TorchRunner)
    drafter, target = runner.drafter, runner.model
    assert isinstance(drafter, Head)
    for row in range(2):
        runner.slot_table[row, :60] = torch.arange(1 + 60 * row, 61 + 60 * row)
    ids = [(7 * index) % 400 + 30 for index in range(20)]
    runner.step([Row(0, 0, ids, GREEDY), Row(1, 0, ids[:4], GREEDY)])

    model = drafter.model
    attention = TorchAttention(drafter.pool, runner.slot_table)
    guesser = FusedHead(model, target, drafter.pool, drafter.told.features, 2)
    places = torch.tensor([0, 0, 0, 1, 1], device=KERNEL_DEVICE)
    positions = torch.tensor([1, 2, 3, 1, 2], device=KERNEL_DEVICE)
    ends = torch.tensor([2, 4], device=KERNEL_DEVICE)
    before = runner.slot_table[places, positions - 1]
    with torch.inference_mode():
        features = model.fuse(drafter.told.features[before.long()])
        segments, own_ends, is_first = [Segment(0, 1, 3), Segment(1, 1, 2)], ends, True
        for _ in range(2):
            token_ids = torch.tensor(ids[: len(places)], device=KERNEL_DEVICE)
            plan = attention.plan(segments, positions)
            hidden = model.forward((model.embedding or target.embedding)(token_ids), features, positions, plan)
            features = hidden[own_ends]
            expected = model.logits(features, target)
            entries = drafter.pool.clone()
            slots = runner.slot_table[places, positions]
            drafter.pool[:, slots.long()] = 0  # the fused kernels write it again
            read = ReadPlan(plan, drafter.pool, slots)
            step = GuessStep(token_ids, positions, read, before if is_first else None, ends if is_first else None)  # type: ignore[arg-type]
            logits = guesser.logits(step)
            error = (logits.double() - expected.double()).norm() / expected.double().norm()
            assert error < (1e-5 if KERNEL_DEVICE == "cpu" else 5e-3)  # tensor cores take float32 as tf32
            assert (drafter.pool - entries).abs().max() < 1e-2
            places, positions = torch.tensor([0, 1], device=KERNEL_DEVICE), torch.tensor([4, 3], device=KERNEL_DEVICE)
            segments, own_ends, is_first = [Segment(0, 4, 1), Segment(1, 3, 1)], torch.arange(2), False
