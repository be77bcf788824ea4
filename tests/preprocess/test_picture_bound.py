"""Pictures and frames are made smaller where an encoder would attend over too much at once."""

from __future__ import annotations

import json
from math import isqrt
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.config import PictureBound
from preprocess.families import largest_item_tokens, load_family
from preprocess.families.encoder_cost import EncoderCost
from preprocess.model_folder import ModelFolder
from server.settings import CPU_ENCODER_OPERATIONS, Settings

SIZES = [(4000, 4000), (3000, 500), (500, 3000), (30, 30), (64, 5000)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("qwen")])
@pytest.mark.parametrize("most", [9, 20, 10_000])
def test_no_item_is_larger_than_the_bound(family: str, most: int, tmp_path: Path) -> None:
    folder = ModelFolder(FAMILIES[family](tmp_path))
    own, bounded = load_family(folder), load_family(folder, PictureBound(most))
    assert own.clips is not None
    assert bounded.clips is not None
    for width, height in SIZES:
        pictures = (own.layout(width, height, "high"), bounded.layout(width, height, "high"))
        frames = (own.clips.layout(width, height, 4), bounded.clips.layout(width, height, 4))
        for before, after in (pictures, frames):
            narrow = max(width, height) // min(width, height) + 1  # a row of tokens at least
            assert after.num_tokens <= max(most, narrow)
            assert after == before or before.num_tokens > most
    assert bounded.max_pixel_bytes <= own.max_pixel_bytes
    assert largest_item_tokens(bounded) <= largest_item_tokens(own)


@pytest.mark.parametrize("family", ["smolvlm2", "idefics3"])
def test_tiles_keep_the_size_that_the_model_was_trained_for(family: str, tmp_path: Path) -> None:
    folder = ModelFolder(FAMILIES[family](tmp_path))
    assert load_family(folder, PictureBound(1, 1)).layout(900, 700, "high") == load_family(folder).layout(
        900, 700, "high"
    )


# ---- by the encoder's work -------------------------------------------------------------------------------------------

PUBLISHED = {
    "qwen2_vl": {"embed_dim": 1280, "depth": 32, "mlp_ratio": 4, "hidden_size": 1536},
    "qwen2_5_vl": {
        "hidden_size": 1280,
        "depth": 32,
        "intermediate_size": 3420,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "patch_size": 16},
}
"""Vision configurations of 2B, 3B and 2B, as published."""


@pytest.mark.parametrize(("family", "expected"), [("qwen2_vl", 1302), ("qwen2_5_vl", 1927), ("qwen3_vl", 1985)])
def test_a_processor_gets_as_many_tokens_as_the_published_encoders_take_it_minutes_for(
    family: str, expected: int, tmp_path: Path
) -> None:
    vision = {"spatial_merge_size": 2, **PUBLISHED[family]}
    config = {"model_type": family, "image_token_id": 1, "video_token_id": 2, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    image = {"min_pixels": 56 * 56, "max_pixels": 12_845_056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    folder = ModelFolder(tmp_path)
    bounded = load_family(folder, Settings().largest_picture)
    assert bounded.cost is not None
    assert bounded.cost.tokens_within(CPU_ENCODER_OPERATIONS) == expected
    assert bounded.layout(4000, 4000, "auto").num_tokens == isqrt(expected) ** 2
    own = load_family(folder)
    for width, height in ((1024, 768), (640, 480), (1280, 720)):
        assert bounded.layout(width, height, "auto") == own.layout(width, height, "auto")
    assert load_family(folder, Settings(device="cuda").largest_picture).layout(4000, 4000, "auto") == own.layout(
        4000, 4000, "auto"
    )


TAPS = {"qwen2_vl": 0, "qwen2_5_vl": 0, "qwen3_vl": 2 * 2 * 128 * (128 + 48), "qwen3_vl_moe": 2 * 2 * 128 * (128 + 48)}
"""Operations of DeepStack's two mergers a token."""


@pytest.mark.parametrize("family", TAPS)
def test_the_count_is_that_of_the_encoder_itself(family: str, tmp_path: Path) -> None:
    """As torch counts the products of its layers."""
    folder = FAMILIES[family](tmp_path)
    runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
    assert isinstance(runner, TorchRunner)
    cost = load_family(ModelFolder(folder)).cost
    assert cost is not None
    layers = runner.encoder.layers  # type: ignore[attr-defined]
    for tokens in (16, 64, 100):  # whole windows of 2 × 2
        side = isqrt(tokens) * 16
        counts: list[int] = []
        for part in (layers, []):
            runner.encoder.layers = part  # type: ignore[attr-defined]
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                runner.encode([torch.zeros((1, side, side, 3), dtype=torch.uint8)])
            counts.append(counter.get_total_flops())
        # Taps of Qwen3-VL come after layers, but belong to no layer.
        assert counts[0] - counts[1] - TAPS[family] * tokens == cost.operations(tokens)


def test_more_work_is_never_fewer_tokens() -> None:
    cost = EncoderCost(32, 4, 2048, 4, full_layers=2, window=16)
    for tokens in (1, 2, 3, 10, 1000, 16_384):
        assert cost.tokens_within(cost.operations(tokens)) == tokens
        assert cost.tokens_within(cost.operations(tokens) + 1) == tokens
        assert cost.tokens_within(cost.operations(tokens) - 1) == max(tokens - 1, 1)
