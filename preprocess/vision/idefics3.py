"""The vision encoder of Idefics3 and SmolVLM: a SigLIP transformer over patches, then pixel shuffle and one projection.

Papers: SigLIP (arXiv:2303.15343), position buckets after NaViT (arXiv:2307.06304), pixel shuffle as in Idefics3
(arXiv:2408.12637).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.fusion import is_fused
from preprocess.blocks.linear import Embedding, Linear
from preprocess.blocks.norm import LayerNorm, Pair
from preprocess.model_folder import ModelFolder
from preprocess.vision.normalisation import Normalisation
from preprocess.vision.patches import Grid
from preprocess.vision.slices import EncoderState, encode_batch, leave

MAX_TILES: Final = 32
"""Tiles that go through the encoder together; more only cost memory."""


@dataclass(frozen=True, slots=True)
class Idefics3VisionConfig:
    """Sizes of the encoder. `scale_factor`: side of the block of patches that becomes one vision token."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    gelu: str
    scale_factor: int
    output_size: int

    @classmethod
    def read(cls, config: Fields) -> Idefics3VisionConfig:
        """From `config.json`; absent fields are what transformers' configuration classes make them."""
        vision = config.section("vision_config")
        vision.choice("model_type", ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm"), "idefics3_vision")
        vision.refuse("num_channels", unless=3, reason="only RGB is supported")
        act = vision.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
        result = cls(
            hidden_size=vision.integer("hidden_size", 1152),
            intermediate_size=vision.integer("intermediate_size", 3072),
            num_layers=vision.integer("num_hidden_layers", 12),
            num_heads=vision.integer("num_attention_heads", 16),
            image_size=vision.square("image_size", 224),
            patch_size=vision.square("patch_size", 32),
            layer_norm_eps=vision.number("layer_norm_eps", 1e-6),
            gelu="tanh" if act == "gelu_pytorch_tanh" else "none",
            scale_factor=config.integer("scale_factor", 2),
            output_size=config.section("text_config").integer("hidden_size", 4096),
        )
        if result.hidden_size % result.num_heads:
            raise vision.error(
                "hidden_size", result.hidden_size, f"a multiple of num_attention_heads {result.num_heads}"
            )
        return result


class EncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). What the MLP adds is left to the next layer's first norm."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Idefics3VisionConfig) -> None:
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        attention = f"{prefix}.self_attn"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        self.attention_norm = LayerNorm.load(checkpoint, f"{prefix}.layer_norm1", width, eps)
        self.qkv = Linear.load(checkpoint, qkv, width, [width] * 3, bias=True)
        self.out = Linear.load(checkpoint, f"{attention}.out_proj", width, width, bias=True)
        self.mlp_norm = LayerNorm.load(checkpoint, f"{prefix}.layer_norm2", width, eps)
        self.fc1 = Linear.load(checkpoint, f"{prefix}.mlp.fc1", width, inner, bias=True)
        self.fc2 = Linear.load(checkpoint, f"{prefix}.mlp.fc2", inner, width, bias=True)
        self.num_heads = config.num_heads
        self.gelu = config.gelu

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None, normed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (tiles, patches, hidden) and what is still to be added to it → the same two. `normed`: what the first norm
        gives, where it is known.
        """
        if normed is None:
            x, normed = self.attention_norm.of_sum(x, added)
        qkv = self.qkv(normed).view(*x.shape[:2], 3, self.num_heads, -1)  # (tiles, patches, 3, heads, dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (tiles, heads, patches, dim)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (tiles, patches, hidden)
        x, normed = self.mlp_norm.of_sum(x, self.out(attended))
        return x, self.fc2(self.fc1.gelu(normed, self.gelu))


class Idefics3Encoder:
    """uint8 tiles → vision tokens in the language model's width."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = Idefics3VisionConfig.read(checkpoint.config)
        model, width, patch = "model.vision_model", config.hidden_size, config.patch_size
        convolution = checkpoint.tensor(f"{model}.embeddings.patch_embedding.weight", (width, 3, patch, patch))
        bias = checkpoint.tensor(f"{model}.embeddings.patch_embedding.bias", (width,))
        self.config = config
        self.image_size = config.image_size
        self.num_taps = 0
        self.normalisation = Normalisation.read(ModelFolder(checkpoint.folder).image_settings, checkpoint.device)
        self.dtype = checkpoint.dtype
        self.progress: Callable[[], None] = lambda: None
        # Pixels stay in (row, column, channel) order, so the convolution's weight takes that order too.
        self.patch_embedding = Linear(convolution.permute(0, 2, 3, 1).flatten(1), bias)
        side = config.image_size // patch
        self.position_embedding = Embedding.load(
            checkpoint, f"{model}.embeddings.position_embedding", side * side, width
        )
        self.layers = [
            EncoderLayer(checkpoint, f"{model}.encoder.layers.{index}", config) for index in range(config.num_layers)
        ]
        self.num_layers = config.num_layers
        self.norm = LayerNorm.load(checkpoint, f"{model}.post_layernorm", width, config.layer_norm_eps)
        self._norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        self.projection = Linear.load(
            checkpoint,
            "model.connector.modality_projection.proj",
            width * config.scale_factor**2,
            config.output_size,
            bias=False,
        )
        self._positions: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each picture uint8 (tiles, height, width, 3) → (vision tokens, output_size), tiles in order.

        Tiles of one size go through together, whichever picture they belong to.
        """
        results: list[torch.Tensor | None] = [None] * len(pictures)
        by_size: dict[tuple[int, int], list[int]] = {}
        for index, picture in enumerate(pictures):
            by_size.setdefault((picture.shape[1], picture.shape[2]), []).append(index)
        for indices in by_size.values():
            tiles = torch.cat([pictures[index] for index in indices])
            batches = [encode_batch(self, batch) for batch in torch.split(tiles, MAX_TILES)]
            tiles_of = [len(pictures[index]) for index in indices]
            for index, tokens in zip(indices, torch.split(torch.cat(batches), tiles_of), strict=True):
                # A copy, since a cache frees each picture by itself: a view would keep the whole batch.
                results[index] = tokens.flatten(0, 1).clone()
        return [result for result in results if result is not None]

    def num_batches(self, shape: Sequence[int]) -> int:
        """See `SlicedEncoder.num_batches`."""
        return -(-shape[0] // MAX_TILES)

    def batches(self, picture: torch.Tensor) -> list[torch.Tensor]:
        """See `SlicedEncoder.batches`: some tiles each."""
        return list(torch.split(picture, MAX_TILES))

    def begin(self, batch: torch.Tensor) -> EncoderState:
        """See `SlicedEncoder.begin`: uint8 (tiles, height, width, 3). Raises ValueError for sides that do not fit."""
        patch, scale = self.config.patch_size, self.config.scale_factor
        num_tiles, rows, columns = batch.shape[0], batch.shape[1] // patch, batch.shape[2] // patch
        if not rows or not columns or rows % scale or columns % scale:
            raise ValueError(
                f"tile of {batch.shape[1]}×{batch.shape[2]} pixels, expected sides in {patch * scale} pixels"
            )
        # As in a convolution, what fills no patch is not seen.
        if is_fused(batch):
            from preprocess.vision.gpu_patches import cut

            grid, width = Grid(rows, columns), self.patch_embedding.inputs
            patches = cut(batch.unsqueeze(1), self.normalisation, grid, patch, width, self.dtype)
        else:
            tiles = self.normalisation(batch[:, : rows * patch, : columns * patch]).to(self.dtype)
            pixels = tiles.view(num_tiles, rows, patch, columns, patch, 3)
            patches = pixels.transpose(2, 3).reshape(num_tiles, rows * columns, -1)
        x = self.patch_embedding(patches)  # (tiles, patches, hidden)
        return EncoderState(x + self._position_rows(rows, columns), (rows, columns))

    def run(self, state: EncoderState, num_layers: int, out: Pair | None = None) -> bool:
        """See `VisionEncoder.run`."""
        added: torch.Tensor | None = None
        normed = state.normed
        for layer in self.layers[state.next_layer : state.next_layer + num_layers]:
            self.progress()
            state.x, added = layer(state.x, added, normed)
            normed = None
            state.next_layer += 1
        leave(state, added, self._norms[state.next_layer], out)
        return state.next_layer == self.num_layers

    def finish(self, state: EncoderState) -> torch.Tensor:
        """See `SlicedEncoder.finish`: (tiles, tokens, output_size)."""
        scale, (rows, columns) = self.config.scale_factor, state.grid
        x = self.norm(state.x) if state.normed is None else state.normed
        # Pixel shuffle: scale × scale neighbours side by side become one token.
        blocks = x.view(len(x), rows // scale, scale, columns // scale, scale, -1).transpose(2, 3)
        return self.projection(blocks.reshape(len(x), rows * columns // scale**2, -1))

    def _position_rows(self, rows: int, columns: int) -> torch.Tensor:
        """Position embeddings (rows * columns, hidden) of a grid of patches."""
        if (rows, columns) not in self._positions:
            side = self.config.image_size // self.config.patch_size
            ids = position_buckets(rows, side)[:, None] * side + position_buckets(columns, side)
            self._positions[rows, columns] = self.position_embedding(
                ids.flatten().to(self.position_embedding.table.device)
            )
        return self._positions[rows, columns]


def position_buckets(count: int, side: int) -> torch.Tensor:
    """int64 (count,): which of `side` trained positions each of `count` patches in a line takes.

    Fractions of the line, cut at multiples of 1 / side. Always in float32: transformers takes the model's type, and in
    bfloat16 sides that are no power of two would shift by one.
    """
    fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
