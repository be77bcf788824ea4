"""The decoder's forward in fused kernels: what `engine.models.decoder` computes, in ten launches a layer.

    x ─▶ add + norm ─▶ qkv ─▶ QK-norm + rotation + KV write ─▶ attention ─▶ out ─▶ add + norm ─▶ mlp ─▶ …

A layer's last sum is made by the next layer's first kernel, so `delta` travels beside the residual stream.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.attention.flashinfer_backend import StepPlan
from engine.gpu.experts import run_experts
from engine.gpu.ops import rotate_and_write
from engine.gpu.skinny import (
    add_parts_rms_norm,
    gate_up_tiles,
    heads_tiles,
    is_skinny,
    is_skinny_for_heads,
    residual_tiles,
    skinny,
    skinny_gate_up,
)
from engine.models.decoder import Decoder, DecoderLayer, DeepStack, GatedMLP
from engine.models.experts import Experts
from preprocess.blocks.gpu_kernels import rms_norm, silu_mul
from preprocess.blocks.linear import Linear
from preprocess.blocks.norm import RMSNorm

if TYPE_CHECKING:
    from engine.speculation.torch_drafters import Told


@dataclass(frozen=True, slots=True)
class Shown:
    """`DeepStack` for all tokens from `first` on, zeros where there is nothing to see: taps (taps, tokens, hidden)."""

    first: int
    taps: torch.Tensor


class FusedDecoder:
    """A loaded decoder's weights, run through the GPU's kernels.

    Args:
        model: The decoder, in bfloat16 or float16 on the device.
        pool: (layers, slots, 2, kv_heads, head_dim).

    Attributes:
        told: What a head wants to know of each token, if there is one.
    """

    def __init__(self, model: Decoder, pool: torch.Tensor) -> None:
        self.model = model
        self.told: Told | None = None
        self._pool = pool.unbind(0)

    def thin(self) -> FusedDecoder:
        """The same with one layer of each kind: it launches the same kernels."""
        decoder, model = copy.copy(self), copy.copy(self.model)
        model.layers = list({type(layer.mlp): layer for layer in reversed(model.layers)}.values())
        decoder.model = model
        return decoder

    def logits(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        deepstack: DeepStack | Shown | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings (tokens, hidden) → float32 logits (rows, vocab) of the tokens `ends`, or of all.

        `x` is changed. `positions` as in `Decoder.forward`.
        """
        model = self.model
        rotation = model.rope.at(positions)
        num_taps = 0 if deepstack is None else len(deepstack.taps)
        delta: torch.Tensor | None = None
        for layer in model.layers:
            delta = self._layer(layer, x, delta, rotation, plan)
            if layer.index < num_taps:
                assert deepstack is not None
                if isinstance(deepstack, Shown):
                    x[deepstack.first :] += deepstack.taps[layer.index]
                else:
                    x.index_add_(0, deepstack.tokens, deepstack.taps[layer.index])
        assert delta is not None
        if self.told is not None and self.told.wants(model.config.num_layers):
            added = delta.sum(0) if delta.dim() == 3 else delta
            self.told.write(model.config.num_layers, plan.places, (x + added).to(x.dtype))
        if ends is not None:
            x, delta = x.index_select(0, ends), delta.index_select(-2, ends)
        return model.head.wide(add_norm(delta, x, model.norm))

    def _layer(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        plan: StepPlan,
    ) -> torch.Tensor:
        """Adds `delta` and the layer's attention to `x` in place; returns what its MLP adds.

        What is added is (tokens, hidden), or float32 parts (splits, tokens, hidden) of it.
        """
        normed = add_norm(delta, x, layer.attention_norm)
        if self.told is not None and self.told.wants(layer.index):
            self.told.write(layer.index, plan.places, x)
        query = rotate_and_write(
            heads_of(normed, layer.qkv, layer.head_dim),
            rotation,
            plan.slots,
            self._pool[layer.index],
            num_kv_heads=layer.num_kv_heads,
            norm_weight=None if layer.qk_norm is None else layer.qk_norm.weight,
            eps=0.0 if layer.qk_norm is None else layer.qk_norm.eps,
        )
        attended = to_residual(plan.read(layer.index, query), layer.out)
        normed = add_norm(attended, x, layer.mlp_norm)
        if isinstance(layer.mlp, GatedMLP):
            return gated_mlp(layer.mlp, normed)
        assert isinstance(layer.mlp, Experts)
        return run_experts(layer.mlp, normed)


def heads_of(normed: torch.Tensor, qkv: Linear, head_dim: int) -> torch.Tensor:
    """Queries, keys and values: (tokens, heads + 2 kv_heads, head_dim), or float32 parts of them in front of that."""
    if is_skinny_for_heads(normed, qkv.inputs):
        heads = skinny(normed, qkv.weight, qkv.bias, heads_tiles(len(normed), qkv.outputs, qkv.inputs))
    else:
        heads = qkv(normed)
    return heads.view(*heads.shape[:-1], -1, head_dim)


def gated_mlp(mlp: GatedMLP, normed: torch.Tensor) -> torch.Tensor:
    """What an MLP adds to the residual stream, as of `to_residual`."""
    gate_up = mlp.gate_up
    if is_skinny(normed, gate_up.inputs):
        tiles = gate_up_tiles(len(normed), gate_up.outputs // 2)
        activated = skinny_gate_up(normed, gate_up.weight, gate_up.bias, tiles)
    else:
        activated = silu_mul(gate_up(normed))
    return to_residual(activated, mlp.down)


def to_residual(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """A product whose result is added to the residual stream, in parts where rows are few."""
    if is_skinny(x, linear.inputs):
        tiles = residual_tiles(len(x), linear.outputs, linear.inputs)
        return skinny(x, linear.weight, linear.bias, tiles)
    return linear(x)


def add_norm(added: torch.Tensor | None, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Adds what a product gave to `x` in place, and normalises it."""
    if added is not None and added.dim() == 3:
        return add_parts_rms_norm(added, x, norm.weight, norm.eps)
    if added is None:
        return rms_norm(x, norm.weight, norm.eps)
    return rms_norm(added, norm.weight, norm.eps, into=x)
