"""Every family gives the same logits and the same greedy text as transformers, in float32 on random weights.

A new family joins by a line in `CASES`: a function that writes its folder, and optionally one that writes the folder
that transformers reads instead (where it cannot read ours).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_models import pack
from tiny_smolvlm import tiny_smolvlm

from engine.batch import Row, RowSampling, VisionRows
from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.wire import SamplingParams

IMAGE_ID = 3
NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """`make` writes our folder; `reference` the folder that transformers loads, by default the same."""

    make: Callable[[Path], Path]
    reference: Callable[[Path], Path] | None = None


def _edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def _old_spelling(config: dict[str, Any]) -> None:
    config["torch_dtype"] = config.pop("dtype")
    text = config["text_config"]
    del text["rope_parameters"]
    text["rope_theta"] = 5000.0
    text["rope_scaling"] = {
        "type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,  # the second of four waves is blended
    }


def _only_what_is_not_default(config: dict[str, Any]) -> None:
    for name in (
        "head_dim",
        "rope_parameters",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "rms_norm_eps",
        "model_type",
    ):
        del config["text_config"][name]
    for name in ("hidden_act", "layer_norm_eps", "num_channels", "model_type"):
        del config["vision_config"][name]
    del config["tie_word_embeddings"]
    del config["scale_factor"]


def _packed(*, bits: int, group_size: int, symmetric: bool) -> Case:
    def make(folder: Path) -> tuple[Path, Path]:
        return pack(tiny_smolvlm(folder), bits=bits, group_size=group_size, symmetric=symmetric)

    return Case(lambda folder: make(folder)[0], lambda folder: make(folder)[1])


LINEAR_ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
YARN_ROPE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}

CASES = {
    "smolvlm": Case(tiny_smolvlm),
    "idefics3": Case(lambda folder: tiny_smolvlm(folder, model_type="idefics3", seed=1)),
    "untied, sharded": Case(lambda folder: tiny_smolvlm(folder, tied=False, max_shard_size="40KB")),
    "all heads have keys": Case(lambda folder: tiny_smolvlm(folder, text={"num_key_value_heads": 6})),
    "one key head, linear rope": Case(
        lambda folder: tiny_smolvlm(folder, text={"num_key_value_heads": 1, "head_dim": 16, **LINEAR_ROPE})
    ),
    "seven patches a side, exact gelu": Case(
        lambda folder: tiny_smolvlm(folder, vision={"image_size": 56, "hidden_act": "gelu"})
    ),
    "pixels that fill no patch": Case(lambda folder: tiny_smolvlm(folder, vision={"image_size": 38})),
    "old spelling, llama3 rope": Case(lambda folder: _edited(tiny_smolvlm(folder), _old_spelling)),
    "defaults left out": Case(lambda folder: _edited(tiny_smolvlm(folder, tied=False), _only_what_is_not_default)),
    "biases everywhere": Case(
        lambda folder: tiny_smolvlm(folder, text={"attention_bias": True, "mlp_bias": True, "head_dim": 16})
    ),
    "yarn": Case(lambda folder: tiny_smolvlm(folder, text=YARN_ROPE)),
    "8 bits a channel": _packed(bits=8, group_size=0, symmetric=True),
    "4 bits a group, asymmetric": _packed(bits=4, group_size=16, symmetric=False),
}


@dataclass(frozen=True)
class Prompt:
    """`pictures` are uint8 (tiles, side, side, 3); `spans[i]`: (start, length) runs that picture i's tokens replace."""

    ids: list[int]
    pictures: list[torch.Tensor]
    spans: list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Picture:
    """Stands in a layout for a picture of `tiles` tiles, with text between their tokens."""

    tiles: int


LAYOUTS: dict[str, list[int | Picture]] = {
    "text": [9],
    "one picture": [2, Picture(1), 5],
    "several pictures": [Picture(1), 3, Picture(1), Picture(1), 4],
    "a split picture and a whole one": [1, Picture(5), 6, Picture(1), 2],
}
"""Prompts: a number is that many tokens of text."""


def _prompt(layout: Sequence[int | Picture], seed: int, *, tile: int, tokens_per_tile: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        ids: list[int] = torch.randint(30, 500, (count,), generator=generator).tolist()
        return ids

    ids, pictures, spans = [1], [], []
    for part in layout:
        if isinstance(part, int):
            ids += text(part)
            continue
        runs = []
        for _ in range(part.tiles):
            ids += text(2)
            runs.append((len(ids), tokens_per_tile))
            ids += [IMAGE_ID] * tokens_per_tile
        pictures.append(torch.randint(0, 256, (part.tiles, tile, tile, 3), dtype=torch.uint8, generator=generator))
        spans.append(runs)
        ids += text(1)
    return Prompt(ids, pictures, spans)


@dataclass(frozen=True)
class Loaded:
    """Our runner and transformers' model of one case."""

    runner: TorchRunner
    reference: Any
    tile: int
    tokens_per_tile: int

    def prompt(self, layout: str) -> Prompt:
        return _prompt(LAYOUTS[layout], seed=len(layout), tile=self.tile, tokens_per_tile=self.tokens_per_tile)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Loads each case once, for all tests of this module."""

    @cache
    def load_case(name: str) -> Loaded:
        from transformers import AutoModelForImageTextToText

        case = CASES[name]
        ours = case.make(tmp_path_factory.mktemp("ours"))
        theirs = ours if case.reference is None else case.reference(tmp_path_factory.mktemp("theirs"))
        runner = load_runner(EngineConfig(str(ours), dtype="float32", threads=1, kv_tokens=2048, max_running=8))
        assert isinstance(runner, TorchRunner)
        reference = AutoModelForImageTextToText.from_pretrained(theirs, dtype=torch.float32).eval()
        reference.generation_config.eos_token_id = None
        size = reference.config.vision_config.image_size
        if size == 56:
            size = 48  # not the trained size, so that position buckets matter
        patches = size // reference.config.vision_config.patch_size
        return Loaded(runner, reference, size, (patches // reference.config.scale_factor) ** 2)

    return load_case


def _pixel_values(prompt: Prompt) -> dict[str, torch.Tensor]:
    if not prompt.pictures:
        return {}
    tiles = torch.cat(prompt.pictures).permute(0, 3, 1, 2)[None]  # (1, tiles, 3, height, width)
    return {"pixel_values": (tiles.float() / 255 - 0.5) / 0.5}


def _place(runner: TorchRunner, table_row: int, length: int) -> None:
    """Gives a sequence scattered slots that no other row has."""
    share = (runner.num_slots - 1) // runner.max_rows
    order = torch.randperm(share, generator=torch.Generator().manual_seed(table_row))[:length]
    runner.slot_table[table_row, :length] = (1 + table_row * share + order).int()


def _chunk(prompt: Prompt, embeddings: list[torch.Tensor], row: int, start: int, stop: int) -> Row:
    """Positions [start, stop) of a prompt; a token is asked for where the prompt ends."""
    vision = []
    for runs, embedding in zip(prompt.spans, embeddings, strict=True):
        done = 0
        for first, length in runs:
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                vision.append(VisionRows(low - start, done + low - first, high - low, embedding))
            done += length
    # Above the vocabulary, as the radix tree's ids are: they must not be looked up.
    ids = [10**15 + at if token == IMAGE_ID else token for at, token in enumerate(prompt.ids)][start:stop]
    return Row(row, start, ids, RowSampling(GREEDY, 0) if stop == len(prompt.ids) else None, vision)


def _logits(runner: TorchRunner, prompt: Prompt, tokens: list[int], chunk: int, row: int = 0) -> torch.Tensor:
    """Logits (len(tokens) + 1, vocab) after the prompt and each of `tokens`: chunked prefill, then decode steps."""
    embeddings = runner.encode(prompt.pictures)
    size = len(prompt.ids)
    _place(runner, row, size + len(tokens))
    outputs = []
    for start in range(0, size, chunk):
        outputs.append(runner.logits([_chunk(prompt, embeddings, row, start, min(start + chunk, size))]))
    for index, token in enumerate(tokens):
        outputs.append(runner.logits([Row(row, size + index, [token], RowSampling(GREEDY, index + 1))]))
    return torch.cat(outputs)


def _reference(loaded: Loaded, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, and its logits at the same places from one full forward without any cache."""
    ids = torch.tensor([prompt.ids])
    pixels = _pixel_values(prompt)
    with torch.inference_mode():
        generated = loaded.reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **pixels
        )
        logits = loaded.reference(input_ids=generated, attention_mask=torch.ones_like(generated), **pixels).logits
    return generated[0, len(prompt.ids) :].tolist(), logits[0, len(prompt.ids) - 1 : -1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_equal_transformers(name: str, layout: str, load: Callable[[str], Loaded]) -> None:
    loaded = load(name)
    prompt = loaded.prompt(layout)
    tokens, expected = _reference(loaded, prompt)
    for chunk in (len(prompt.ids), 1, 3, 7):
        logits = _logits(loaded.runner, prompt, tokens[:-1], chunk)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
        assert logits.argmax(-1).tolist() == tokens
    assert len(set(tokens)) > 2, "a model that says one word over and over proves little"


@pytest.mark.parametrize("name", CASES)
def test_encoder_equals_transformers(name: str, load: Callable[[str], Loaded]) -> None:
    loaded = load(name)
    prompt = loaded.prompt("a split picture and a whole one")
    with torch.inference_mode():
        expected = loaded.reference.get_image_features(**_pixel_values(prompt)).pooler_output
    embeddings = torch.cat(loaded.runner.encode(prompt.pictures))
    torch.testing.assert_close(embeddings, expected.flatten(0, 1), atol=2e-5, rtol=1e-5)


def test_rows_of_a_step_equal_rows_alone(load: Callable[[str], Loaded]) -> None:
    """Decode rows of very different length and prefill chunks share steps, in any order; each is what it is alone."""
    loaded = load("smolvlm")
    runner = loaded.runner
    prompts = [loaded.prompt(layout) for layout in LAYOUTS]
    alone = [_reference(loaded, prompt) for prompt in prompts]
    embeddings = [runner.encode(prompt.pictures) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        _place(runner, row, len(prompt.ids) + NEW_TOKENS)
    # Row r begins r steps later than row 0, in chunks of 5: decode and prefill overlap in most steps.
    done = [0] * len(prompts)
    outputs: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(80):
        rows, owners = [], []
        for row, prompt in list(enumerate(prompts))[:: 1 if step % 2 else -1]:
            if step < row or len(outputs[row]) == NEW_TOKENS:
                continue
            owners.append(row)
            if done[row] < len(prompt.ids):
                stop = min(done[row] + 5, len(prompt.ids))
                rows.append(_chunk(prompt, embeddings[row], row, done[row], stop))
                done[row] = stop
            else:
                token = alone[row][0][len(outputs[row]) - 1]
                rows.append(Row(row, done[row], [token], RowSampling(GREEDY, len(outputs[row]))))
                done[row] += 1
        asked = [owner for owner, row in zip(owners, rows, strict=True) if row.sampling is not None]
        if rows:
            for owner, logits in zip(asked, runner.logits(rows), strict=True):
                outputs[owner].append(logits)
    for (tokens, expected), got in zip(alone, outputs, strict=True):
        logits = torch.stack(got)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
        assert logits.argmax(-1).tolist() == tokens


def test_bfloat16_stays_near_float32(load: Callable[[str], Loaded], tmp_path: Path) -> None:
    """The type that a CPU serves in takes other kernels (weights laid out for oneDNN): same model, coarser numbers."""
    loaded = load("smolvlm")
    folder = tiny_smolvlm(tmp_path)
    runner = load_runner(EngineConfig(str(folder), dtype="bfloat16", threads=1, kv_tokens=2048, max_running=8))
    assert isinstance(runner, TorchRunner)
    prompt = loaded.prompt("one picture")
    tokens, expected = _reference(loaded, prompt)
    for chunk in (len(prompt.ids), 1):
        logits = _logits(runner, prompt, tokens[:-1], chunk)
        assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99
