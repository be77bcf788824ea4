"""The largest picture that a family allows, and contexts of 32k tokens: served as transformers computes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_models import FAMILIES
from tiny_qwen2_vl import tiny_qwen2_vl
from tiny_qwen3_vl import tiny_qwen3_vl

from engine.config import EngineConfig
from engine.core import Engine
from engine.limits import with_vision_cache
from preprocess.families import largest_item_tokens
from preprocess.wire import Admitted, Prepared
from server.offline import Beholder
from tests.engine.family_parity import Checked, picture, pixels_of, run, user
from tests.goldens.coded_clips import CodedClip

CONTEXT = 32_768
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
"""So that attention over 32k tokens takes seconds."""

LANGUAGE_MODELS = {
    "smolvlm": {**SMALL, "head_dim": 16},
    "qwen2_5_vl": {**SMALL, "num_attention_heads": 3},  # its heads share the hidden size
    "qwen3_vl": SMALL,
    "qwen3_vl_moe": SMALL,
}
"""One family for each; the others have one of these.

No head is narrower than 16: where it is 8, some processors' float32 products add up 32k terms one after the other,
transformers' no less than ours."""


def edited(folder: Path, name: str, **changes: object) -> None:
    """Fields of a JSON file replaced."""
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_picture_that_a_family_allows_is_served(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path, text={"max_position_embeddings": 8192})
    if family.startswith("qwen"):
        least, most = 32 * 32, 640 * 640
        size = {"shortest_edge": least, "longest_edge": most}
        edited(folder, "preprocessor_config.json", size=size, min_pixels=least, max_pixels=most)
    else:
        edited(folder, "preprocessor_config.json", size={"longest_edge": 16 * 32}, do_image_splitting=True)
    checked = Checked(folder, kv_tokens=8192)
    largest = largest_item_tokens(checked.preparer._family)
    seen = 0
    for width, height in ((900, 900), (1500, 500), (20, 3000)):
        prepared = checked.prepare([user(picture(1, width, height), "What is this?")], max_tokens=2)
        assert isinstance(prepared, Prepared)
        request = prepared.request
        engine = Engine(with_vision_cache(EngineConfig(str(folder), check=True), checked.runner), checked.runner)
        assert isinstance(engine.submit(request, pixels_of), Admitted)
        ids = run(engine)["r"]
        assert int(checked.reference_logits(request, ids[:1])[-1].argmax()) == ids[1]
        seen = max(seen, request.media[0].num_tokens)
    assert largest > 1000
    assert largest * 0.9 < seen <= largest


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_vl": ({"patch_size": 14, "min_pixels": 3136, "max_pixels": 12_845_056}, 107 * 71),
    "qwen2_5_vl": ({"patch_size": 14, "min_pixels": 3136, "max_pixels": 12_845_056}, 107 * 71),
    "qwen3_vl": ({"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}, 94 * 62),
}
"""Limits of published folders, and vision tokens of 3000 × 2000 pixels."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_small_models_pictures_keep_their_size_on_a_cpu_unless_asked_otherwise(family: str, tmp_path: Path) -> None:
    """Six megapixels with default options: the pixels are transformers'."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits, expected_tokens = PUBLISHED[family]
    patch = limits["patch_size"]
    make = tiny_qwen3_vl if family == "qwen3_vl" else partial(tiny_qwen2_vl, model_type=family)
    folder = make(tmp_path, text={**SMALL, "num_attention_heads": 3}, vision={"patch_size": patch})
    edited(folder, "video_preprocessor_config.json", patch_size=patch)
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    reference = Qwen2VLImageProcessorPil.from_pretrained(folder)
    seen: list[torch.Tensor] = []

    def encode(pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What large pictures look like within is proven above; here it would take a minute."""
        seen.extend(pixels)
        return [torch.zeros(item.shape[1] * item.shape[2] // (2 * patch) ** 2, width) for item in pixels]

    with Beholder(folder, dtype="float32", threads=1) as beholder:
        runner: Any = beholder._engine._execution._runner
        width = runner.embedding_bytes // 4
        runner.encode = encode
        norm = beholder._preparer.profile.normalisation
        mean, std = torch.tensor(norm.mean), torch.tensor(norm.std)
        image = Image.fromarray(CodedClip(100, Fraction(10), 3000, 2000).frame(1))
        (info,) = beholder.caption(image, "?", max_tokens=1).images
        made = reference(image, return_tensors="pt")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        assert info.num_tokens == rows * columns // 4 == expected_tokens
        ours = (seen.pop()[0].float() * norm.scale - mean) / std  # (height, width, 3)
        cut = ours.view(rows // 2, 2, patch, columns // 2, 2, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
        theirs = made["pixel_values"].view(rows * columns, 3, 2, patch, patch)[:, :, 0]
        torch.testing.assert_close(cut.reshape(theirs.shape), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_a_context_of_32k_tokens_is_served(family: str, tmp_path: Path) -> None:
    checked = Checked(FAMILIES[family](tmp_path, text=LANGUAGE_MODELS[family]), kv_tokens=CONTEXT)
    word = "What is written on the second sign? "
    once = checked.prepare([user(word)])
    twice = checked.prepare([user(word * 2)])
    assert isinstance(once, Prepared)
    assert isinstance(twice, Prepared)
    length = twice.request.num_prompt_tokens - once.request.num_prompt_tokens
    text = word * ((CONTEXT - 400) // length)
    prepared = checked.prepare([user(text, picture(1, 60, 60), "What is this?")], max_tokens=4)
    assert isinstance(prepared, Prepared)
    request = prepared.request
    assert CONTEXT - 500 < request.num_prompt_tokens < CONTEXT - 4
    got = checked.answer(request, chunk=4096)
    expected = checked.reference_logits(request, got.ids[:-1])
    torch.testing.assert_close(got.logits, expected, atol=1e-4, rtol=1e-5)
