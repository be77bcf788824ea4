"""The decoder that today's language models share: grouped-query attention, RoPE, RMSNorm, a gated MLP or experts.

A model's own file reads its configuration into a `DecoderConfig`; what sets models apart is a field there. This one
knows nothing of requests, slots or sampling: it turns embeddings of a step's tokens into hidden states, and some of
those into logits; attention over the past is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionPlan
from engine.models.experts import Experts, ExpertsConfig
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.linear import Embedding, Linear
from preprocess.blocks.norm import QKNorm, RMSNorm
from preprocess.blocks.rope import Rope, RopeConfig
from preprocess.errors import ModelError


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of the model, and which of the parts it has that not every decoder has.

    Attributes:
        qkv_bias: Queries, keys and values have biases (Qwen2).
        out_bias: What attention gives back has one.
        mlp_bias: All of an MLP has biases.
        qk_norm: Query and key heads are normalised before they are rotated (Qwen3).
        experts: Of the layers that have experts in place of one MLP; None where no layer has.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None

    def check(self, fields: Fields) -> None:
        """Raises `ModelError` where sizes do not fit each other."""
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_key_value_heads {self.num_kv_heads}"
            raise fields.error("num_attention_heads", self.num_heads, expected)
        if self.head_dim % 2:
            raise fields.error("head_dim", self.head_dim, "an even number")
        self.rope.check(fields, self.head_dim)


@dataclass(frozen=True, slots=True)
class DeepStack:
    """What deeper looks at a picture add to the first layers' results (DeepStack, arXiv:2406.04334).

    Attributes:
        tokens: (visual tokens,) int64: which of a step's tokens they are.
        taps: (taps, visual tokens, hidden): what the result of layer 0, 1, … gets added there.
    """

    tokens: torch.Tensor
    taps: torch.Tensor


class GatedMLP:
    """down(silu(gate(x)) · up(x)) (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, width: int, inner: int, *, bias: bool = False) -> None:
        gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = Linear.load(checkpoint, gate_up, width, [inner, inner], bias=bias)
        self.down = Linear.load(checkpoint, f"{prefix}.down_proj", inner, width, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) → the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (tokens, intermediate)
        return self.down(F.silu(gate) * up)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, index: int, config: DecoderConfig) -> None:
        width, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.index = index
        self.num_heads = heads
        self.num_kv_heads = kv_heads
        self.head_dim = dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.attention_norm = RMSNorm.load(checkpoint, f"{prefix}.input_layernorm", width, eps)
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv = Linear.load(checkpoint, qkv, width, sizes, bias=config.qkv_bias)
        self.qk_norm = QKNorm.load(checkpoint, attention, heads, kv_heads, dim, eps) if config.qk_norm else None
        self.out = Linear.load(checkpoint, f"{attention}.o_proj", heads * dim, width, bias=config.out_bias)
        self.mlp_norm = RMSNorm.load(checkpoint, f"{prefix}.post_attention_layernorm", width, eps)
        self.mlp: Callable[[torch.Tensor], torch.Tensor]
        if config.experts is not None and config.experts.covers(index):
            self.mlp = Experts.load(checkpoint, mlp, width, config.experts)
        else:
            self.mlp = GatedMLP(checkpoint, mlp, width, config.intermediate_size, bias=config.mlp_bias)

    def __call__(
        self, x: torch.Tensor, rope: Rope, rotation: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """(tokens, hidden) → the same."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), -1, self.head_dim)  # (tokens, heads + 2 kv_heads, head_dim)
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            self.qk_norm.normalise_(qk)
        rope.rotate_(qk, *rotation)
        kv = qkv[:, self.num_heads :].view(
            len(x), 2, self.num_kv_heads, self.head_dim
        )  # (tokens, 2, kv_heads, head_dim)
        x = x + self.out(plan.attend(self.index, qkv[:, : self.num_heads], kv))
        return x + self.mlp(self.mlp_norm(x))


class Decoder:
    """Embedding, layers, norm and head.

    Args:
        checkpoint: Where weights come from.
        config: Sizes.
        prefix: Where its tensors are, such as ``"model.text_model"``.
        head: The output layer's module, such as ``"lm_head"``; without its own tensor it is the embedding table.
        tied: Whether the configuration says that it is.

    Attributes:
        progress: Called at every layer.
    """

    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig, *, prefix: str, head: str, tied: bool) -> None:
        self.config = config
        table = f"{prefix}.embed_tokens"
        if tied and not checkpoint.has(f"{table}.weight") and checkpoint.has(f"{head}.weight"):
            table = head  # one tensor, stored under its other name
        self.embedding = Embedding.load(checkpoint, table, config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(checkpoint, f"{prefix}.layers.{index}", index, config) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm.load(checkpoint, f"{prefix}.norm", config.hidden_size, config.rms_norm_eps)
        if checkpoint.has(f"{head}.weight"):
            self.head = Linear.load(checkpoint, head, config.hidden_size, config.vocab_size, bias=False)
        elif tied and checkpoint.device.type == "cuda":
            self.head = Linear(self.embedding.table)  # a CPU lays the head out in its own way
        elif tied:
            self.head = Linear.load(
                checkpoint,
                table,
                config.hidden_size,
                config.vocab_size,
                bias=False,
                kind="Embedding",
            )
        else:
            raise ModelError(f"tensor {head}.weight is missing and tie_word_embeddings is false")
        self.rope = config.rope.build(
            config.head_dim, config.max_positions, dtype=checkpoint.dtype, device=checkpoint.device
        )

        self.progress: Callable[[], None] = lambda: None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) → (tokens, hidden)."""
        return self.embedding(token_ids)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        deepstack: DeepStack | None = None,
        features: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Embeddings (tokens, hidden) → hidden states (tokens, hidden), not yet normalised.

        `positions`: (tokens,), or (3, tokens) temporal, height and width for a model with M-RoPE. `features`: for each
        of its keys n, takes the hidden states after n layers, (tokens, hidden).
        """
        rotation = self.rope.at(positions)
        num_taps = 0 if deepstack is None else len(deepstack.taps)
        for index, layer in enumerate(self.layers):
            if features is not None and index in features:
                features[index] = x
            self.progress()
            x = layer(x, self.rope, rotation, plan)
            if deepstack is not None and index < num_taps:
                x.index_add_(0, deepstack.tokens, deepstack.taps[index])
        if features is not None and len(self.layers) in features:
            features[len(self.layers)] = x
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, hidden) → float32 logits (rows, vocab)."""
        return self.head.wide(self.norm(x))
