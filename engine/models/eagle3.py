"""A draft head in the layout of EAGLE-3 (Li et al. 2025, arXiv:2503.01840), loaded by the names of published ones.

    x_p  = [norm(embedding of token p), norm(g_(p-1))]                       (2 hidden)
    a_p  = g_(p-1) + attention(x_p)           over the pairs of the positions 1 … p
    h_p  = a_p + mlp(norm(a_p))                                              (hidden)
    token p + 1 is guessed by lm_head(norm(h_p))

    g_(p-1) = fc([three hidden states that the target has for position p - 1])   while the text is known
            = h_(p-1)                                                            while the head goes on by itself

The first token has no pair. A pair is rotated by the position p - 1, as in the engines that such heads are trained for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.backend import AttentionPlan
from engine.models.decoder import Decoder, DecoderConfig, GatedMLP
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.linear import Embedding, Linear
from preprocess.blocks.norm import RMSNorm
from preprocess.blocks.rope import RopeConfig
from preprocess.errors import ModelError

_LAYER_NAMES: Final = ("midlayer", "layers.0")
_LAYER_IDS: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of a head.

    Attributes:
        draft_vocab_size: Ids that it can guess; `vocab_size` where that is all.
        layers: It reads the target's hidden states after so many layers each.
        norm_before_residual: Whether what is added to attention's result is normalised, too.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    layers: tuple[int, ...]
    norm_before_residual: bool

    @classmethod
    def read(cls, fields: Fields, *, num_target_layers: int) -> Eagle3Config:
        """From a head's `config.json`.

        Raises:
            ModelError: A field that cannot be, or names a layer that the target does not have.
        """
        fields.choice("hidden_act", ("silu",), "silu")
        fields.refuse("attention_bias", unless=False, reason="biases in attention are not supported")
        fields.refuse("mlp_bias", unless=False, reason="biases in the MLP are not supported")
        fields.refuse("num_hidden_layers", unless=1, reason="a head has one layer")
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        vocab_size = fields.integer("vocab_size")
        max_positions = fields.integer("max_position_embeddings", 2048)
        config = cls(
            vocab_size=vocab_size,
            draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=_rope(fields, max_positions),
            layers=_layers(fields, num_target_layers),
            norm_before_residual=fields.flag("norm_before_residual", False),
        )
        if config.num_heads % config.num_kv_heads:
            expected = f"a multiple of num_key_value_heads {config.num_kv_heads}"
            raise fields.error("num_attention_heads", config.num_heads, expected)
        if config.head_dim % 2:
            raise fields.error("head_dim", config.head_dim, "an even number")
        config.rope.check(fields, config.head_dim)
        return config


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """M-RoPE where the head's own fields have sections, plain positions elsewhere, whatever the target does."""
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.section(name)
        if section.has("mrope_section"):
            interleaved = section.flag("mrope_interleaved", False)
            sections = (1, 1, 1)  # those of the file count
            return RopeConfig.read(fields, max_positions=max_positions, sections=sections, interleaved=interleaved)
    return RopeConfig.read(fields, max_positions=max_positions)


def _layers(fields: Fields, num_target_layers: int) -> tuple[int, ...]:
    """Where a head was trained to read. Two spellings: ids among all fields count the layers before the place, those in
    `eagle_config` name the layer whose result it is, one less.
    """
    own = fields.section("eagle_config")
    if own.has(_LAYER_IDS) and own.values[_LAYER_IDS]:
        where, listed, more = own, own.values[_LAYER_IDS], 1
    elif fields.has(_LAYER_IDS) and fields.values[_LAYER_IDS]:
        where, listed, more = fields, fields.values[_LAYER_IDS], 0
    else:
        where, listed, more = fields, [2, num_target_layers // 2, num_target_layers - 3], 0
    if not isinstance(listed, list) or not all(type(index) is int for index in listed):
        raise where.error(_LAYER_IDS, listed, "a list of layer indices")
    layers = tuple(index + more for index in listed)
    if not all(0 <= index <= num_target_layers for index in layers):
        raise where.error(_LAYER_IDS, listed, f"layers of a model that has {num_target_layers}")
    return layers


class Eagle3:
    """The weights of a head, and its forward over pairs.

    Args:
        checkpoint: Its folder.
        config: Sizes.

    Attributes:
        embedding: The head's own table of tokens; None: the target's.
        targets: int64 (draft_vocab_size,): which of the target's ids each of the head's logits means; None: the same.
    """

    def __init__(self, checkpoint: Checkpoint, config: Eagle3Config) -> None:
        self.config = config
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        prefix = "model." if checkpoint.has("model.fc.weight") else ""
        layer = prefix + next((name for name in _LAYER_NAMES if _has_layer(checkpoint, prefix + name)), _LAYER_NAMES[0])
        self.fc = Linear.load(checkpoint, f"{prefix}fc", len(config.layers) * hidden, hidden, bias=False)
        self.token_norm = RMSNorm.load(checkpoint, f"{layer}.input_layernorm", hidden, eps)
        self.feature_norm = RMSNorm.load(checkpoint, f"{layer}.hidden_norm", hidden, eps)
        qkv = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv = Linear.load(checkpoint, qkv, 2 * hidden, sizes, bias=False)
        self.out = Linear.load(checkpoint, f"{layer}.self_attn.o_proj", heads * dim, hidden, bias=False)
        self.mlp_norm = RMSNorm.load(checkpoint, f"{layer}.post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(checkpoint, f"{layer}.mlp", hidden, config.intermediate_size)
        self.norm = RMSNorm.load(checkpoint, f"{prefix}norm", hidden, eps)
        self.embedding: Embedding | None = None
        if (table := _either(checkpoint, prefix, "embed_tokens", ".weight")) is not None:
            self.embedding = Embedding.load(checkpoint, table, config.vocab_size, hidden)
        self.head: Linear | None = None
        if (name := _either(checkpoint, prefix, "lm_head", ".weight")) is not None:
            self.head = Linear.load(checkpoint, name, hidden, config.draft_vocab_size, bias=False)
        elif config.draft_vocab_size != config.vocab_size:
            raise ModelError(
                f"{checkpoint.folder}: tensor lm_head.weight is missing, and the model's own has {config.vocab_size} "
                f"ids where draft_vocab_size is {config.draft_vocab_size}"
            )
        self.targets = self._targets(checkpoint, prefix)
        self.rope = config.rope.build(dim, config.max_positions, dtype=checkpoint.dtype, device=checkpoint.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """What the target has for tokens, (tokens, layers * hidden) → (tokens, hidden)."""
        return self.fc(features)

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Embeddings of tokens and features of those before them, (tokens, hidden) each → hidden states, not yet
        normalised. `positions` as in `Decoder.forward`.
        """
        normed = self.feature_norm(features)
        query, key_value = self._heads(embedded, normed, positions)
        x = (normed if self.config.norm_before_residual else features) + self.out(plan.attend(0, query, key_value))
        return x + self.mlp(self.mlp_norm(x))

    def entries(self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `forward` writes, (tokens, 2, kv_heads, head_dim): a pair's keys and values hang on no other's."""
        return self._heads(embedded, self.feature_norm(features), positions)[1]

    def _heads(
        self, embedded: torch.Tensor, normed: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (tokens, heads, head_dim), and keys and values."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        x = torch.cat((self.token_norm(embedded), normed), dim=1)  # (tokens, 2 hidden)
        qkv = self.qkv(x).view(len(x), -1, self.config.head_dim)  # (tokens, heads + 2 kv_heads, head_dim)
        self.rope.rotate_(qkv[:, : heads + kv_heads], *self.rope.at(positions))
        return qkv[:, :heads], qkv[:, heads:].view(len(x), 2, kv_heads, -1)

    def logits(self, hidden: torch.Tensor, target: Decoder) -> torch.Tensor:
        """Hidden states (rows, hidden) → float32 (rows, the target's vocabulary); -inf where the head knows no id."""
        own = (self.head or target.head).wide(self.norm(hidden))
        if self.targets is None:
            return own
        logits = own.new_full((len(own), self.config.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.targets, own)

    def _targets(self, checkpoint: Checkpoint, prefix: str) -> torch.Tensor | None:
        """From `d2t`, the distance from each of the head's ids to the target's; `t2d` says the same the other way."""
        config = self.config
        if (name := _either(checkpoint, prefix, "t2d")) is not None:
            checkpoint.whole(name, (config.vocab_size,))
        name = _either(checkpoint, prefix, "d2t")
        if name is None:
            if config.draft_vocab_size != config.vocab_size:
                raise ModelError(
                    f"{checkpoint.folder}: tensor d2t is missing, which says what the {config.draft_vocab_size} ids of "
                    "draft_vocab_size are"
                )
            return None
        distances = checkpoint.whole(name, (config.draft_vocab_size,)).long()
        targets = distances + torch.arange(len(distances), device=distances.device)
        if not bool(((targets >= 0) & (targets < config.vocab_size)).all()):
            raise ModelError(f"{checkpoint.folder}: tensor {name} leads to ids outside vocab_size {config.vocab_size}")
        return targets


def num_late_weights(config: Eagle3Config) -> int:
    """How many weights a pair passes that nobody guesses after: those of its keys and values."""
    keys_values = 2 * config.head_dim * config.num_kv_heads
    return (len(config.layers) * config.hidden_size + 2 * keys_values) * config.hidden_size


def num_weights(config: DecoderConfig | Eagle3Config) -> int:
    """About how many weights a token passes, of a `DecoderConfig` or an `Eagle3Config`: what its time goes by."""
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads) * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    if isinstance(config, Eagle3Config):
        fc = len(config.layers) * config.hidden_size**2
        return 2 * attention + mlp + fc + config.hidden_size * config.draft_vocab_size
    return config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size


def _either(checkpoint: Checkpoint, prefix: str, name: str, suffix: str = "") -> str | None:
    """The name under which a tensor is there, with the prefix of the others or without."""
    return next((full for full in (name, prefix + name) if checkpoint.has(full + suffix)), None)


def _has_layer(checkpoint: Checkpoint, layer: str) -> bool:
    return checkpoint.has(f"{layer}.hidden_norm.weight")
