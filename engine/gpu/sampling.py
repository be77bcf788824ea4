"""Sampling that never asks the host: greedy and plain draws in two kernels, filtered draws among the likeliest ids.

The tokens are those of `engine.sampling`, from the same noise. What needs more (penalties, bias, grammars, log
probabilities, filters without a bounded top-k) goes through `engine.sampling` itself; `is_plain` and `is_bounded` tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from engine.batch import RowSampling
from engine.gpu import kernels
from engine.sampling import CANDIDATES, COLDEST, draw_among, finite, is_changed, is_filtered, noise_key
from preprocess.blocks.fusion import power_of_two
from preprocess.wire import SamplingParams

BLOCK: Final = 2048
"""Ids that one program looks at."""


def is_plain(row: RowSampling) -> bool:
    """Whether the row's token is the largest of its logits, or of logits and noise: no filter, nothing changed."""
    params = row.params
    return (
        row.allowed is None
        and params.logprobs is None
        and not is_changed(row)
        and (params.temperature < COLDEST or not is_filtered(params))
    )


def is_bounded(row: RowSampling) -> bool:
    """Whether the row draws among a bounded number of ids, and nothing else is changed."""
    params = row.params
    return (
        row.allowed is None
        and params.logprobs is None
        and not is_changed(row)
        and params.temperature >= COLDEST
        and 0 < params.top_k <= CANDIDATES
    )


def temperature_of(params: SamplingParams) -> float:
    """The temperature as the kernels take it: 0 is greedy."""
    return params.temperature if params.temperature >= COLDEST else 0.0


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor,
    future: torch.Tensor,
    table_rows: torch.Tensor,
) -> None:
    """Draws a token a row, and leaves it in `tokens` and in `future` at the row's place in the slot table.

    Args:
        logits: (rows, vocab).
        temperatures: float32 (rows,), see `temperature_of`.
        keys: int64 (rows,), see `noise_key`.
        tokens: int64 (rows,), written.
        future: int64 (table rows,), written.
        table_rows: int32 (rows,).
    """
    rows, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    best = torch.empty((rows, num_blocks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((rows, num_blocks), dtype=torch.int32, device=logits.device)
    kernels.draw_blocks[(rows, num_blocks)](
        logits, temperatures, keys, best, best_ids, vocab, num_blocks, BLOCK=BLOCK, num_warps=4
    )
    block = power_of_two(num_blocks)
    kernels.draw_rows[(rows,)](best, best_ids, tokens, future, table_rows, num_blocks, BLOCK=block, num_warps=1)


def draw_bounded(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Tokens int64 (rows,) of rows that are all `is_bounded`."""
    columns = [(row.params.temperature, row.params.top_p, row.params.min_p, float(row.params.top_k)) for row in rows]
    settings = torch.tensor(columns, dtype=torch.float32).pin_memory().to(logits.device, non_blocking=True)
    keys = torch.tensor([noise_key(row) for row in rows]).pin_memory().to(logits.device, non_blocking=True)
    temperature, top_p, min_p, top_k = (column.unsqueeze(1) for column in settings.unbind(1))
    tokens, _ = draw_among(finite(logits) / temperature, keys, top_k.long(), top_p, min_p, CANDIDATES)
    return tokens
