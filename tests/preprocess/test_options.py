"""Sampling options: ranges, defaults of the model folder, and the context."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from preprocess.errors import ClientError
from preprocess.model_folder import ModelFolder
from preprocess.options import Defaults, check_options, resolve
from preprocess.wire import GenerationOptions, SamplingParams


def defaults(tmp_path: Path, **generation: Any) -> Defaults:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return Defaults.of(ModelFolder(tmp_path), (2, 6), 100)


def resolved(tmp_path: Path, generation: dict[str, Any], **options: Any) -> SamplingParams:
    return resolve(GenerationOptions(**options), defaults(tmp_path, **generation), 10, 1000)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1.0}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"top_k": 2**70}, "top_k"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"logprobs": -1}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1001]}, "stop"),
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as caught:
        check_options(GenerationOptions(**options))
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == param
    assert f"`{caught.value.param}`" in caught.value.message


def test_values_at_the_edge_are_fine() -> None:
    check_options(GenerationOptions())
    check_options(
        GenerationOptions(
            temperature=2.0, top_p=1.0, min_p=0.0, top_k=-1, presence_penalty=-2.0, max_tokens=3, min_tokens=3,
            logprobs=20, stop=["x" * 1000] * 16, logit_bias={0: -100.0},
        )
    )  # fmt: skip


def test_a_folder_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    for generation in ({}, {"do_sample": False, "temperature": 0.7, "top_k": 5, "top_p": 0.5}):
        params = resolved(tmp_path, generation)
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)


def test_a_folder_that_samples_gives_its_values(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1,
                  "repetition_penalty": 1.05}  # fmt: skip
    params = resolved(tmp_path, generation)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 20, 0.8, 0.1)
    assert params.repetition_penalty == 1.05
    assert resolved(tmp_path, {"do_sample": True}).temperature == 1.0
    assert resolved(tmp_path, generation, temperature=0.0, top_k=-1, top_p=1.0).temperature == 0.0
    assert resolved(tmp_path, generation, top_k=-1).top_k == 0


def test_a_folder_that_samples_with_no_temperature_is_greedy(tmp_path: Path) -> None:
    """Qwen2-VL's and Qwen2.5-VL's are so; who then asks for a temperature is not held to their tiny `top_p`."""
    generation = {"do_sample": True, "temperature": 1e-6, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05}
    params = resolved(tmp_path, generation)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, 0, 1.0, 1.05)
    params = resolved(tmp_path, generation, temperature=0.7)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 0, 1.0)


def test_who_narrows_the_sampling_wants_some(tmp_path: Path) -> None:
    """With a greedy default, `top_p` alone would otherwise be accepted and ignored."""
    assert resolved(tmp_path, {}, top_p=0.9).temperature == 1.0
    assert resolved(tmp_path, {}, top_k=5).temperature == 1.0
    assert resolved(tmp_path, {}, top_p=0.9, temperature=0.0).temperature == 0.0
    assert resolved(tmp_path, {}, top_p=1.0, top_k=-1).temperature == 0.0


def test_hardly_any_temperature_is_greedy(tmp_path: Path) -> None:
    assert resolved(tmp_path, {}, temperature=1e-30).temperature == 0.0
    assert resolved(tmp_path, {}, temperature=0.01).temperature == 0.01


def test_ends_of_the_model_and_of_the_client(tmp_path: Path) -> None:
    assert resolved(tmp_path, {}).stop_token_ids == [2, 6]
    assert resolved(tmp_path, {}, stop_token_ids=[6, 9]).stop_token_ids == [2, 6, 9]
    assert resolved(tmp_path, {}, ignore_eos=True, stop_token_ids=[9]).stop_token_ids == [9]


def test_seeds(tmp_path: Path) -> None:
    assert resolved(tmp_path, {}, seed=7).seed == 7
    drawn = {resolved(tmp_path, {}).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in [*drawn, resolved(tmp_path, {}, seed=-1).seed])


def test_max_tokens_is_what_the_context_leaves(tmp_path: Path) -> None:
    assert resolved(tmp_path, {}).max_tokens == 990
    assert resolved(tmp_path, {"max_new_tokens": 64}).max_tokens == 64
    assert resolved(tmp_path, {"max_new_tokens": 64}, min_tokens=80).max_tokens == 80
    assert resolved(tmp_path, {"max_new_tokens": 64}, max_tokens=990).max_tokens == 990
    assert resolve(GenerationOptions(), defaults(tmp_path), 10, 100_000).max_tokens == 4096


@pytest.mark.parametrize(
    ("prompt", "options", "param", "words"),
    [
        (1000, {}, "messages", "The prompt has 1,000 tokens"),
        (1200, {"max_tokens": 1}, "messages", "The prompt has 1,200 tokens"),
        (900, {"max_tokens": 101}, "max_tokens", "`max_tokens` can be at most 100 here"),
        (900, {"min_tokens": 101}, "min_tokens", "only 100 tokens are left"),
        (10, {"logit_bias": {100: 1.0}}, "logit_bias", "the model's tokens are 0 … 99"),
        (10, {"logit_bias": {-1: 1.0}}, "logit_bias", "token -1"),
        (10, {"stop_token_ids": [100]}, "stop_token_ids", "token 100"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_with_counts(
    tmp_path: Path, prompt: int, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ClientError) as caught:
        resolve(GenerationOptions(**options), defaults(tmp_path), prompt, 1000)
    assert caught.value.param == param
    assert words in caught.value.message
