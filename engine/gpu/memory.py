"""How much of a GPU's memory is left to what is not keys and values: the KV pool takes all the rest.

free memory after loading     ├── KV pool ──┼── vision cache ──┼── pictures ──┼── steps ──┼── libraries, margin ──┤

Pictures are measured, steps are worked out from the model's sizes. Graphs that are captured later share the memory of
the first and largest, but for what each takes by itself.
"""

from __future__ import annotations

from typing import Final

import torch

from engine.config import EngineConfig
from engine.gpu.step_sizes import most_checked, most_graphs
from engine.limits import vision_cache_bytes
from engine.models.decoder import DecoderConfig
from engine.runner import VisionEncoder

LIBRARIES: Final = 1536 << 20
"""Workspaces of attention (0.4 GiB) and matrix products, and kernels, which are loaded when they are first used."""

MARGIN: Final = 25
"""One part in so many of the free memory is left: an allocator cannot use every hole, and others use the device."""

ENCODER_BUFFERS: Final = 1 << 30
"""Of shapes of pictures that have graphs."""

MORE_GRAPHS: Final = 100
"""Of steps with drafts, beyond those that are captured ahead."""
NUM_GUESS_GRAPHS: Final = 60
GRAPH_BYTES: Final = 64 << 10
"""A layer of a graph: 1.1 MiB a graph of 28 layers on an H200."""

MOST_STEP_TOKENS: Final = 4096 + 512
"""Tokens of the largest captured step."""


def reserved_bytes(
    config: EngineConfig,
    model: DecoderConfig,
    encoder: VisionEncoder,
    *,
    largest: int,
    free: int,
    dtype: torch.dtype,
    device: torch.device,
    guess_layers: int = 0,
) -> int:
    """What must stay free beside the KV pool.

    Args:
        config: Options: sizes of steps, contexts and the vision cache.
        model: Sizes of the language model.
        encoder: Encodes pictures to be measured.
        largest: Vision tokens of the largest picture.
        free: Bytes that are free now.
        dtype: Type of the model.
        device: Where it is.
        guess_layers: Of a model that guesses, whose entries count beside the keys and values; 0: none does.
    """
    embedding = model.hidden_size * (1 + encoder.num_taps) * dtype.itemsize
    cache = config.vision_cache_bytes or vision_cache_bytes(largest * embedding, free)
    pictures = 2 * largest * picture_token_bytes(encoder, device)  # one in a graph, one beside
    tokens = MOST_STEP_TOKENS + max(MOST_STEP_TOKENS, config.max_batched_tokens)  # in graphs, and beside
    steps = tokens * step_token_bytes(model, encoder.num_taps, dtype)
    samples = config.max_running + 16
    if config.speculation != "none":
        samples += most_checked(config.max_running)
    if guess_layers:
        samples += config.max_running
    steps += 2 * samples * model.vocab_size * 4  # logits
    steps += (config.max_running + 32) * (config.max_context or model.max_positions) * 4  # slots
    num_graphs = most_graphs(config.max_running, MOST_STEP_TOKENS) + MORE_GRAPHS
    graphs = (num_graphs * model.num_layers + NUM_GUESS_GRAPHS * guess_layers) * GRAPH_BYTES
    return cache + pictures + ENCODER_BUFFERS + steps + graphs + LIBRARIES + free // MARGIN


def step_token_bytes(model: DecoderConfig, num_taps: int, dtype: torch.dtype) -> int:
    """Bound of what a token of a step takes while a layer is computed."""
    hidden, dim = model.hidden_size, model.head_dim
    values = 6 * hidden  # residual stream, its norm, what is added
    values += (3 * model.num_heads + 2 * model.num_kv_heads) * dim  # queries, keys, values; what attention reads
    values += 3 * model.intermediate_size
    if model.experts is not None:
        values += model.experts.top_k * (model.experts.intermediate_size + hidden)
    values += 3 * hidden * (1 + num_taps)  # embeddings that are shown, and their copies
    return 5 * values * dtype.itemsize // 4  # a quarter more


def picture_token_bytes(encoder: VisionEncoder, device: torch.device) -> int:
    """What the encoder takes at most, by vision token, with a quarter more."""
    side = encoder.image_size
    pictures = [torch.zeros((1, side, side, 3), dtype=torch.uint8, device=device)] * 16  # they go through together
    encoder(pictures)  # libraries take their workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = sum(len(embeddings) for embeddings in encoder(pictures))
    torch.cuda.synchronize()
    return 5 * (torch.cuda.max_memory_allocated(device) - before) // (4 * tokens)
