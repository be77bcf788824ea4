"""Qwen2-VL and Qwen2.5-VL against transformers: encoders on every small grid, and folders as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from clips import clip
from safetensors.torch import load_file, save_file
from tiny_qwen2_vl import PATCH_SIZE, tiny_qwen2_vl

from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.errors import ModelError
from preprocess.vision import qwen2_vl
from preprocess.vision.qwen2_vl import window_order
from preprocess.wire import GenerationOptions, Job, Lease, Message, Prepared, Question, SamplingParams, VideoPart
from tests.engine.family_parity import Checked, picture, pixels_of

SIDE = 2 * PATCH_SIZE
FAMILIES = ["qwen2_vl", "qwen2_5_vl"]


@pytest.fixture(scope="module", params=FAMILIES)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The tiny model, loaded here and there."""
    return Checked(tiny_qwen2_vl(tmp_path_factory.mktemp("tiny"), model_type=request.param))


def random_items(*sizes: tuple[int, int], frames: int, seed: int = 0) -> list[torch.Tensor]:
    """uint8 items of so many rows and columns of tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(frames, rows * SIDE, columns * SIDE, 3) for rows, columns in sizes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


def expected_of(checked: Checked, items: list[torch.Tensor]) -> list[torch.Tensor]:
    """transformers' embeddings, of all items at once."""
    patches, grids = checked.patches([checked.normalised(item) for item in items])
    with torch.inference_mode():
        return list(checked.reference.get_image_features(patches, grids, return_dict=True).pooler_output)


@pytest.mark.parametrize("frames", [1, 2])
def test_encoders_equal_transformers_on_every_small_grid(checked: Checked, frames: int) -> None:
    """Windows of 2 × 2 tokens, whole and cut off at either edge or both; pictures of one size and of many."""
    sizes = [(rows, columns) for rows in range(1, 6) for columns in range(1, 6)] + [(1, 13), (9, 1), (2, 3), (2, 3)]
    items = random_items(*sizes, frames=frames)
    for got, expected in zip(checked.runner.encode(items), expected_of(checked, items), strict=True):
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-5)


def test_whole_blocks_inside_an_mlp_change_nothing(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: 44 are filled up to 64 with zeros in Qwen2.5-VL."""
    items = random_items((3, 5), (4, 4), frames=1)
    monkeypatch.setattr(qwen2_vl, "_BLOCKS", {"cpu": 64})
    filled = load_runner(EngineConfig(str(checked.folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
    assert isinstance(filled, TorchRunner)
    if isinstance(mlp := filled.encoder.layers[0].mlp, qwen2_vl.GatedMLP):  # type: ignore[attr-defined]
        assert mlp.gate_up.outputs == 2 * 64
    for got, expected in zip(filled.encode(items), expected_of(checked, items), strict=True):
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-5)


def test_large_pictures_go_through_in_slices_without_a_difference(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = random_items((5, 7), (5, 7), (5, 7), frames=1)
    whole = checked.runner.encode(items)
    monkeypatch.setattr(qwen2_vl, "_SLICE", 13)
    monkeypatch.setattr(qwen2_vl, "MAX_PATCHES", 1)
    for got, expected in zip(checked.runner.encode(items), whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_windows_are_those_of_the_reference(window: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    for rows in range(1, 10):
        for columns in range(1, 10):
            order, windows = window_order(rows, columns, window, patches=4)
            grid = torch.tensor([[1, 2 * rows, 2 * columns]])
            index, ends = get_vision_window_index(grid, 2, window * 28, 14)
            expected = {frozenset(part.tolist()) for part in torch.split(index, (ends.diff() // 4).tolist())}
            sizes = [size // 4 for count, size in windows for _ in range(count)]
            assert {frozenset(part.tolist()) for part in torch.split(order, sizes)} == expected
            assert len(windows) <= 4


def test_pictures_that_fill_no_token_are_refused_by_the_encoder(checked: Checked) -> None:
    with pytest.raises(ValueError, match="sides in 16 pixels"):
        checked.runner.encode([torch.zeros((1, SIDE, SIDE + PATCH_SIZE, 3), dtype=torch.uint8)])
    with pytest.raises(ValueError, match="3 frames"):
        checked.runner.encode([torch.zeros((3, SIDE, SIDE, 3), dtype=torch.uint8)])


# ---- folders ---------------------------------------------------------------------------------------------------------


def published(folder: Path) -> Path:
    """A folder with its files in the spelling of 2024: one flat config.json, one file for both processors."""
    config = json.loads((folder / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    for name in ("dtype", "layer_types", "model_type", "pad_token_id"):
        text.pop(name, None)
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    for name in ("model_type", "rope_parameters", "hidden_act", "in_channels", "initializer_range"):
        vision.pop(name, None)
    vision |= {"in_chans": 3, "spatial_patch_size": vision["patch_size"]}
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    image = json.loads((folder / "preprocessor_config.json").read_text())
    image |= {"size": {"max_pixels": image["max_pixels"], "min_pixels": image["min_pixels"]}}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").unlink()
    return folder


def renamed(folder: Path) -> Path:
    """A folder whose tensors have the names that they have in transformers' modules."""
    tensors = load_file(folder / "model.safetensors")
    names = {
        name: name
        if name.startswith("lm_head")
        else f"model.{name}"
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1)
        for name in tensors
    }
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("edit", [published, renamed])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_spelling_loads(model_type: str, tied: bool, edit: Any, tmp_path: Path) -> None:
    checked = Checked(edit(tiny_qwen2_vl(tmp_path, model_type=model_type, tied=tied)))
    for case in ("pictures and clips", "text only"):
        request, expected = checked.expected(case)
        got = checked.answer(request)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-5)
        assert got.ids == expected.ids


@pytest.mark.parametrize(
    ("model_type", "vision", "words"),
    [
        ("qwen2_vl", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2_vl", {"model_type": "qwen2_5_vl"}, "model_type"),
        ("qwen2_vl", {"in_chans": 4}, "in_chans"),
        ("qwen2_5_vl", {"window_size": 15}, "at least 16"),
        ("qwen2_5_vl", {"fullatt_block_indexes": "all"}, "fullatt_block_indexes"),
        ("qwen2_5_vl", {"num_heads": 3}, "num_heads"),
    ],
)
def test_an_encoder_that_is_not_there_is_refused(
    model_type: str, vision: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = tiny_qwen2_vl(tmp_path, model_type=model_type)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= vision
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64))


def test_bfloat16_stays_near_float32(checked: Checked) -> None:
    runner = load_runner(EngineConfig(str(checked.folder), dtype="bfloat16", threads=1, kv_tokens=64, max_running=2))
    assert isinstance(runner, TorchRunner)
    items = random_items((3, 5), (4, 4), frames=1)
    for got, expected in zip(runner.encode(items), checked.runner.encode(items), strict=True):
        assert torch.nn.functional.cosine_similarity(got.float(), expected).min() > 0.99


def test_answers_to_questions_are_as_likely_as_in_transformers(checked: Checked) -> None:
    """Each place where answers part is a prompt of its own, with the positions of the pictures before it."""
    question = Question(" Is it red or reddish?", [["red"], ["reddish"], ["blue"]])
    shown = [picture(1, 90, 60), VideoPart(clip("mp4", 60), max_frames=4)]
    job = Job("r", [Message("user", list(shown))], GenerationOptions(), Lease(), 0.0, questions=[question])
    prepared = checked.preparer.prepare(job)
    assert isinstance(prepared, Prepared), prepared
    assert len(prepared.branches) >= 2
    engine = checked.engine(chunk=7, prefix_cache=True)
    for index, branch in enumerate(prepared.branches):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, score_ids=branch.score_ids)
        request = msgspec.structs.replace(
            prepared.request, request_id=f"b{index}", prompt_ids=branch.prompt_ids, sampling=sampling
        )
        engine.submit(request, pixels_of)
        events = [event for _ in range(50) for told in engine.step() for event in getattr(told, "events", [])]
        got = [logprob for event in events for part in event.logprobs for _, logprob in part.top]
        expected = checked.reference_logits(request, [])[0].log_softmax(-1)[branch.score_ids]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("frames", [1, 3])
def test_any_number_of_frames_may_be_one_item(frames: int, tmp_path: Path) -> None:
    """Of one frame alone the encoder cannot tell whether it is a picture."""
    together = {"temporal_patch_size": frames}
    checked = Checked(tiny_qwen2_vl(tmp_path, vision=together, image=together, video=together))
    case = "pictures and clips" if frames > 1 else "several pictures"
    request, expected = checked.expected(case)
    torch.testing.assert_close(checked.answer(request, chunk=9).logits, expected.logits, atol=1e-4, rtol=1e-5)
    items = checked.request("clip").media
    assert len(items) == 4 // frames  # of two seconds at two a second
    settings = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": 0.3}))
    if frames > 1:
        load_runner(EngineConfig(str(tmp_path), dtype="float32", threads=1, kv_tokens=64))
        return
    with pytest.raises(ModelError, match="cannot tell a frame from a picture"):
        load_runner(EngineConfig(str(tmp_path), dtype="float32", threads=1, kv_tokens=64))
