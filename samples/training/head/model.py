"""The head: one layer that foresees what the target says next (EAGLE-3, arXiv:2503.01840), in the published layout.

    place p:  embedding of token p ─── input_layernorm ─┐
              what the target knew at p - 1 ── fc ──┬───┴ hidden_norm ─ attention ─ + ─ mlp ─ + ─ norm ─ the target's
              (inputs of three of its layers)       └────────────────────────────── ┘ ──────┘ │          lm_head: p + 1
                                                                                              ▼
              a second draft takes this, before the norm, in the place of what the target knew at p

Queries, keys and values read embedding and hidden state side by side. Keys and values of earlier places come from what
the target knew; those of a round's drafts from the head's own states. Vision tokens have the target's merged vision
embeddings. Embedding table and output table are the target's. Place 0 has nothing before it and is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samples.training.model import RMSNorm, Shape


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; attention and width are the target's."""

    width: int = 384
    hidden: int = 512
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    fused: int = 3
    rope_theta: float = 10000.0

    @staticmethod
    def beside(target: Shape, hidden: int, fused: int = 3) -> "HeadShape":
        """A head that reads what `target` computes."""
        return HeadShape(target.width, hidden, target.heads, target.kv_heads, target.head_dim, fused, target.rope_theta)


class HeadAttention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        inputs = 2 * shape.width
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)


class HeadMLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.hidden_norm = RMSNorm(shape.width)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = HeadMLP(shape)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions on (..., tokens, heads, head_dim); `positions` (..., tokens)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency  # (..., tokens, 1, head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Head(nn.Module):
    """`state_dict()` has the names of a published EAGLE-3 checkpoint whose embedding and head are the target's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.fused * shape.width, shape.width, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(shape.width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def begin(self, target: dict[str, Tensor], layer: int) -> None:
        """Start as `layer` of the target, the last that is fused, which would have come next: its attention on the
        hidden state, and the inner neurons of its MLP that say most.
        """
        width, mid = self.shape.width, self.midlayer
        prefix = f"model.text_model.layers.{layer}."
        given = {name.removeprefix(prefix): tensor for name, tensor in target.items() if name.startswith(prefix)}
        out = given["mlp.down_proj.weight"]
        loud = out.norm(dim=0).topk(self.shape.hidden).indices
        with torch.no_grad():
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, -width:] += torch.eye(width)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(mid.self_attn, name).weight
                weight[:, :width] *= 0.5
                weight[:, width:] = given[f"self_attn.{name}.weight"]
            mid.self_attn.o_proj.weight.copy_(given["self_attn.o_proj.weight"])
            mid.hidden_norm.weight.copy_(given["input_layernorm.weight"])
            mid.post_attention_layernorm.weight.copy_(given["post_attention_layernorm.weight"])
            mid.mlp.gate_proj.weight.copy_(given["mlp.gate_proj.weight"][loud])
            mid.mlp.up_proj.weight.copy_(given["mlp.up_proj.weight"][loud])
            mid.mlp.down_proj.weight.copy_(out[:, loud])
            self.norm.weight.copy_(0.25 * target["model.text_model.norm.weight"])  # unsure of itself: it knows nothing

    def fuse(self, states: Tensor) -> Tensor:
        """What the target knew (..., fused, width) → (..., width)."""
        return self.fc(states.flatten(-2))

    def _inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)), -1)

    def keys(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (..., tokens, kv_heads, head_dim) of normalised inputs (..., tokens, 2 * width)."""
        attention, size = self.midlayer.self_attn, (self.shape.kv_heads, self.shape.head_dim)
        k = rotated(attention.k_proj(inputs).unflatten(-1, size), positions, self.shape.rope_theta)
        return k, attention.v_proj(inputs).unflatten(-1, size)

    def drafts(self, embeds: Tensor, states: Tensor, starts: Tensor, steps: int) -> Iterator[Tensor]:
        """Hidden states of the 1st, 2nd, … draft of rounds that begin at many places of a batch of talks.

        Args:
            embeds: (talks, n, width): embeddings of tokens 1 … n; talks that are shorter have anything at their end.
            states: (talks, n, fused, width): what the target knew at tokens 0 … n - 1.
            starts: (talks, rounds): entries at which rounds begin: entry s holds token s + 1, and its first draft is
                token s + 2. Tokens drafted in a round are those of `embeds`: drafts count while earlier ones are right.
            steps: Drafts of a round.

        Yields:
            (talks, rounds, width), before the norm.
        """
        shape, attention = self.shape, self.midlayer.self_attn
        group = shape.heads // shape.kv_heads
        entries = embeds.shape[1]
        fused = self.fuse(states)  # (talks, n, width)
        inputs = self._inputs(embeds, fused)  # (talks, n, 2 * width)
        positions = torch.arange(1, entries + 1, device=embeds.device).expand(embeds.shape[:2])
        keys, values = self.keys(inputs, positions)  # (talks, n, kv_heads, head_dim)
        keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)  # (talks, kv, dim, n), (talks, kv, n, dim)
        before = torch.arange(entries, device=embeds.device) <= starts[..., None]  # (talks, rounds, n)
        bias = torch.zeros(before.shape, device=embeds.device).masked_fill(~before, -torch.inf)
        bias = bias.repeat_interleave(group, 1)[:, None]  # (talks, 1, rounds * group, n)

        def at(x: Tensor, places: Tensor) -> Tensor:
            return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))

        hidden, mixed_in = at(fused, starts), at(inputs, starts)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            places = (starts + step).clamp(max=entries - 1)
            if step:
                mixed_in = self._inputs(at(embeds, places), hidden)
                own.append(self.keys(mixed_in, places + 1))  # each (talks, rounds, kv_heads, head_dim)
            q = attention.q_proj(mixed_in).unflatten(-1, (shape.heads, shape.head_dim))
            q = rotated(q, places + 1, shape.rope_theta) * shape.head_dim**-0.5
            q = q.unflatten(2, (shape.kv_heads, group))  # (talks, rounds, kv_heads, group, head_dim)
            talks, rounds = starts.shape
            rows = q.permute(0, 2, 1, 3, 4).flatten(2, 3)  # (talks, kv_heads, rounds * group, head_dim)
            scores = [(rows @ keys).float() + bias]
            for k, _ in own:  # what this round drafted before: one key a round
                one = (q * k[:, :, :, None]).sum(-1)  # (talks, rounds, kv_heads, group)
                scores.append(one.permute(0, 2, 1, 3).flatten(2)[..., None].float())
            chance = torch.cat(scores, -1).softmax(-1).to(values.dtype)
            mixed = chance[..., :entries] @ values  # (talks, kv_heads, rounds * group, head_dim)
            for n, (_, v) in enumerate(own):
                wide = v.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
                mixed = mixed + chance[..., entries + n, None] * wide
            mixed = mixed.unflatten(2, (rounds, group)).permute(0, 2, 1, 3, 4).reshape(talks, rounds, -1)
            hidden = hidden + attention.o_proj(mixed)
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            yield hidden
