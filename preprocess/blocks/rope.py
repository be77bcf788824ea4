"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout as in Llama checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from preprocess.blocks.fields import Fields


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`kind` ``"default"``, ``"linear"`` (positions divided by `factor`) or ``"llama3"`` (long waves only, blended)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0

    @classmethod
    def read(cls, fields: Fields, *, max_positions: int) -> RopeConfig:
        """From a text configuration, in today's spelling (`rope_parameters`) or the older (`rope_scaling`).

        Raises:
            ModelError: A kind of scaling that is not implemented.
        """
        old = fields.section("rope_scaling")
        rope = old if old.values else fields.section("rope_parameters")
        kind_field = "rope_type" if rope.has("rope_type") else "type"
        kind = rope.choice(kind_field, ("default", "linear", "llama3"), "default")
        for section in (rope, fields):
            section.refuse("partial_rotary_factor", unless=1.0, reason="partial rotation is not supported")
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, factor=rope.number("factor"))
        return cls(
            theta,
            kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=rope.integer("original_max_position_embeddings", max_positions),
        )

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 (head_dim / 2,): radians a position, fastest first."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**powers)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "default":
            return frequencies
        # llama3: waves longer than the original context are stretched by `factor`, short ones stay, in between a blend.
        waves = 2 * math.pi / frequencies
        smooth = (self.original_positions / waves - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blend = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        stretched = torch.where(
            waves > self.original_positions / self.low_freq_factor, frequencies / self.factor, blend
        )
        return torch.where(waves < self.original_positions / self.high_freq_factor, frequencies, stretched)


class Rope:
    """Rotation of queries and keys by position, from a table made once.

    A head (a, b) of two halves becomes (a cos - b sin, b cos + a sin): with `roll` swapping the halves and the first
    half of the sines negated, that is `head * cos + roll(head) * sin`, three operations for all heads.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), config.inverse_frequencies(head_dim))
        cos, sin = angles.cos(), angles.sin()  # (positions, head_dim / 2)
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self._table = table.to(device=device, dtype=dtype)  # (positions, 2, head_dim)
        self._half = head_dim // 2

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each (tokens, 1, head_dim), of positions (tokens,): once a step, for all layers."""
        rows = self._table.index_select(0, positions)  # (tokens, 2, head_dim)
        return rows[:, :1], rows[:, 1:]

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates (tokens, heads, head_dim) in place."""
        torch.addcmul(heads * cos, heads.roll(self._half, -1), sin, out=heads)
