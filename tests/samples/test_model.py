"""The training module computes what transformers computes, and the bundled folder is complete."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from samples.training.model import BundledModel, Shape, hf_config
from samples.training.quantise import QUANTIZATION_CONFIG

SMALL = Shape(
    vision_width=64, vision_hidden=96, vision_layers=2, vision_heads=2,
    width=64, hidden=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=100,
)  # fmt: skip


def test_logits_are_those_of_transformers_in_float32() -> None:
    torch.manual_seed(0)
    ours = BundledModel(SMALL).eval()
    theirs = SmolVLMForConditionalGeneration(SmolVLMConfig(**hf_config(SMALL))).float().eval()
    state = ours.state_dict()
    theirs.load_state_dict({**state, "lm_head.weight": state["model.text_model.embed_tokens.weight"]})
    ids = torch.tensor([[1, 7, *[3] * 64, 9, *[3] * 64, 11, 12]])
    pixels = torch.randn(2, 3, 256, 256)
    length = ids.shape[1]
    places = (ids.flatten() == 3).nonzero().flatten()
    with torch.inference_mode():
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        hidden = ours.hidden(ids, torch.arange(length)[None], mask, ours.see(pixels).flatten(0, 1), places)
        expected = theirs(input_ids=ids, pixel_values=pixels[None]).logits
        found = ours.logits(hidden)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_batch_of_prompts_is_answered_as_each_alone() -> None:
    torch.manual_seed(1)
    model = BundledModel(SMALL).eval()
    prompts = [[1, 5, *[3] * 64, 9], [1, 8, 8, 8, 20]]
    pictures = [torch.randn(1, 3, 256, 256), torch.zeros(0, 3, 256, 256)]
    together = model.generate(prompts, pictures, {2}, 6)
    alone = [model.generate([prompt], [shown], {2}, 6)[0] for prompt, shown in zip(prompts, pictures, strict=True)]
    assert together == alone


def test_the_folder_holds_the_frozen_configuration(samples: Path) -> None:
    config = json.loads((samples / "model" / "config.json").read_text())
    assert config.pop("quantization_config") == QUANTIZATION_CONFIG
    assert config == hf_config()


def test_the_folder_holds_every_weight_and_is_small_enough_for_git(samples: Path) -> None:
    with safe_open(samples / "model" / "model.safetensors", "pt") as weights:
        stored = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        for name, tensor in BundledModel().state_dict().items():
            if f"{name}_packed" in stored:
                rows, columns = tensor.shape
                assert stored[f"{name}_packed"] == [rows, columns // 4]
                assert stored[f"{name}_scale"] == [rows, 1]
                assert weights.get_tensor(f"{name}_shape").tolist() == [rows, columns]
            else:
                assert stored[name] == list(tensor.shape)
    folder = [path for name in ("model", "pictures", "clips") for path in (samples / name).iterdir()]
    assert sum(path.stat().st_size for path in folder) < 29_000_000
