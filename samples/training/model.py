"""The bundled model for training and testing: same parameter names and arithmetic as transformers' SmolVLM.

It differs from transformers only in form: no boolean-mask indexing, so that it compiles, and documents packed in rows.
The configuration is frozen; `hf_config()` is what `config.json` holds.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SIDE = 256  # pixels
IMAGE_TOKENS = 64  # vision tokens a picture


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    vision_width: int = 320
    vision_hidden: int = 1280
    vision_layers: int = 8
    vision_heads: int = 5
    patch: int = 16
    scale: int = 2
    width: int = 384
    hidden: int = 1024
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 6144
    rope_theta: float = 10000.0


SHAPE = Shape()


def hf_config(shape: Shape = SHAPE) -> dict[str, Any]:
    """The contents of `config.json` (without quantisation)."""
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "dtype": "bfloat16",
        "scale_factor": shape.scale,
        "image_token_id": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": shape.vision_width,
            "intermediate_size": shape.vision_hidden,
            "num_hidden_layers": shape.vision_layers,
            "num_attention_heads": shape.vision_heads,
            "num_channels": 3,
            "image_size": IMAGE_SIDE,
            "patch_size": shape.patch,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": shape.width,
            "intermediate_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    }


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class VisionAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.vision_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(shape.vision_width, shape.vision_width))

    def forward(self, x: Tensor) -> Tensor:
        pictures, patches, width = x.shape
        q, k, v = (
            proj(x).view(pictures, patches, self.heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)  # (pictures, heads, patches, head_dim)
        return self.out_proj(mixed.transpose(1, 2).reshape(pictures, patches, width))


class VisionMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.vision_width, shape.vision_hidden)
        self.fc2 = nn.Linear(shape.vision_hidden, shape.vision_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = VisionAttention(shape)
        self.layer_norm1 = nn.LayerNorm(shape.vision_width, eps=1e-6)
        self.mlp = VisionMLP(shape)
        self.layer_norm2 = nn.LayerNorm(shape.vision_width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, shape.vision_width, shape.patch, shape.patch)
        self.position_embedding = nn.Embedding((IMAGE_SIDE // shape.patch) ** 2, shape.vision_width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)  # (pictures, patches, width)
        return patches + self.position_embedding.weight.to(patches.dtype)


class VisionEncoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(shape) for _ in range(shape.vision_layers))


class VisionModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(shape)
        self.encoder = VisionEncoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.vision_width, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class Projection(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.vision_width * shape.scale**2, shape.width, bias=False)


class Connector(nn.Module):
    """Pixel shuffle and projection: (pictures, 256, vision width) to (pictures, 64, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.scale
        self.modality_projection = Projection(shape)

    def forward(self, x: Tensor) -> Tensor:
        pictures, patches, width = x.shape
        side, scale = math.isqrt(patches), self.scale
        x = x.view(pictures, side // scale, scale, side // scale, scale, width)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(pictures, patches // scale**2, width * scale**2)
        return self.modality_projection.proj(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (rows, heads, tokens, head_dim); `cos` and `sin` are (rows, 1, tokens, head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Cache:
    """Keys and values of earlier tokens, one pair a layer, each (rows, kv_heads, tokens, head_dim)."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.pairs:
            before_k, before_v = self.pairs[layer]
            k, v = torch.cat((before_k, k), 2), torch.cat((before_v, v), 2)
        self.pairs[layer] = (k, v)
        return k, v


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        rows, tokens, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, tokens, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(rows, tokens, self.kv_heads, -1).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(rows, tokens, self.kv_heads, -1).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (rows, heads, tokens, head_dim)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.width)
        self.post_attention_layernorm = RMSNorm(shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = RMSNorm(shape.width)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """`x` (rows, tokens, width), `positions` (rows, tokens), `mask` bool (rows, 1, tokens, keys)."""
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = positions[:, None, :, None].float() * frequency  # (rows, 1, tokens, head_dim / 2)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, cache)
        return self.norm(x)


class Inner(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vision_model = VisionModel(shape)
        self.connector = Connector(shape)
        self.text_model = TextModel(shape)


class BundledModel(nn.Module):
    """The whole network; `state_dict()` has the names of a SmolVLM checkpoint (without the tied `lm_head`)."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.model = Inner(shape)
        self.apply(self._initialise)
        for block in (*self.model.vision_model.encoder.layers, *self.model.text_model.layers):
            attention = block.self_attn
            depth = math.sqrt(2 * shape.layers)
            last = attention.out_proj if hasattr(attention, "out_proj") else attention.o_proj
            into = block.mlp.fc2 if hasattr(block.mlp, "fc2") else block.mlp.down_proj
            for linear in (last, into):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5 / depth)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def see(self, pixels: Tensor) -> Tensor:
        """(pictures, 3, 256, 256) in [-1, 1] to vision tokens (pictures, 64, width)."""
        return self.model.connector(self.model.vision_model(pixels))

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        seen: Tensor | None,
        places: Tensor | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Last hidden states (rows, tokens, width).

        `seen` (n, width) are vision tokens, `places` (n,) their places in the flattened rows.
        """
        x = self.model.text_model.embed_tokens(ids)
        if seen is not None and places is not None:
            x = x.reshape(-1, x.shape[-1]).index_copy(0, places, seen.to(x.dtype)).view(x.shape)
        return self.model.text_model(x, positions, mask, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.text_model.embed_tokens.weight)

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], pictures: list[Tensor], ends: set[int], most: int = 48
    ) -> list[list[int]]:
        """Greedy answers to a batch of prompts.

        `pictures[i]` is (pictures of prompt i, 3, 256, 256) in [-1, 1]; `ends` stop an answer and are not part of it.
        """
        device, dtype = (
            self.model.text_model.embed_tokens.weight.device,
            self.model.text_model.embed_tokens.weight.dtype,
        )
        rows, longest = len(prompts), max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        real = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts], device=device)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        places = (ids.flatten() == 3).nonzero().flatten()
        pixels = torch.cat(pictures).to(device, dtype)
        seen = torch.cat([self.see(part) for part in pixels.split(256)]).flatten(0, 1) if len(pixels) else None
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        mask = (causal & real[:, None, :]) | torch.eye(longest, dtype=torch.bool, device=device)
        cache = Cache()
        hidden = self.hidden(ids, positions, mask[:, None], seen, places if seen is not None else None, cache)
        answers: list[list[int]] = [[] for _ in prompts]
        going = [True] * rows
        position = positions[:, -1:]
        for _ in range(most):
            chosen = self.logits(hidden[:, -1]).float().argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                going[row] = going[row] and token not in ends
                if going[row]:
                    answers[row].append(token)
            if not any(going):
                break
            real = torch.cat((real, torch.ones(rows, 1, dtype=torch.bool, device=device)), 1)
            position = position + 1
            hidden = self.hidden(chosen[:, None], position, real[:, None, None, :], None, None, cache)
        return answers


def load(folder: Path, dtype: torch.dtype = torch.float32) -> BundledModel:
    """A checkpoint folder, plain or 8-bit, as a model for testing."""
    from safetensors.torch import load_file

    from samples.training.quantise import decompress

    state: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state.update(load_file(shard))
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        state = decompress(state)
    state.pop("lm_head.weight", None)
    model = BundledModel()
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()})
    return model.to(dtype).eval()
