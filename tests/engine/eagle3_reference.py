"""A head in the layout of EAGLE-3 in plain torch, from its paper: whole sequences, no cache, nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class Reference:
    """The head of a folder. `embedding` (ids, hidden) and `head` (ids, hidden) are the model's, for what it lacks."""

    def __init__(self, folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.head = self.weights.get("lm_head.weight", head)

    def guess(
        self, features: torch.Tensor, token_ids: list[int], count: int, seen: dict[int, torch.Tensor]
    ) -> list[Any]:
        """Greedy guesses of what follows `token_ids`, and the logits of each over the model's ids.

        Args:
            features: (len(token_ids) - 1, 3 hidden): what the model has for all tokens but the last.
            token_ids: The text.
            count: How many.
            seen: Embeddings of the positions that are vision tokens.
        """
        given = features @ self.weights["fc.weight"].T
        ids = list(token_ids)
        result = []
        for _ in range(count):
            embedded = torch.stack([seen[at] if at in seen else self.embedding[own] for at, own in enumerate(ids)])
            hidden = self._layer(embedded[1:], given)
            logits = self._logits(hidden[-1])
            result.append((int(logits.argmax()), logits))
            ids.append(result[-1][0])
            given = torch.cat((given, hidden[-1:]))
        return result

    def _layer(self, embedded: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens 1 … n, and what is given for 0 … n - 1 → hidden states (n, hidden)."""
        weights, config = self.weights, self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        normed = self._norm(given, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), -1)
        q, k, v = (x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        q = self._rotated(q.view(len(x), heads, -1))
        k = self._rotated(k.view(len(x), kv_heads, -1)).repeat_interleave(heads // kv_heads, 1)
        v = v.view(len(x), kv_heads, -1).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = normed if config.get("norm_before_residual") else given
        x = residual + attended @ weights["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm(x, "midlayer.post_attention_layernorm")
        gate = F.silu(inner @ weights["midlayer.mlp.gate_proj.weight"].T)
        return (
            x + (gate * (inner @ weights["midlayer.mlp.up_proj.weight"].T)) @ weights["midlayer.mlp.down_proj.weight"].T
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._norm(hidden, "norm") @ self.head.T
        if "d2t" not in self.weights:
            return own
        logits = torch.full((self.config["vocab_size"],), -torch.inf)
        for index, distance in enumerate(self.weights["d2t"].tolist()):
            logits[index + distance] = own[index]
        return logits

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
