"""The configuration of Llama language models (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

from engine.models.decoder import DecoderConfig
from preprocess.blocks.fields import Fields
from preprocess.blocks.rope import RopeConfig


def llama_config(fields: Fields) -> DecoderConfig:
    """From a text configuration; absent fields are what transformers' `LlamaConfig` makes them."""
    fields.choice("model_type", ("llama",), "llama")
    fields.choice("hidden_act", ("silu",), "silu")
    heads = fields.integer("num_attention_heads", 32)
    hidden = fields.integer("hidden_size", 4096)
    max_positions = fields.integer("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 11008),
        num_layers=fields.integer("num_hidden_layers", 32),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        # No text_config at all means 1e-5, one without this field 1e-6: so it is in transformers' classes.
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6 if fields.values else 1e-5),
        max_positions=max_positions,
        rope=RopeConfig.read(fields, max_positions=max_positions),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    config.check(fields)
    return config
