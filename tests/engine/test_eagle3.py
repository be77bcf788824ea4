"""Heads in the layout of EAGLE-3: loaded by published names, equal to a plain reference however their text came in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_models import pack
from safetensors.torch import load_file, save_file
from tiny_heads import tiny_head
from tiny_smolvlm import tiny_smolvlm

from engine.batch import Row, RowSampling, VisionRows
from engine.config import EngineConfig
from engine.load import load_runner
from engine.models.eagle3 import Eagle3Config
from engine.runner import TorchRunner
from engine.speculation.drafter import DraftRow
from engine.speculation.torch_drafters import Head
from preprocess.blocks.fields import Fields
from preprocess.errors import ModelError
from preprocess.wire import SamplingParams
from tests.engine.eagle3_reference import Reference

LAYERS = 6
PICTURES = 2
TEXT = [(23 * index) % 400 + 30 for index in range(19)]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

SPELLINGS: dict[str, dict[str, Any]] = {
    "as published": {},
    "names with a prefix, a part of the vocabulary": {"prefix": "model.", "draft_vocab_size": 60},
    "the model's own embedding and output": {"has_embedding": False, "has_head": False},
    "a layer by number, layers by the place": {
        "layer": "layers.0",
        "fields": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5], "norm_before_residual": True},
    },
    "layers by their result": {"fields": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_smolvlm(tmp_path_factory.mktemp("model"), text={"num_hidden_layers": LAYERS})


def load(folder: Path, **options: Any) -> TorchRunner:
    config = EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=600, max_running=4, **options)
    runner = load_runner(config)
    assert isinstance(runner, TorchRunner)
    return runner


class Prompt:
    """Text, pictures and text, each on slots of its own."""

    def __init__(self, runner: TorchRunner, table_row: int, num_pictures: int) -> None:
        side = runner.encoder.image_size
        self.table_row = table_row
        self.ids = TEXT[: 2 + table_row]
        self.vision: list[VisionRows] = []
        self.seen: dict[int, torch.Tensor] = {}
        for content in range(num_pictures):
            generator = torch.Generator().manual_seed(10 * table_row + content)
            pixels = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8, generator=generator)
            embeddings = runner.encode([pixels])[0]
            self.vision.append(VisionRows(len(self.ids), 0, len(embeddings), embeddings))
            self.seen |= {len(self.ids) + index: row for index, row in enumerate(embeddings)}
            self.ids = [*self.ids, *[100_000 + index for index in range(len(embeddings))], *TEXT[: 3 + content]]
        self.ids = [*self.ids, *TEXT]
        slots = torch.randperm(99, generator=torch.Generator().manual_seed(table_row))[: len(self.ids) + 20]
        runner.slot_table[table_row, : len(slots)] = (1 + 100 * table_row + slots).int()

    def row(self, start: int, stop: int) -> Row:
        """What the model computes."""
        vision = []
        for part in self.vision:
            low, high = max(start, part.start), min(stop, part.start + part.count)
            if low < high:
                vision.append(VisionRows(low - start, low - part.start, high - low, part.embeddings))
        return Row(self.table_row, start, self.ids[start:stop], RowSampling(GREEDY, 0), vision)

    def draft_row(self, start: int, stop: int, *, asks: bool = True) -> DraftRow:
        """What the head computes."""
        vision = np.array([at in self.seen for at in range(start, stop)])
        return DraftRow(self.table_row, start, self.ids[start:stop], vision if vision.any() else None, asks=asks)


@torch.inference_mode()
def expected(folder: Path, head: Path, runner: TorchRunner, prompt: Prompt, count: int) -> list[Any]:
    """By transformers for what the model has, and by the reference for the head."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    table = model.get_input_embeddings().weight
    seen = prompt.seen
    embedded = torch.stack([seen[at] if at in seen else table[own] for at, own in enumerate(prompt.ids)])
    inner = model.model.text_model(inputs_embeds=embedded[None], output_hidden_states=True)
    fields = Fields(json.loads((head / "config.json").read_text()), "")
    layers = Eagle3Config.read(fields, num_target_layers=LAYERS).layers
    features = torch.cat([inner.hidden_states[index][0] for index in layers], -1)[:-1]
    reference = Reference(head, table, model.get_output_embeddings().weight)
    return reference.guess(features, prompt.ids, count, prompt.seen)


@pytest.mark.parametrize("chunk", [100, 5, 1])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_guesses_equal_the_reference(folder: Path, tmp_path: Path, spelling: str, chunk: int) -> None:
    """Several sequences with pictures, all of them in the same call, and the text in pieces."""
    head = tiny_head(tmp_path / "head", folder, **SPELLINGS[spelling])
    runner = load(folder, draft_head=str(head))
    drafter = runner.drafter
    assert isinstance(drafter, Head)
    prompts = [Prompt(runner, row, pictures) for row, pictures in enumerate((0, 2, 1))]
    for start in range(0, 60, chunk):
        rows = [p.row(start, min(start + chunk, len(p.ids) - 1)) for p in prompts if start < len(p.ids) - 1]
        if rows:
            runner.step(rows)
    cut = 1 + min(chunk, 9)  # the rest in one go
    assert len(drafter.forward([prompt.draft_row(1, cut, asks=False) for prompt in prompts], guessed=False)) == 0
    logits = drafter.forward([prompt.draft_row(cut, len(prompt.ids)) for prompt in prompts], guessed=False)
    wanted = [expected(folder, head, runner, prompt, 4) for prompt in prompts]
    for step in range(4):
        torch.testing.assert_close(logits, torch.stack([own[step][1] for own in wanted]), atol=3e-5, rtol=1e-4)
        rows = [
            DraftRow(prompt.table_row, len(prompt.ids) + step, [own[step][0]])
            for prompt, own in zip(prompts, wanted, strict=True)
        ]
        logits = drafter.forward(rows, guessed=True)


def test_layers_are_read_where_either_spelling_says() -> None:
    def layers(**fields: Any) -> tuple[int, ...]:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
        return Eagle3Config.read(Fields({**sizes, **fields}, ""), num_target_layers=36).layers

    name = "eagle_aux_hidden_state_layer_ids"
    assert layers() == layers(**{name: [2, 18, 33]}) == layers(eagle_config={name: [1, 17, 32]}) == (2, 18, 33)
    assert layers(eagle_config={name: [], "use_aux_hidden_state": True}) == (2, 18, 33)
    with pytest.raises(ModelError, match="layers of a model that has 36"):
        layers(**{name: [2, 18, 37]})
    with pytest.raises(ModelError, match="a list of layer indices"):
        layers(**{name: ["2"]})


def test_a_packed_head_is_what_its_weights_are(folder: Path, tmp_path: Path) -> None:
    """In 8 bits, as the bundled model is. Sizes that the packed format can hold."""
    head = tiny_head(tmp_path / "head", folder, has_embedding=False)
    packed, plain = pack(head, bits=8, group_size=0, symmetric=True)
    both = []
    for own in (packed, plain):
        runner = load(folder, draft_head=str(own))
        prompt = Prompt(runner, 0, 1)
        runner.step([prompt.row(0, len(prompt.ids) - 1)])
        assert runner.drafter is not None
        both.append(runner.drafter.forward([prompt.draft_row(1, len(prompt.ids))], guessed=False))
    torch.testing.assert_close(both[0], both[1], atol=1e-4, rtol=1e-4)


def test_the_head_in_the_models_folder_is_found(tmp_path: Path) -> None:
    model = tiny_smolvlm(tmp_path, text={"num_hidden_layers": LAYERS})
    assert load(model).drafter is None
    tiny_head(model / "head", model)
    assert isinstance(load(model).drafter, Head)
    assert isinstance(load(model, speculation="head").drafter, Head)
    assert load(model, speculation="ngram").drafter is None
    assert load(model, speculation="none").drafter is None
    assert not isinstance(load(model, draft_model=str(model)).drafter, Head)


def test_memory_of_a_token_counts_both(folder: Path, tmp_path: Path) -> None:
    head = tiny_head(tmp_path / "head", folder)
    plain, with_head = load(folder).facts()["kv_bytes"], load(folder, draft_head=str(head)).facts()["kv_bytes"]
    assert with_head == plain + 601 * (2 * 2 * 12 + 4 * 48) * 4  # type: ignore[operator]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ({"fields": {"hidden_size": 32}}, "hidden_size is 32, the model's is 48"),
        ({"fields": {"vocab_size": 100}}, "vocab_size is 100, the model's is "),
        ({"fields": {"num_hidden_layers": 2}}, "a head has one layer"),
        ({"draft_vocab_size": 60, "has_head": False}, "lm_head.weight is missing"),
        ({"fields": {"draft_vocab_size": 60}}, "lm_head.weight has shape"),
        ({"fields": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "fc.weight has shape"),
        ({"fields": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    folder: Path, tmp_path: Path, made: dict[str, Any], complaint: str
) -> None:
    head = tiny_head(tmp_path / "head", folder, **made)
    with pytest.raises(ModelError, match=complaint):
        load(folder, draft_head=str(head))


def test_tables_of_ids_are_checked(folder: Path, tmp_path: Path) -> None:
    head = tiny_head(tmp_path / "head", folder, draft_vocab_size=60)
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] + 600}, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t leads to ids outside vocab_size"):
        load(folder, draft_head=str(head))
    save_file({**tensors, "d2t": tensors["d2t"].float()}, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"d2t is torch\.float32, expected whole numbers"):
        load(folder, draft_head=str(head))
    save_file({name: tensor for name, tensor in tensors.items() if name != "d2t"}, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t is missing"):
        load(folder, draft_head=str(head))
