"""An EAGLE-3 head written down as plainly as can be, one token at a time: what every quicker form is compared with."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    theta: float = 10000.0
    eps: float = 1e-5


@dataclass
class PlainHead:
    """Weights by their published names, in float32, and the target's table of embeddings and outputs."""

    weights: dict[str, Tensor]
    table: Tensor
    sizes: Sizes
    keys: list[Tensor] = field(default_factory=list)  # one (kv_heads, head_dim) a place that counts
    values: list[Tensor] = field(default_factory=list)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.sizes.eps) * self.weights[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = position * self.sizes.theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    def fuse(self, states: Tensor) -> Tensor:
        """(fused, width), what the target knew at one token → (width,)."""
        return self.weights["fc.weight"] @ states.flatten()

    def both(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: (2 * width,)."""
        return torch.cat((self.norm("midlayer.input_layernorm", embedding), self.norm("midlayer.hidden_norm", hidden)))

    def remember(self, embedding: Tensor, hidden: Tensor, position: int) -> None:
        """One more place to look back at: the embedding of its token, and what was known before it."""
        both = self.both(embedding, hidden)
        key, value = (self.weights[f"midlayer.self_attn.{name}_proj.weight"] @ both for name in "kv")
        self.keys.append(self.rotated(key.view(self.sizes.kv_heads, -1), position))
        self.values.append(value.view(self.sizes.kv_heads, -1))

    def see(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        """One more place, and what is foreseen from it: (width,), before the norm."""
        sizes, w = self.sizes, self.weights
        self.remember(embedding, hidden, position)
        query = w["midlayer.self_attn.q_proj.weight"] @ self.both(embedding, hidden)
        q = self.rotated(query.view(sizes.heads, -1), position)
        keys, values = torch.stack(self.keys), torch.stack(self.values)  # (places, kv_heads, head_dim)
        mixed = []
        for head in range(sizes.heads):
            own = head * sizes.kv_heads // sizes.heads
            scores = keys[:, own] @ q[head] / sizes.head_dim**0.5
            mixed.append(scores.softmax(0) @ values[:, own])
        x = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = self.norm("midlayer.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(w["midlayer.mlp.gate_proj.weight"] @ inner)
        return x + w["midlayer.mlp.down_proj.weight"] @ (gate * (w["midlayer.mlp.up_proj.weight"] @ inner))

    def says(self, hidden: Tensor) -> int:
        """The token that a state foresees."""
        return int((self.table @ self.norm("norm", hidden)).argmax())

    def forget(self, places: int) -> None:
        """Keep the first `places` only."""
        del self.keys[places:], self.values[places:]

    def round(self, embedding: Tensor, hidden: Tensor, position: int, drafts: int) -> list[int]:
        """Tokens drafted from one place on, each from the head's own state before it; only the place itself stays."""
        places, tokens = len(self.keys), []
        for step in range(drafts):
            hidden = self.see(embedding, hidden, position + step)
            tokens.append(self.says(hidden))
            embedding = self.table[tokens[-1]]
        self.forget(places + 1)
        return tokens
