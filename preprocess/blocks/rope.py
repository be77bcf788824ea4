"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout as in Llama checkpoints.

M-RoPE (Qwen2-VL, arXiv:2409.12191) gives a token three positions, temporal, height and width, and each wave of a head
one of them:

    sectioned (2, 3, 3)     T T H H H W W W
    interleaved (4, 2, 2)   T H W T H W T T
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch

from preprocess.blocks.fields import Fields
from preprocess.blocks.fusion import is_fused

_KINDS: Final = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn heads.

    Attributes:
        theta: Base of the waves' lengths.
        kind: ``"default"``, ``"linear"`` (positions divided by `factor`), ``"llama3"`` (long waves only, blended) or
            ``"yarn"`` (long waves only, blended, and all results scaled; arXiv:2309.00071).
        factor: By which the context is longer than the original one.
        low_freq_factor, high_freq_factor: Waves that the original context holds less often than the first are
            stretched, those that it holds more often than the second stay (llama3).
        beta_slow, beta_fast: The same (yarn), between whole waves where `truncate`.
        original_positions: The context that the model was first trained for.
        scale: Of cosines and sines (yarn).
        sections: How many waves follow each of M-RoPE's three positions; None for plain positions.
        interleaved: How they are laid out.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    original_positions: int = 0
    scale: float = 1.0
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    @classmethod
    def read(
        cls,
        fields: Fields,
        *,
        max_positions: int,
        theta: float = 10000.0,
        sections: tuple[int, int, int] | None = None,
        interleaved: bool = False,
    ) -> RopeConfig:
        """From a text configuration, in today's spelling (`rope_parameters`) or the older (`rope_scaling`).

        `theta` and `sections` hold where the fields are absent. With `sections` it is M-RoPE, `interleaved` or not.

        Raises:
            ModelError: A kind of scaling that is not implemented.
        """
        old = fields.section("rope_scaling")
        rope = old if old.values else fields.section("rope_parameters")
        kind_field = "rope_type" if rope.has("rope_type") else "type"
        kind = rope.choice(kind_field, _KINDS if sections is None else (*_KINDS, "mrope"), "default")
        if sections is not None:
            sections = _sections(rope, sections, interleaved=interleaved)
        config = cls(_theta(rope, fields, theta), kind, sections=sections, interleaved=interleaved)
        if kind in ("default", "mrope"):
            return replace(config, kind="default")
        if kind == "linear":
            return replace(config, factor=rope.number("factor"))
        outside = fields if fields.has("original_max_position_embeddings") else rope
        original = outside.integer("original_max_position_embeddings", max_positions)
        if kind == "yarn":
            return config._with_yarn(rope, max_positions, original)
        return replace(
            config,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_positions=original,
        )

    def _with_yarn(self, rope: Fields, max_positions: int, original: int) -> RopeConfig:
        factor = rope.number("factor", max_positions / original)

        def strength(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        scale = strength(1.0)
        if rope.has("mscale") and rope.has("mscale_all_dim"):
            scale = strength(rope.number("mscale")) / strength(rope.number("mscale_all_dim"))
        return replace(
            self,
            factor=factor,
            beta_slow=rope.number("beta_slow", 1.0),
            beta_fast=rope.number("beta_fast", 32.0),
            truncate=rope.flag("truncate", True),
            original_positions=original,
            scale=rope.number("attention_factor", scale),
        )

    def check(self, fields: Fields, head_dim: int) -> None:
        """Raises `ModelError` where the sections do not fill the waves of a head."""
        if self.sections is not None and not self.interleaved and 2 * sum(self.sections) != head_dim:
            raise fields.error("mrope_section", list(self.sections), f"numbers that sum up to {head_dim // 2}")

    def build(self, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device) -> Rope:
        """The rotation of heads of `head_dim` at `positions` positions (M-RoPE: any)."""
        if self.sections is None:
            return Rope(self, head_dim, positions, dtype=dtype, device=device)
        return MRope(self, head_dim, dtype=dtype, device=device)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 (head_dim / 2,): radians a position, fastest first."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        lengths = self.theta**powers  # of the waves
        frequencies = 1.0 / lengths
        if self.kind == "default":
            return frequencies
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "yarn":
            kept = 1 - self._yarn_ramp(head_dim)
            return 1.0 / (self.factor * lengths) * (1 - kept) + frequencies * kept
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

    def _yarn_ramp(self, head_dim: int) -> torch.Tensor:
        """float32 (head_dim / 2,): how far each wave is stretched, 0 not at all, 1 by the whole factor."""

        def place(turns: float) -> float:
            """Of the wave that turns so often in the original context, among the numbers of a head."""
            return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates (…, tokens, heads, head_dim) in place by cosines and signed sines (tokens, 1, head_dim).

    A head (a, b) of two halves becomes (a cos - b sin, b cos + a sin): with `roll` swapping the halves and the first
    half of the sines negated, that is `head * cos + roll(head) * sin`, three operations for all heads.
    """
    dense = heads.dim() == 4 and heads.stride(3) == 1 and heads.stride(2) == heads.shape[3]
    if is_fused(heads) and dense and cos.is_contiguous() and sin.is_contiguous():
        from preprocess.blocks.gpu_kernels import rotate_heads_

        rotate_heads_(heads, cos, sin)
        return
    torch.addcmul(heads * cos, heads.roll(heads.size(-1) // 2, -1), sin, out=heads)


def rotation(angles: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate_` takes, each (tokens, 1, head_dim), of float32 angles (tokens, head_dim / 2)."""
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    whole = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
    return whole[0].to(dtype), whole[1].to(dtype)


class Rope:
    """Rotation of queries and keys by position, from a table made once.

    Attributes:
        table: (positions, 2, head_dim): cosines, and sines with the first half negated.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), config.inverse_frequencies(head_dim))
        table = torch.cat(rotation(angles, dtype, config.scale), dim=1)
        self.table = table.to(device).contiguous()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each (tokens, 1, head_dim), of positions (tokens,): once a step, for all layers."""
        rows = self.table.index_select(0, positions)  # (tokens, 2, head_dim)
        return rows[:, :1], rows[:, 1:]

    rotate_ = staticmethod(rotate_)


class MRope(Rope):
    """Rotation by three positions a token. Angles are made when they are needed: a clip's positions are seconds, which
    no number of tokens bounds.
    """

    def __init__(self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = config.inverse_frequencies(head_dim).to(device)  # (head_dim / 2,)
        self._axes = mrope_axes(config, head_dim // 2).to(device)
        self._dtype = dtype
        self._scale = config.scale

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Rope.at`, of positions (3, tokens), or (tokens,) where all three are equal."""
        by_wave = positions[self._axes].T if positions.dim() == 2 else positions.unsqueeze(1)
        return rotation(by_wave * self._frequencies, self._dtype, self._scale)  # float32 until there


def mrope_axes(config: RopeConfig, num_waves: int) -> torch.Tensor:
    """int64 (num_waves,): which of the positions, 0 temporal, 1 height, 2 width, each wave follows."""
    assert config.sections is not None
    if not config.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(config.sections))
    axes = torch.arange(num_waves) % 3
    within = torch.arange(num_waves) // 3 < torch.tensor(config.sections)[axes]
    return torch.where(within, axes, 0)


def _sections(rope: Fields, default: tuple[int, int, int], *, interleaved: bool) -> tuple[int, int, int]:
    layout = "the model type's layout of M-RoPE is another"
    rope.refuse("mrope_interleaved", unless=interleaved, reason=layout)
    given = rope.values.get("mrope_section") or list(default)
    if not (isinstance(given, list) and len(given) == 3 and all(isinstance(size, int) and size >= 0 for size in given)):
        raise rope.error("mrope_section", given, "three whole numbers")
    temporal, height, width = given
    return temporal, height, width


def _theta(rope: Fields, fields: Fields, default: float) -> float:
    for section in (rope, fields):
        section.refuse("partial_rotary_factor", unless=1.0, reason="partial rotation is not supported")
    return rope.number("rope_theta", fields.number("rope_theta", default))
