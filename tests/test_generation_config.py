"""`generation_config.json` of a folder: every id that ends answers ends them, and its sampling is the default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import FAMILIES

from beholder import Beholder
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from preprocess.config import PreprocessConfig
from preprocess.errors import ServiceError
from preprocess.model_folder import ModelFolder
from preprocess.prepare import Preparer
from preprocess.wire import GenerationOptions, Job, Lease, Message, Prepared, TextPart
from tests.engine.family_parity import pixels_of, run

QUESTION = [{"role": "user", "content": "How many squares are there?"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_id_ends_an_answer(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 2
    preparer = Preparer(PreprocessConfig(str(folder)), None)
    runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=200, max_running=1))
    for end in ends:
        for ignore_eos in (False, True):
            options = GenerationOptions(temperature=0.0, max_tokens=3, logit_bias={end: 100.0}, ignore_eos=ignore_eos)
            prepared = preparer.prepare(Job("r", [Message("user", [TextPart("?")])], options, Lease(), 0.0))
            assert isinstance(prepared, Prepared)
            engine = Engine(EngineConfig("", check=True), runner)
            engine.submit(prepared.request, pixels_of)
            assert run(engine) == {"r": [end] * 3 if ignore_eos else [end]}


def test_sampling_of_the_folder_is_the_default(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_vl"](tmp_path)
    file = folder / "generation_config.json"
    greedy = json.loads(file.read_text())

    def answers(**fields: object) -> set[str]:
        file.write_text(json.dumps({**greedy, **fields}))
        with Beholder(folder, dtype="float32", threads=1) as beholder:
            return {beholder.chat(QUESTION, max_tokens=8, seed=seed).text for seed in range(5)}

    plain = answers()
    assert len(plain) == 1
    assert len(answers(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)) > 2  # as Qwen3-VL has it
    assert answers(do_sample=True, temperature=0.7, top_k=1) == plain
    assert answers(do_sample=True, temperature=1e-6, top_k=1, top_p=0.001) == plain  # as Qwen2.5-VL has it
    assert answers(repetition_penalty=5.0) != plain


def test_end_ids_of_config_json_count_only_without_those_of_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "text_config": {"eos_token_id": 3}}')
    assert ModelFolder(tmp_path).eos_ids == [2]
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 3}}')
    assert ModelFolder(tmp_path).eos_ids == [3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5, 7]}')
    assert ModelFolder(tmp_path).eos_ids == [7, 5]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ModelFolder(tmp_path).eos_ids == [3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number of at least 0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"do_sample": True, "top_p": 7}, "top_p is 7, expected a number from 0 to 1"),
        ({"do_sample": True, "top_k": 1.5}, "top_k is 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number above 0"),
    ],
)
def test_values_that_nothing_can_be_sampled_with_are_refused(
    fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = FAMILIES["qwen2_vl"](tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ServiceError, match=words):
        Preparer(PreprocessConfig(str(folder)), None)


def test_end_ids_outside_the_vocabulary_end_nothing(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2_vl"](tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 999_999]}))
    assert Preparer(PreprocessConfig(str(folder)), None).profile.eos_ids == (2,)
