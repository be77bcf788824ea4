"""The head that comes with the bundled model: complete, small, read by the engine's own code, and worth having."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from preprocess.blocks.checkpoint import Checkpoint
from samples.training.dialogue import ENDS, UTTERANCE, Seen, Writer, load_tokenizer
from samples.training.evaluate import squashed
from samples.training.head.export import head_config, load, shape_of, target_table
from samples.training.model import BundledModel
from samples.training.model import load as load_model
from tests.samples.plain_head import PlainHead, Sizes

ASKED = {
    "kitchen.jpg": "Describe the picture in detail.",
    "gallery.jpg": "Write a museum placard for this.",
    "music.jpg": "List the objects as JSON.",
    "cafe.png": "Read the text in the picture. Answer with the text only.",
}
DRAFTS = 3
ACCEPTED = 2.8  # tokens a step; 3.04 when this was written


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads wait for each other at every small operation of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(samples: Path) -> Path:
    return samples / "model" / "head"


def test_the_folder_is_small_and_holds_what_its_recipe_writes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = config["eagle_aux_hidden_state_layer_ids"]
    assert config == head_config(shape_of(config), layers)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in layers]
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2_000_000


def test_the_engines_reader_takes_every_weight_packed(folder: Path) -> None:
    head, _ = load(folder)
    checkpoint = Checkpoint(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    for name, weight in head.state_dict().items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2:
            assert checkpoint.integers(module) is not None
            assert torch.equal(checkpoint.weight(module, tuple(weight.shape)).float(), weight)
        else:
            assert torch.equal(checkpoint.tensor(name, tuple(weight.shape)).float(), weight)
    checkpoint.finish()


def said(model: BundledModel, prompt: list[int], pixels: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """A greedy answer with its prompt, and what entered every layer at all of it, (tokens, layers, width)."""
    answer = model.generate([prompt], [pixels], ENDS, 48)[0]
    ids = torch.tensor([[*prompt, *answer, UTTERANCE]])
    entered: list[torch.Tensor] = []
    taps = [
        layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0][0]))
        for layer in model.model.text_model.layers
    ]
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    places = (ids.flatten() == 3).nonzero().flatten()
    model.hidden(ids, torch.arange(length)[None], mask, model.see(pixels).flatten(0, 1), places)
    for tap in taps:
        tap.remove()
    return ids[0].tolist(), torch.stack(entered, 1)


@torch.inference_mode()
def test_drafts_on_the_sample_pictures_are_accepted_as_often_as_was_recorded(samples: Path, folder: Path) -> None:
    """As serving would do it, in float32: rounds of drafts from the head's own tokens, the target's states after."""
    model, writer = load_model(samples / "model"), Writer(load_tokenizer(samples / "model"))
    trained, fused = load(folder)
    shape = trained.shape
    sizes = Sizes(shape.heads, shape.kv_heads, shape.head_dim)
    steps = tokens = 0
    for file, question in ASKED.items():
        with Image.open(samples / "pictures" / file) as image:
            small = squashed(np.asarray(image.convert("RGB")))
        pixels = torch.from_numpy(small.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        prompt = writer.prompt([("User", [Seen(), question])])
        ids, states = said(model, prompt, pixels)
        head = PlainHead(dict(trained.state_dict()), target_table(samples / "model"), sizes)
        place = len(prompt)  # the first token of the answer, which comes with the prompt
        for p in range(1, place):
            head.remember(states[p, 0], head.fuse(states[p - 1, fused]), p)
        while place < len(ids) - 1:
            drafted = head.round(states[place, 0], head.fuse(states[place - 1, fused]), place, DRAFTS)
            accepted = 0
            while accepted < len(drafted) and drafted[accepted : accepted + 1] == ids[place + 1 + accepted :][:1]:
                accepted += 1
            for p in range(place + 1, min(place + 1 + accepted, len(ids) - 1)):  # places now known for certain
                head.remember(states[p, 0], head.fuse(states[p - 1, fused]), p)
            steps, tokens = steps + 1, tokens + min(accepted + 1, len(ids) - 1 - place)
            place += 1 + accepted
    assert tokens / steps >= ACCEPTED
