"""The configurations of Qwen language models: Qwen2 (arXiv:2407.10671) and Qwen3 with its experts (arXiv:2505.09388).

By themselves (`qwen_text_config`) they can guess for larger ones. As part of Qwen-VL models they rotate heads by three
positions, temporal, height and width (M-RoPE, arXiv:2409.12191).
"""

from __future__ import annotations

from typing import Final

from engine.models.decoder import DecoderConfig
from engine.models.experts import ExpertsConfig
from preprocess.blocks.fields import Fields
from preprocess.blocks.rope import RopeConfig

_SLIDING: Final = "attention over a sliding window is not supported"


def qwen2_config(fields: Fields) -> DecoderConfig:
    """The text model of Qwen2-VL and Qwen2.5-VL; absent fields are what transformers' classes make them.

    Folders of their time have the text model's fields beside the others, with the whole model's `model_type`.
    """
    allowed = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl")
    fields.choice("model_type", allowed, "qwen2_vl_text")
    fields.choice("hidden_act", ("silu",), "silu")
    fields.refuse("use_sliding_window", unless=False, reason=_SLIDING)
    heads = fields.integer("num_attention_heads", 64)
    hidden = fields.integer("hidden_size", 8192)
    max_positions = fields.integer("max_position_embeddings", 32768)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", 152064),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 29568),
        num_layers=fields.integer("num_hidden_layers", 80),
        num_heads=heads,
        # Null means as many as query heads, absent means 8: so it is in transformers' classes.
        num_kv_heads=fields.integer("num_key_value_heads", heads if "num_key_value_heads" in fields.values else 8),
        head_dim=fields.integer("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        max_positions=max_positions,
        rope=RopeConfig.read(fields, max_positions=max_positions, theta=1e6, sections=(16, 24, 24)),
        qkv_bias=True,
    )
    config.check(fields)
    return config


def qwen3_config(fields: Fields, *, has_experts: bool = False) -> DecoderConfig:
    """The text model of Qwen3-VL, or of Qwen3-VL-MoE; absent fields are what transformers' classes make them."""
    kind = "qwen3_vl_moe_text" if has_experts else "qwen3_vl_text"
    fields.choice("model_type", (kind,), kind)
    fields.choice("hidden_act", ("silu",), "silu")
    fields.refuse("use_sliding_window", unless=False, reason=_SLIDING)
    bias = fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads", 16 if has_experts else 32)
    hidden = fields.integer("hidden_size", 2048 if has_experts else 4096)
    max_positions = fields.integer("max_position_embeddings", 128000)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", 151936),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 5632 if has_experts else 22016),
        num_layers=fields.integer("num_hidden_layers", 24 if has_experts else 32),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads if has_experts else 128),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope=RopeConfig.read(fields, max_positions=max_positions, theta=5e5, sections=(24, 20, 20), interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        experts=ExpertsConfig.read(fields, num_experts=60, top_k=4, intermediate_size=1408) if has_experts else None,
    )
    config.check(fields)
    return config


def qwen_text_config(fields: Fields) -> DecoderConfig:
    """A dense Qwen2, Qwen2.5 or Qwen3 that knows nothing of pictures: plain positions."""
    kind = fields.choice("model_type", ("qwen2", "qwen3"))
    fields.choice("hidden_act", ("silu",), "silu")
    fields.refuse("use_sliding_window", unless=False, reason=_SLIDING)
    bias = kind == "qwen3" and fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", 32768)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", hidden // heads if kind == "qwen2" else 128),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope=RopeConfig.read(fields, max_positions=max_positions),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        qk_norm=kind == "qwen3",
    )
    config.check(fields)
    return config
