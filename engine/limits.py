"""How large KV pool, context and vision cache are where nobody says: from the model and the device's memory.

free memory after loading     ├── KV pool ──┼── vision cache ──┼── activations, other processes ──┤
on a CPU                         1/4            at most 1/8
on a GPU                         4/5            at most 1/20
with kernels of our own          what `engine.gpu.memory` leaves, which knows what steps and pictures take
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from engine.batch import Runner
from engine.config import EngineConfig
from engine.vision_cache import LEAST_VISION_CACHE
from preprocess.arena import available_memory
from preprocess.errors import ModelError
from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder

CPU_KV_TOKENS: Final = 65_536
"""Most KV slots that are chosen by themselves on a CPU; `kv_tokens` or `max_context` can ask for more."""

LARGEST_ITEMS: Final = 4
"""Of the largest pictures there are, the vision cache holds so many, if there is memory for them."""


@dataclass(frozen=True, slots=True)
class KVSize:
    """Tokens of the KV pool, and of the longest prompt + answer."""

    kv_tokens: int
    context: int


def kv_size(
    config: EngineConfig, longest: int, token_bytes: int, *, free: int, is_cpu: bool, reserved: int | None = None
) -> KVSize:
    """What fits.

    Args:
        config: What was asked for.
        longest: Context that the model was made for, in tokens.
        token_bytes: Keys and values of one token.
        free: Bytes of memory on the device.
        is_cpu: Whether that is the memory of everybody else, too.
        reserved: Bytes of those that others need, where that is known.

    Raises:
        ModelError: More was asked for than there is, with the numbers.
    """
    if config.max_context > longest:
        raise ModelError(
            f"max_context is {config.max_context}, but {config.model} was made for at most {longest} tokens"
        )
    if reserved is not None:
        left = max(free - reserved, 0)
        free = free if config.kv_tokens else left  # whoever names a number knows how large their pictures are
        chosen = left // token_bytes
        if not chosen and not config.kv_tokens:
            raise ModelError(
                f"no memory is left for keys and values: steps and pictures may need {reserved >> 20} MiB beside the "
                "weights. Set max_picture_tokens, max_batched_tokens or max_running lower, or kv_tokens if pictures "
                "are small"
            )
    else:
        chosen = min(CPU_KV_TOKENS, free // 4 // token_bytes) if is_cpu else free * 4 // 5 // token_bytes
    kv_tokens = config.kv_tokens or max(chosen, config.max_context, 1)
    if kv_tokens * token_bytes > free:
        name = "kv_tokens" if config.kv_tokens or not config.max_context else "max_context"
        beside = f" beside {reserved >> 20} MiB for steps and pictures" if reserved and not config.kv_tokens else ""
        raise ModelError(
            f"{name} is {kv_tokens}, which takes {kv_tokens * token_bytes >> 20} MiB of memory, but {free >> 20} MiB "
            f"are free{beside}"
        )
    return KVSize(kv_tokens, config.max_context or min(longest, kv_tokens))


def vision_cache_bytes(largest: int, free: int) -> int:
    """Size of a GPU's vision cache where nobody says, by bytes of the largest picture and those beside the weights."""
    return max(min(max(LARGEST_ITEMS * largest, LEAST_VISION_CACHE), free // 20), largest)


def with_vision_cache(config: EngineConfig, runner: Runner) -> EngineConfig:
    """The same options with a vision cache that holds the largest picture of the family.

    Raises:
        ModelError: There is no memory for even one.
    """
    if config.vision_cache_bytes:
        return config
    family = load_family(ModelFolder(Path(config.model)), config.largest)
    largest = largest_item_tokens(family) * runner.embedding_bytes
    device = runner.slot_table.device
    free = free_memory(device)
    if device.type == "cpu":
        most = free // 2
        size = max(min(max(LARGEST_ITEMS * largest, LEAST_VISION_CACHE), free // 8), largest)
    else:
        most, kv_bytes = free, runner.facts()["kv_bytes"]
        assert isinstance(kv_bytes, int)
        size = vision_cache_bytes(largest, free + kv_bytes)
    if size > most:
        raise ModelError(
            f"embeddings of the largest picture take {largest >> 20} MiB, but {free >> 20} MiB of memory are free; "
            "set vision_cache_mb if all pictures are smaller"
        )
    return msgspec.structs.replace(config, vision_cache_bytes=size)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device without pushing anything out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return available_memory()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
