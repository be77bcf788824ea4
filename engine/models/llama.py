"""The Llama language model (arXiv:2302.13971, arXiv:2407.21783): grouped-query attention, RoPE, RMSNorm, SwiGLU.

Knows nothing of requests, slots or sampling: it turns embeddings of a step's tokens into hidden states, and some of
those into logits; attention over the past is the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionPlan
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.linear import Embedding, Linear
from preprocess.blocks.norm import RMSNorm
from preprocess.blocks.rope import Rope, RopeConfig
from preprocess.errors import ModelError


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model."""

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

    @classmethod
    def read(cls, fields: Fields) -> LlamaConfig:
        """From a text configuration; absent fields are what transformers' `LlamaConfig` makes them."""
        fields.choice("model_type", ("llama",), "llama")
        fields.choice("hidden_act", ("silu",), "silu")
        fields.refuse("attention_bias", unless=False, reason="biases in attention are not supported")
        fields.refuse("mlp_bias", unless=False, reason="biases in the MLP are not supported")
        heads = fields.integer("num_attention_heads", 32)
        hidden = fields.integer("hidden_size", 4096)
        max_positions = fields.integer("max_position_embeddings", 2048)
        # No text_config at all means 1e-5, one without this field 1e-6: so it is in transformers' classes.
        eps = fields.number("rms_norm_eps", 1e-6 if fields.values else 1e-5)
        config = cls(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=fields.integer("num_hidden_layers", 32),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            rms_norm_eps=eps,
            max_positions=max_positions,
            rope=RopeConfig.read(fields, max_positions=max_positions),
        )
        if config.num_heads % config.num_kv_heads:
            raise fields.error("num_attention_heads", heads, f"a multiple of num_key_value_heads {config.num_kv_heads}")
        if config.head_dim % 2:
            raise fields.error("head_dim", config.head_dim, "an even number")
        return config


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, index: int, config: LlamaConfig) -> None:
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.attention_norm = RMSNorm.load(checkpoint, f"{prefix}.input_layernorm", width, eps)
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        self.qkv = Linear.load(checkpoint, qkv, width, [q_size, kv_size, kv_size], bias=False)
        self.out = Linear.load(checkpoint, f"{attention}.o_proj", q_size, width, bias=False)
        self.mlp_norm = RMSNorm.load(checkpoint, f"{prefix}.post_attention_layernorm", width, eps)
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        self.gate_up = Linear.load(checkpoint, gate_up, width, [inner, inner], bias=False)
        self.down = Linear.load(checkpoint, f"{mlp}.down_proj", inner, width, bias=False)

    def __call__(
        self, x: torch.Tensor, rope: Rope, rotation: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        """(tokens, hidden) → the same."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), -1, self.head_dim)  # (tokens, heads + 2 kv_heads, head_dim)
        rope.rotate_(qkv[:, : self.num_heads + self.num_kv_heads], *rotation)  # queries and keys, not values
        kv = qkv[:, self.num_heads :].view(
            len(x), 2, self.num_kv_heads, self.head_dim
        )  # (tokens, 2, kv_heads, head_dim)
        x = x + self.out(plan.attend(self.index, qkv[:, : self.num_heads], kv))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)  # each (tokens, intermediate)
        return x + self.down(F.silu(gate) * up)


class Llama:
    """Embedding, layers, norm and head.

    Args:
        checkpoint: Where weights come from.
        fields: The text configuration.
        prefix: Where its tensors are, such as ``"model.text_model"``.
        head: The output layer's module, such as ``"lm_head"``; without its own tensor it is the embedding table.
        tied: Whether the configuration says that it is.
    """

    def __init__(self, checkpoint: Checkpoint, fields: Fields, *, prefix: str, head: str, tied: bool) -> None:
        config = LlamaConfig.read(fields)
        self.config = config
        self.embedding = Embedding.load(checkpoint, f"{prefix}.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [
            LlamaLayer(checkpoint, f"{prefix}.layers.{index}", index, config) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm.load(checkpoint, f"{prefix}.norm", config.hidden_size, config.rms_norm_eps)
        if checkpoint.has(f"{head}.weight"):
            self.head = Linear.load(checkpoint, head, config.hidden_size, config.vocab_size, bias=False)
        elif tied:
            self.head = Linear.load(
                checkpoint,
                f"{prefix}.embed_tokens",
                config.hidden_size,
                config.vocab_size,
                bias=False,
                kind="Embedding",
            )
        else:
            raise ModelError(f"tensor {head}.weight is missing and tie_word_embeddings is false")
        self.rope = Rope(
            config.rope, config.head_dim, config.max_positions, dtype=checkpoint.dtype, device=checkpoint.device
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) → (tokens, hidden)."""
        return self.embedding(token_ids)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Embeddings (tokens, hidden) at `positions` (tokens,) → hidden states (tokens, hidden), not yet normalised."""
        rotation = self.rope.at(positions)
        for layer in self.layers:
            x = layer(x, self.rope, rotation, plan)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, hidden) → float32 logits (rows, vocab)."""
        return self.head(self.norm(x)).float()
