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
from tiny_models import FAMILIES
from tiny_smolvlm import tiny_smolvlm

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchPlan
from engine.batch import Row, RowSampling
from engine.config import EngineConfig
from engine.load import load_runner
from engine.models.decoder import DeepStack
from engine.models.experts import Experts
from engine.runner import TorchRunner
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


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_logits_are_the_decoders(family: str, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.gpu import skinny
    from engine.gpu.forward import FusedDecoder, Shown

    monkeypatch.setattr("engine.gpu.forward.is_skinny", lambda x, inputs: few)
    monkeypatch.setattr("engine.gpu.forward.is_skinny_for_heads", lambda x, inputs: few)
    for tiles in ("residual_tiles", "heads_tiles"):  # such small products would not be split
        cut = replace(getattr(skinny, tiles)(7, 64, 64), splits=2)
        monkeypatch.setattr(f"engine.gpu.forward.{tiles}", lambda *_, cut=cut: cut)
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
