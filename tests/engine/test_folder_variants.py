"""Folders as people have them, edited by hand or saved by other programs, still answer as transformers does.

Each variant is a family's tiny folder with something changed. Pictures and ids are compared with the processor's, and
every logit with the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES

from tests.engine.family_parity import Checked

Edit = Callable[[Path], None]
Fields = dict[str, Any]

CASE: Final = "several pictures"
ALL: Final = ("smolvlm", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TIED: Final = ("smolvlm", "qwen2_vl", "qwen3_vl")
"""Their maker saves input and output embeddings as one tensor, all in one file."""
ONE_FILE: Final = (*TIED, "idefics3")


def _json(name: str, change: Callable[[Fields], object]) -> Edit:
    """Changes the object in a file."""

    def edit(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def _processor(**fields: Any) -> Edit:
    return _json("preprocessor_config.json", lambda settings: settings.update(fields))


def _text(**fields: Any) -> Edit:
    return _json("config.json", lambda config: config["text_config"].update(fields))


def _scaled(config: Fields, **scaling: Any) -> None:
    """The rotation in the spelling of older folders, with a longer context."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {**{name: rope[name] for name in rope if name != "rope_type"}, **scaling}


def _no_positions(config: Fields) -> None:
    del config["text_config"]["max_position_embeddings"]


def _tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "new", {"format": "pt"})  # not over the file itself: its tensors are mapped
        (folder / "new").replace(folder / "model.safetensors")

    return edit


def _table_as_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"lm_head.weight" if name.endswith("embed_tokens.weight") else name: x for name, x in tensors.items()}


YARN: Final = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, tuple[tuple[str, ...], Edit]] = {
    "one mean and deviation for all colours": (ALL, _processor(image_mean=0.4, image_std=0.3)),
    "switches that are null": (ALL, _processor(do_rescale=None, do_normalize=None)),
    "only normalised": (ALL, _processor(do_rescale=False, image_mean=[100, 110, 120], image_std=[50, 60, 70])),
    "only rescaled": (ALL, _processor(do_normalize=False, rescale_factor=0.01)),
    "another filter": (ALL, _processor(resample=0)),
    "bounds in both spellings": (
        ("qwen2_vl", "qwen3_vl"),
        _processor(min_pixels=32 * 32, max_pixels=64 * 64, size={"shortest_edge": 1, "longest_edge": 10**7}),
    ),
    "pictures keep their size first": (("smolvlm", "idefics3"), _processor(do_resize=False)),
    "pictures become oblongs first": (("smolvlm", "idefics3"), _processor(size={"height": 50, "width": 40})),
    "yarn, old spelling": (ALL, _json("config.json", lambda config: _scaled(config, **YARN))),
    "linear, old spelling": (ALL, _json("config.json", lambda config: _scaled(config, type="linear", factor=3.0))),
    "weights of experts that need not sum up": (("qwen3_vl_moe",), _text(norm_topk_prob=False)),
    "embeddings stored as the head": (TIED, _tensors(_table_as_head)),
    "parts that nobody knows": (ONE_FILE, _tensors(lambda tensors: {**tensors, "value_head.weight": torch.ones(3)})),
    "half precision": (ONE_FILE, _tensors(lambda tensors: {name: x.half() for name, x in tensors.items()})),
    "doubles": (ONE_FILE, _tensors(lambda tensors: {name: x.double() for name, x in tensors.items()})),
    "positions not said": (ALL, _json("config.json", _no_positions)),
}


@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, name) for name, (families, _) in VARIANTS.items() for family in families],
    ids=lambda value: value,
)
def test_a_variant_answers_as_transformers_does(family: str, variant: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    VARIANTS[variant][1](folder)
    checked = Checked(folder)
    request, expected = checked.expected(CASE)
    ids, pixels = checked.processed(CASE)
    assert np.frombuffer(request.prompt_ids, "<i8").tolist() == ids
    seen = checked.reference_media(request)["pixel_values"]
    torch.testing.assert_close(seen, pixels.float(), atol=1e-5, rtol=1e-5)  # of 8 bits where nothing is done to them
    got = checked.answer(request, chunk=7)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-5)
    assert got.ids == expected.ids


@pytest.mark.parametrize(("family", "positions"), [("smolvlm", 2048), ("qwen2_vl", 32_768), ("qwen3_vl", 128_000)])
def test_a_context_that_is_not_said_is_that_of_the_class(family: str, positions: int, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    VARIANTS["positions not said"][1](folder)
    checked = Checked(folder)
    assert checked.preparer.profile.max_context == checked.runner.model.config.max_positions == positions
    text = checked.reference.config.get_text_config()
    assert text.max_position_embeddings == positions
