"""Makes heads in the layout of EAGLE-3 with tiny random weights, in folders as published ones are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tiny_head(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    prefix: str = "",
    layer: str = "midlayer",
    draft_vocab_size: int | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a head for the model of a folder, and returns its own.

    Args:
        folder: Where to write; made if missing.
        model: A folder that one of the `tiny_…` makers wrote.
        seed: Of the random float32 weights.
        prefix: Before the names of tensors, such as ``"model."``.
        layer: What the one layer is called.
        draft_vocab_size: Ids that it guesses; fewer than the model's bring `d2t` and `t2d`.
        has_embedding: Whether it has a table of tokens of its own.
        has_head: Whether it has an output layer of its own.
        fields: Of `config.json`, to add or replace; None leaves one out.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    whole = json.loads((model / "config.json").read_text())
    text = whole.get("text_config", whole)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab_size or vocab,
        **(fields or {}),
    }
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))

    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    inner, dim = config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        f"{layer}.input_layernorm.weight": norm(),
        f"{layer}.hidden_norm.weight": norm(),
        f"{layer}.self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * dim),
        f"{layer}.post_attention_layernorm.weight": norm(),
        f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
    }
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if has_embedding:
        tensors[f"{prefix}embed_tokens.weight"] = torch.randn(vocab, hidden, generator=generator)
    if has_head:
        tensors["lm_head.weight"] = matrix(draft_vocab_size or vocab, hidden)
    if draft_vocab_size:
        known = torch.randperm(vocab, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    save_file(tensors, folder / "model.safetensors")
    return folder
