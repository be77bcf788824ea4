"""Sizes that nobody gave come from the model and the memory there is, and what cannot fit is refused with numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES
from tiny_smolvlm import tiny_smolvlm

import engine.limits
from engine.config import EngineConfig
from engine.core import Engine
from engine.limits import CPU_KV_TOKENS, LEAST_VISION_CACHE, KVSize, kv_size, vision_cache_bytes, with_vision_cache
from engine.load import load_runner
from preprocess.errors import ModelError
from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder

GIB = 1 << 30
QWEN3_VL_2B = {"longest": 262_144, "token_bytes": 2 * 28 * 8 * 128 * 2}


def sized(free: int, *, is_cpu: bool = True, max_context: int = 0, kv_tokens: int = 0) -> KVSize:
    config = EngineConfig("m", max_context=max_context, kv_tokens=kv_tokens)
    return kv_size(config, **QWEN3_VL_2B, free=free, is_cpu=is_cpu)


def test_a_context_is_no_longer_than_the_pool_that_fits() -> None:
    assert sized(16 * GIB) == KVSize(4 * GIB // QWEN3_VL_2B["token_bytes"], 4 * GIB // QWEN3_VL_2B["token_bytes"])
    assert sized(64 * GIB) == KVSize(CPU_KV_TOKENS, CPU_KV_TOKENS)
    assert sized(64 * GIB, is_cpu=False).context == 262_144
    assert sized(64 * GIB, is_cpu=False).kv_tokens > 262_144


def test_a_context_that_is_asked_for_gets_its_pool() -> None:
    assert sized(64 * GIB, max_context=200_000) == KVSize(200_000, 200_000)
    assert sized(64 * GIB, max_context=1_000) == KVSize(CPU_KV_TOKENS, 1_000)
    with pytest.raises(ModelError, match="max_context is 200000, which takes 21875 MiB of memory, but 16384 MiB"):
        sized(16 * GIB, max_context=200_000)
    with pytest.raises(ModelError, match="made for at most 262144 tokens"):
        sized(64 * GIB, max_context=300_000)


def test_a_pool_that_is_asked_for_bounds_the_context() -> None:
    assert sized(16 * GIB, kv_tokens=5_000) == KVSize(5_000, 5_000)
    with pytest.raises(ModelError, match="kv_tokens is 200000, which takes 21875 MiB of memory, but 16384 MiB"):
        sized(16 * GIB, kv_tokens=200_000)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_cache_holds_the_largest_picture(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FAMILIES[family](tmp_path)
    runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
    config = EngineConfig(str(folder))
    assert with_vision_cache(config, runner).vision_cache_bytes == LEAST_VISION_CACHE
    largest = largest_item_tokens(load_family(ModelFolder(folder)))
    monkeypatch.setattr(engine.limits, "LEAST_VISION_CACHE", 0)
    sized = with_vision_cache(config, runner)
    assert sized.vision_cache_bytes == 4 * largest * runner.embedding_bytes
    monkeypatch.setattr(engine.limits, "free_memory", lambda _: 3 * largest * runner.embedding_bytes)
    assert Engine(with_vision_cache(config, runner), runner).vision.fits(largest)
    monkeypatch.setattr(engine.limits, "free_memory", lambda _: largest * runner.embedding_bytes)
    with pytest.raises(ModelError, match="embeddings of the largest picture take"):
        with_vision_cache(config, runner)


def test_what_is_asked_for_is_not_touched(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path)
    runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
    asked = EngineConfig(str(folder), vision_cache_bytes=12_345)
    assert with_vision_cache(asked, runner) == asked
    assert runner.facts()["kv_bytes"] == 65 * 2 * 2 * 2 * 8 * torch.float32.itemsize


def test_where_needs_are_known_the_pool_takes_what_they_leave() -> None:
    token_bytes = QWEN3_VL_2B["token_bytes"]

    def sized(free: int, reserved: int, **options: int) -> KVSize:
        config = EngineConfig("m", **options)  # type: ignore[arg-type]
        return kv_size(config, **QWEN3_VL_2B, free=free, is_cpu=False, reserved=reserved)

    assert sized(64 * GIB, 4 * GIB).kv_tokens == 60 * GIB // token_bytes
    assert sized(64 * GIB, 4 * GIB, kv_tokens=500) == KVSize(500, 500)
    assert sized(3 * GIB, 4 * GIB, kv_tokens=500) == KVSize(500, 500)
    with pytest.raises(ModelError, match=r"kv_tokens is 600000, .* but 65536 MiB are free$"):
        sized(64 * GIB, 4 * GIB, kv_tokens=600_000)
    with pytest.raises(ModelError, match=r"max_context is 250000, .* but 20480 MiB are free beside 4096 MiB for steps"):
        sized(24 * GIB, 4 * GIB, max_context=250_000)
    with pytest.raises(ModelError, match=r"may need 4096 MiB beside the weights. Set max_picture_tokens, "):
        sized(3 * GIB, 4 * GIB)


def test_a_gpus_vision_cache_holds_the_largest_picture_and_some_more_where_there_is_room() -> None:
    assert vision_cache_bytes(32 << 20, 100 * GIB) == 128 << 20
    assert vision_cache_bytes(1 << 20, 100 * GIB) == LEAST_VISION_CACHE
    assert vision_cache_bytes(600 << 20, 20 * GIB) == GIB
    assert vision_cache_bytes(600 << 20, 4 * GIB) == 600 << 20
