"""The published models' own configurations ask for the tensors that transformers' models have, under published names.

No weights: both sides are made on torch's device that holds none, with few layers of the language model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.load import FAMILIES
from preprocess.blocks.fields import Fields
from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder
from tests.engine.published_configs import CONFIGS, Config, image_processor

NUM_LAYERS = 2


class NamedTensors:
    """What models ask of a `Checkpoint`; `asked` takes note of it."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.folder = folder
        self.dtype = torch.bfloat16
        self.device = torch.device("meta")
        self.config = Fields(json.loads((folder / "config.json").read_text()), "config.json: ")
        self.shapes = shapes
        self.asked: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked[name] = tuple(shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def weight(self, module: str, shape: tuple[int, int], *, kind: str = "Linear") -> torch.Tensor:
        return self.tensor(f"{module}.weight", shape)

    def integers(self, module: str, *, kind: str = "Linear") -> None:
        return None


def _published(model_type: str, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A tensor of transformers' module as the hub's folders have it."""
    if model_type.startswith("qwen2"):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual."), shape
    if "experts." in name:  # inputs before outputs
        return name, (shape[0], shape[2], shape[1])
    return name, shape


def _language(model_type: str) -> str:
    """Where transformers has the language model."""
    return "language_model" if model_type.startswith("qwen") else "text_model"


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config: Config = json.loads(json.dumps(CONFIGS[request.param]))
    config.get("text_config", config)["num_hidden_layers"] = NUM_LAYERS
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_processor(config)))
    return tmp_path


def test_every_tensor_is_asked_for_by_its_published_name_and_shape(folder: Path) -> None:
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        reference = transformers.AutoModelForImageTextToText.from_config(config)
    shapes = dict(
        _published(config.model_type, name, tuple(tensor.shape)) for name, tensor in reference.state_dict().items()
    )
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    checkpoint: Any = NamedTensors(folder, shapes)
    decoder = FAMILIES[config.model_type].language(checkpoint)
    FAMILIES[config.model_type].encoder(checkpoint)
    assert checkpoint.asked == shapes
    text = config.get_text_config()
    assert decoder.config.max_positions == text.max_position_embeddings
    assert decoder.config.rms_norm_eps == text.rms_norm_eps
    assert decoder.config.rope.theta == text.rope_parameters["rope_theta"]
    attention = dict(reference.named_modules())[f"model.{_language(config.model_type)}.layers.0.self_attn"]
    assert decoder.config.head_dim == attention.head_dim


def test_their_processors_settings_fit_their_encoders(folder: Path) -> None:
    family = load_family(ModelFolder(folder))
    picture = family.layout(4000, 3000, "auto")
    assert 500 < picture.num_tokens <= largest_item_tokens(family) <= 16_384
    assert (family.clips is not None) == (family.name != "idefics3")
