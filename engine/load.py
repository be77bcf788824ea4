"""Loads a model folder into a runner: family by `model_type`, type and threads by processor, KV pool by memory.

Called once by the engine process, and by whoever works offline.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from engine.attention.flashinfer_modules import Modules, is_usable
from engine.batch import Runner
from engine.config import EngineConfig
from engine.cpu.native import copied_bytes, why_not
from engine.cpu.runner import CpuRunner
from engine.limits import free_memory, kv_size
from engine.load_drafter import load_drafter
from engine.models.decoder import Decoder, DecoderConfig
from engine.models.llama import llama_config
from engine.models.qwen import qwen2_config, qwen3_config
from engine.runner import TorchRunner, VisionEncoder
from engine.start_times import Lap, no_lap
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.errors import ModelError
from preprocess.families import Family as PictureFamily
from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder
from preprocess.vision.idefics3 import Idefics3Encoder
from preprocess.vision.qwen2_vl import Qwen2VLEncoder
from preprocess.vision.qwen3_vl import Qwen3VLEncoder


@dataclass(frozen=True, slots=True)
class Family:
    """How the two halves of a model are loaded from its folder, and what the configuration says of the first."""

    config: Callable[[Checkpoint], DecoderConfig]
    language: Callable[[Checkpoint], Decoder]
    encoder: Callable[[Checkpoint], VisionEncoder]


def _text(checkpoint: Checkpoint) -> Fields:
    """Fields of the language model; Qwen2-VL has them beside those of the whole, as published."""
    config = checkpoint.config
    is_beside = not config.has("text_config") and config.values.get("model_type") in ("qwen2_vl", "qwen2_5_vl")
    return config if is_beside else config.section("text_config")


def _is_tied(checkpoint: Checkpoint) -> bool:
    return any(fields.flag("tie_word_embeddings", False) for fields in (checkpoint.config, _text(checkpoint)))


def _idefics3_config(checkpoint: Checkpoint) -> DecoderConfig:
    return llama_config(_text(checkpoint))


def _idefics3_language(checkpoint: Checkpoint) -> Decoder:
    config, tied = _idefics3_config(checkpoint), _is_tied(checkpoint)
    return Decoder(checkpoint, config, prefix="model.text_model", head="lm_head", tied=tied)


def _qwen2_config(checkpoint: Checkpoint) -> DecoderConfig:
    return qwen2_config(_text(checkpoint))


def _qwen2_language(checkpoint: Checkpoint) -> Decoder:
    """As published: tensors as in a text model (``model.layers``)."""
    config, tied = _qwen2_config(checkpoint), _is_tied(checkpoint)
    prefix = "model" if checkpoint.has("model.norm.weight") else "model.language_model"
    return Decoder(checkpoint, config, prefix=prefix, head="lm_head", tied=tied)


def _qwen3_config(checkpoint: Checkpoint, *, has_experts: bool = False) -> DecoderConfig:
    return qwen3_config(_text(checkpoint), has_experts=has_experts)


def _qwen3_language(checkpoint: Checkpoint, *, has_experts: bool = False) -> Decoder:
    config, tied = _qwen3_config(checkpoint, has_experts=has_experts), _is_tied(checkpoint)
    return Decoder(checkpoint, config, prefix="model.language_model", head="lm_head", tied=tied)


FAMILIES: Final = {
    "idefics3": Family(_idefics3_config, _idefics3_language, Idefics3Encoder),
    "smolvlm": Family(_idefics3_config, _idefics3_language, Idefics3Encoder),
    "qwen2_vl": Family(_qwen2_config, _qwen2_language, Qwen2VLEncoder),
    "qwen2_5_vl": Family(_qwen2_config, _qwen2_language, Qwen2VLEncoder),
    "qwen3_vl": Family(_qwen3_config, _qwen3_language, Qwen3VLEncoder),
    "qwen3_vl_moe": Family(
        partial(_qwen3_config, has_experts=True), partial(_qwen3_language, has_experts=True), Qwen3VLEncoder
    ),
}
"""`model_type` of config.json → family."""


LIKELY: Final = ((1024, 768), (640, 480))
"""Width and height of pictures that many send: a GPU's encoder is ready for them before the first one comes."""


def load_runner(config: EngineConfig, lap: Lap = no_lap) -> Runner:
    """Loads `config.model`. `lap` is told of each part.

    Raises:
        ModelError: The folder or an option cannot be honoured; the message says which and why.
    """
    set_threads(config.threads)
    device = _device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    checkpoint = Checkpoint(Path(config.model), dtype=dtype, device=device)
    modules = None
    with contextlib.closing(checkpoint), torch.inference_mode():
        model_type = checkpoint.config.choice("model_type", tuple(FAMILIES))
        family = FAMILIES[model_type]
        config_of = family.config(checkpoint)
        if device.type == "cuda" and is_usable(dtype, config_of.head_dim):
            modules = Modules(dtype, config_of.head_dim)
        is_open = config.dtype == "auto" and device.type == "cpu" and not config.draft_model
        if is_open and not why_not(config_of, torch.bfloat16):
            checkpoint.dtype = dtype = torch.bfloat16
        model = family.language(checkpoint)
        with checkpoint.giving(_encoder_dtype(dtype, device)):
            encoder = family.encoder(checkpoint)
        checkpoint.finish()
    lap("weights")
    reason = why_not(model.config, dtype) if device.type == "cpu" else ""
    languages = {name: family.language for name, family in FAMILIES.items()}
    drafter = load_drafter(config, model, checkpoint, languages, is_quick=not reason)
    if drafter is not None and device.type == "cpu":
        reason = reason or drafter.why_not_native

    token_bytes = 2 * config_of.num_layers * config_of.num_kv_heads * config_of.head_dim * dtype.itemsize
    token_bytes += 0 if drafter is None else drafter.token_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what weights were put together from
    free = free_memory(device)
    reserved = None
    expected: list[tuple[int, int, int, int]] = []
    if modules is not None:
        from engine.gpu.memory import reserved_bytes

        pictures = load_family(ModelFolder(Path(config.model)), config.largest)
        expected = likely_shapes(pictures)
        largest = largest_item_tokens(pictures)
        with torch.inference_mode():
            reserved = reserved_bytes(
                config,
                config_of,
                encoder,
                largest=largest,
                free=free,
                dtype=dtype,
                device=device,
                guess_layers=0 if drafter is None else drafter.num_layers,
            )
    if device.type == "cpu" and not reason:
        copied = copied_bytes(model)
        if copied > free // 2:
            reason = f"native would take {copied >> 20} MiB more, and {free >> 20} MiB are free"
        else:
            free -= copied
    size = kv_size(
        config, config_of.max_positions, token_bytes, free=free, is_cpu=device.type == "cpu", reserved=reserved
    )
    make: Callable[..., TorchRunner] = TorchRunner
    if modules is not None:
        from engine.gpu.runner import CudaRunner  # Triton comes with torch only where CUDA does

        make = partial(CudaRunner, modules=modules, drafts=config.speculation != "none", expected=expected)
    elif device.type == "cpu" and not reason:
        make = CpuRunner
    runner = make(
        model,
        encoder,
        num_slots=1 + size.kv_tokens,
        max_positions=size.context,
        max_rows=config.max_running,
        dtype=dtype,
        device=device,
    )
    if reason:
        runner.kernel = f"torch: {reason}"
    if drafter is not None:
        native = runner.native if isinstance(runner, CpuRunner) else None
        runner.guess_with(drafter.on(runner.pools(), native))
    lap("memory")
    return runner


def likely_shapes(family: PictureFamily) -> list[tuple[int, int, int, int]]:
    """Of the pixels of pictures of `LIKELY` sizes, as the family has them; each once."""
    return list(dict.fromkeys(family.layout(width, height, "auto").shape for width, height in LIKELY))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, but torch finds no CUDA device here; expected cpu")
    return torch.device(name)


def set_threads(threads: int) -> None:
    """Sets torch's threads; 0 leaves one core to the other processes.

    Two torch threads on two busy cores wait for each other at every operation, which was seen to cost a factor of 40.
    """
    torch.set_num_threads(threads or max(1, _num_cores() - 1))
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:  # torch allows it only before its first parallel work; it saves idle threads, no more
            return


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of `EngineConfig.dtype` where torch computes."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.bfloat16 if _is_fast_at_bfloat16(device) else torch.float32


def _encoder_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the vision encoder, which is always torch's, computes in: bfloat16 takes it six times as long where torch
    has no quick products of that.
    """
    return dtype if dtype is not torch.bfloat16 or _is_fast_at_bfloat16(device) else torch.float32


def _is_fast_at_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
