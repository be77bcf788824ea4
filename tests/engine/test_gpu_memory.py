"""What is left free on a GPU beside the KV pool: worked out on the CPU, held against the device where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

import engine.gpu.memory
from engine.config import EngineConfig
from engine.gpu.memory import reserved_bytes, step_token_bytes
from engine.load import load_runner

GIB = 1 << 30


@pytest.fixture
def needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`reserved_bytes` of a tiny model by its options."""
    folder = FAMILIES["qwen3_vl"](tmp_path)
    loaded: Any = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
    monkeypatch.setattr(engine.gpu.memory, "picture_token_bytes", lambda encoder, device: 50_000)

    def of(largest: int = 100, free: int = 64 * GIB, guess_layers: int = 0, **options: Any) -> int:
        config = EngineConfig(str(folder), **options)
        device = torch.device("cuda")
        return reserved_bytes(
            config,
            loaded.model.config,
            loaded.encoder,
            largest=largest,
            free=free,
            dtype=torch.bfloat16,
            device=device,
            guess_layers=guess_layers,
        )

    return of


def test_more_is_reserved_for_larger_pictures_steps_and_caches(needs: Any) -> None:
    plain = needs()
    assert needs(largest=200) >= plain + 2 * 100 * 50_000
    assert needs(vision_cache_bytes=5 * GIB) > plain + 4 * GIB
    assert needs(max_batched_tokens=16_384) > plain
    assert needs(max_running=512) > needs(max_running=64)
    assert needs(max_context=1000) < needs(max_context=128_000)
    assert needs(speculation="none") < plain, "drafts have logits of their own"
    assert plain < needs(guess_layers=1) < needs(guess_layers=28) < plain + GIB, "guesses are graphs with logits, too"
    assert needs(free=128 * GIB) > plain, "a part of what is free is nobody's"
    assert plain < 7 * GIB


def test_a_steps_bound_is_near_what_was_measured() -> None:
    """Capturing a step of 64 + 4,096 tokens of Qwen3-VL-2B took 418 MiB on an H200."""
    from engine.models.qwen import qwen3_config
    from preprocess.blocks.fields import Fields

    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5e6}
    fields = {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "rope_parameters": rope,
    }
    bound = 4160 * step_token_bytes(qwen3_config(Fields(fields, "")), 3, torch.bfloat16)
    assert 418 << 20 < bound < 3 * (418 << 20)


@pytest.mark.parametrize("most", [1, 16, 64, 256, 512])
def test_what_is_kept_for_graphs_is_enough_for_all_that_are_captured(most: int) -> None:
    """Where small prompts are captured for either way to read their keys."""
    from tests.engine.plain_kernels import import_kernels

    import_kernels()
    from engine.gpu.step_graphs import StepGraphs
    from engine.gpu.step_sizes import checked_ahead, decode_sizes, most_graphs, prompt_sizes

    graphs: Any = StepGraphs.__new__(StepGraphs)
    graphs._decode_sizes, graphs._prompt_sizes = decode_sizes(most), prompt_sizes(most, 4096)
    graphs._attention = Twice()
    captured = len(graphs.sizes()) + len(checked_ahead(most))
    assert captured <= most_graphs(most, engine.gpu.memory.MOST_STEP_TOKENS) <= 1.1 * captured


class Twice:
    """Whose small prompts have two readers, whatever they are."""

    def reader(self, tokens: int, *, splits: bool) -> str:
        """See `FlashInferAttention`."""
        return "split" if splits else "hopper"
