"""Qwen3-VL and Qwen3-VL-MoE against transformers: the encoder on every small grid, folders as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen3_vl import PATCH_SIZE, tiny_qwen3_vl

from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.errors import ModelError
from preprocess.vision import qwen3_vl
from preprocess.vision.qwen3_vl import stretch
from tests.engine.family_parity import Checked

SIDE = 2 * PATCH_SIZE


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The tiny model, loaded here and there."""
    return Checked(tiny_qwen3_vl(tmp_path_factory.mktemp("tiny")))


def random_items(*sizes: tuple[int, int], frames: int) -> list[torch.Tensor]:
    """uint8 items of so many rows and columns of tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(frames, rows * SIDE, columns * SIDE, 3) for rows, columns in sizes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


@pytest.mark.parametrize("frames", [1, 2])
def test_encoder_and_taps_equal_transformers_on_every_small_grid(checked: Checked, frames: int) -> None:
    """Smaller than the 5 × 5 learned positions, larger, and narrow; pictures of one size and of many."""
    sizes = [(rows, columns) for rows in range(1, 5) for columns in range(1, 5)] + [(1, 13), (9, 1), (2, 3), (2, 3)]
    items = random_items(*sizes, frames=frames)
    patches, grids = checked.patches([checked.normalised(item) for item in items])
    with torch.inference_mode():
        found = checked.reference.get_image_features(patches, grids, return_dict=True)
        expected = torch.cat([torch.cat(list(found.pooler_output)), *found.deepstack_features], dim=1)
    torch.testing.assert_close(torch.cat(checked.runner.encode(items)), expected, atol=3e-5, rtol=1e-5)


def test_large_pictures_go_through_in_slices_without_a_difference(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = random_items((5, 7), (5, 7), (5, 7), frames=1)
    whole = checked.runner.encode(items)
    monkeypatch.setattr(qwen3_vl, "_SLICE", 13)
    monkeypatch.setattr(qwen3_vl, "MAX_PATCHES", 1)
    for got, expected in zip(checked.runner.encode(items), whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", [1, 2, 5, 48])
@pytest.mark.parametrize("count", [1, 2, 4, 48, 90])
def test_a_line_of_learned_positions_is_stretched_from_end_to_end(count: int, side: int) -> None:
    neighbours, shares = stretch(torch.arange(count), count, side)
    table = torch.rand(side, 3, generator=torch.Generator().manual_seed(1))
    stretched = (table[neighbours] * shares.unsqueeze(2)).sum(0)
    expected = torch.nn.functional.interpolate(table.T[None], size=count, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(stretched, expected)


def test_pictures_that_fill_no_token_are_refused_by_the_encoder(checked: Checked) -> None:
    with pytest.raises(ValueError, match="sides in 16 pixels"):
        checked.runner.encode([torch.zeros((1, SIDE, SIDE + PATCH_SIZE, 3), dtype=torch.uint8)])
    with pytest.raises(ValueError, match="3 frames"):
        checked.runner.encode([torch.zeros((3, SIDE, SIDE, 3), dtype=torch.uint8)])


# ---- folders ---------------------------------------------------------------------------------------------------------


def published(folder: Path) -> Path:
    """A folder in the spelling of 2025: rotation in two places, experts with inputs before outputs, other names."""
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": int(rope["rope_theta"]),
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": rope["mrope_section"], "rope_type": "default"},
        "attention_dropout": 0.0,
    }
    if "num_local_experts" in text:
        text |= {"num_experts": text.pop("num_local_experts"), "norm_topk_prob": True}
    vision["model_type"] = config["model_type"]
    for name in ("rope_parameters", "dtype", "initializer_range"):
        vision.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_published_folder_loads(experts: bool, tied: bool, tmp_path: Path) -> None:
    checked = Checked(published(tiny_qwen3_vl(tmp_path, experts=experts, tied=tied)))
    for case in ("pictures and clips", "text only"):
        request, expected = checked.expected(case)
        got = checked.answer(request)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-5)
        assert got.ids == expected.ids


def test_a_model_may_have_no_taps(tmp_path: Path) -> None:
    checked = Checked(tiny_qwen3_vl(tmp_path, vision={"deepstack_visual_indexes": []}))
    request, expected = checked.expected("several pictures")
    torch.testing.assert_close(checked.answer(request, chunk=3).logits, expected.logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("vision_config", {"hidden_act": "silu"}, "hidden_act"),
        ("vision_config", {"model_type": "qwen2_vl"}, "model_type"),
        ("vision_config", {"in_channels": 4}, "in_channels"),
        ("vision_config", {"num_heads": 3}, "num_heads"),
        ("vision_config", {"num_position_embeddings": 24}, "a square number"),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, "ascending layer indices below depth 4"),
        ("vision_config", {"deepstack_visual_indexes": [0, 4]}, "ascending layer indices below depth 4"),
        ("vision_config", {"deepstack_visual_indexes": "all"}, "ascending layer indices"),
        ("vision_config", {"out_hidden_size": 40}, "shape"),
        ("text_config", {"model_type": "qwen3_vl_moe_text"}, "model_type"),
        ("text_config", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'"),
    ],
)
def test_a_model_that_is_not_there_is_refused(section: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = tiny_qwen3_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config[section] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64))


@pytest.mark.parametrize("experts", [False, True])
def test_bfloat16_stays_near_float32(experts: bool, tmp_path: Path) -> None:
    checked = Checked(tiny_qwen3_vl(tmp_path, experts=experts))
    runner = load_runner(EngineConfig(str(tmp_path), dtype="bfloat16", threads=1, kv_tokens=512, max_running=2))
    assert isinstance(runner, TorchRunner)
    items = random_items((3, 5), (4, 4), frames=1)
    for got, expected in zip(runner.encode(items), checked.runner.encode(items), strict=True):
        assert torch.nn.functional.cosine_similarity(got.float(), expected).min() > 0.99
    request, expected_answer = checked.expected("pictures and clips")
    checked.runner = runner
    logits = checked.answer(request).logits[0]
    assert torch.nn.functional.cosine_similarity(logits, expected_answer.logits[0], dim=0) > 0.98
