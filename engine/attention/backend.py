"""What a model asks of attention: plan a step once, then write and attend layer by layer over the paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence in a step: places `start` … `start + length - 1` of the sequence, whose slots are those
    of `slot_table[table_row]`. With `parents` the last of them are drafts that form a tree, as in `engine.batch.Row`.
    """

    table_row: int
    start: int
    length: int
    parents: Sequence[int] | None = None


class AttentionPlan(Protocol):
    """Attention of one step; knows where every token's keys and values go and what it may look at."""

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Writes the step's keys and values to the pool, then attention of its queries over their sequences: causal,
        but drafts of a tree see only those that lead to them.

        Args:
            layer: Index of the layer.
            query: (tokens, heads, head_dim), rotated.
            key_value: (tokens, 2, kv_heads, head_dim), keys rotated.

        Returns:
            (tokens, heads * head_dim).
        """
        ...


class AttentionBackend(Protocol):
    """Attention over one KV pool."""

    def plan(self, segments: Sequence[Segment], positions: torch.Tensor) -> AttentionPlan:
        """Plans a step whose tokens are those of `segments` in order.

        Segments come in rising length (so those of one token first), and of one length the longest sequence first.
        `positions` (tokens,) int64, each token's place in its sequence, is on the device.
        """
        ...
