"""The vision encoder of Qwen3-VL (arXiv:2511.21631): a transformer over patches of any grid, and what it looks like
from within.

Learned positions are a square table that is stretched to a picture's grid; heads turn with row and column besides. Four
neighbouring patches become one token at the end, and also after some of the layers: those are the taps that the
language model's first layers add (DeepStack, arXiv:2406.04334). Attention sees one picture, or two frames of a clip.
"""

from __future__ import annotations

import math
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
from preprocess.blocks.rope import rotate_
from preprocess.vision.batching import encode_by_shape
from preprocess.vision.patches import PatchEmbedding, axial_rotation, places
from preprocess.vision.slices import EncoderState, encode_batch, leave, total_of

MAX_PATCHES: Final = 16_384
"""Patches that go through the encoder together, unless one item has more; more at once only cost memory."""

_SLICE: Final = 8192
"""Patches that go through an MLP together: of the largest pictures (65,536 patches) its inside would take gigabytes."""

_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Qwen3VLVisionConfig:
    """Sizes of the encoder.

    Attributes:
        merge: Side of the block of patches that becomes one vision token.
        frames: Of a clip, that become one patch; a picture counts as so many equal ones.
        side: Of the square of learned positions.
        taps: Layers after which the language model is told what was seen so far.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge: int
    frames: int
    side: int
    rope_theta: float
    gelu: str
    output_size: int
    taps: tuple[int, ...]

    @classmethod
    def read(cls, config: Fields) -> Qwen3VLVisionConfig:
        """From `config.json`; absent fields are what transformers' configuration classes make them."""
        vision = config.section("vision_config")
        kinds = tuple(f"{kind}{part}" for kind in ("qwen3_vl", "qwen3_vl_moe") for part in ("_vision", ""))
        vision.choice("model_type", kinds, kinds[0])
        vision.refuse("in_channels", unless=3, reason="only RGB is supported")
        act = vision.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
        num_positions = vision.integer("num_position_embeddings", 2304)
        taps = vision.values.get("deepstack_visual_indexes", [8, 16, 24])
        result = cls(
            hidden_size=vision.integer("hidden_size", 1152),
            intermediate_size=vision.integer("intermediate_size", 4304),
            num_layers=vision.integer("depth", 27),
            num_heads=vision.integer("num_heads", 16),
            patch_size=vision.square("patch_size", 16),
            merge=vision.integer("spatial_merge_size", 2),
            frames=vision.square("temporal_patch_size", 2),
            side=math.isqrt(num_positions),
            rope_theta=vision.section("rope_parameters").number("rope_theta", 10000.0),
            gelu="tanh" if act == "gelu_pytorch_tanh" else "none",
            output_size=vision.integer("out_hidden_size", 3584),
            taps=tuple(taps) if isinstance(taps, list) else (),
        )
        if result.side**2 != num_positions:
            raise vision.error("num_position_embeddings", num_positions, "a square number")
        if result.hidden_size % (4 * result.num_heads):
            raise vision.error("hidden_size", result.hidden_size, f"a multiple of 4 × num_heads {result.num_heads}")
        if not isinstance(taps, list) or sorted(set(taps) & set(range(result.num_layers))) != taps:
            raise vision.error(
                "deepstack_visual_indexes", taps, f"ascending layer indices below depth {result.num_layers}"
            )
        return result


class EncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). What the MLP adds is left to the next layer's first norm."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Qwen3VLVisionConfig) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm.load(checkpoint, f"{prefix}.norm1", width, _EPS)
        self.qkv = Linear.load(checkpoint, f"{prefix}.attn.qkv", width, 3 * width, bias=True)
        self.out = Linear.load(checkpoint, f"{prefix}.attn.proj", width, width, bias=True)
        self.mlp_norm = LayerNorm.load(checkpoint, f"{prefix}.norm2", width, _EPS)
        self.fc1 = Linear.load(checkpoint, f"{prefix}.mlp.linear_fc1", width, inner, bias=True)
        self.fc2 = Linear.load(checkpoint, f"{prefix}.mlp.linear_fc2", inner, width, bias=True)
        self.num_heads = config.num_heads
        self.gelu = config.gelu

    def __call__(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        normed: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (items, patches, hidden) and what is still to be added to it → the same two. `normed`: what the first norm
        gives, where it is known.
        """
        if normed is None:
            x, normed = self.attention_norm.of_sum(x, added)
        qkv = self.qkv(normed).view(*x.shape[:2], 3 * self.num_heads, -1)
        rotate_(qkv[:, :, : 2 * self.num_heads], *rotation)  # queries and keys, not values
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # each (items, heads, patches, dim)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (items, patches, hidden)
        added = self.out(attended)
        if x.shape[1] <= _SLICE:
            x, normed = self.mlp_norm.of_sum(x, added)
            return x, self.fc2(self.fc1.gelu(normed, self.gelu))
        x = x + added
        for part in torch.split(x, _SLICE, dim=1):
            part += self.fc2(self.fc1.gelu(self.mlp_norm(part), self.gelu))
        return x, None


class Merger:
    """merge × merge neighbouring patches → one token in the language model's width."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Qwen3VLVisionConfig, *, is_tap: bool) -> None:
        self.width = config.hidden_size * config.merge**2
        self.is_tap = is_tap
        self.norm = LayerNorm.load(checkpoint, f"{prefix}.norm", self.width if is_tap else config.hidden_size, _EPS)
        self.fc1 = Linear.load(checkpoint, f"{prefix}.linear_fc1", self.width, self.width, bias=True)
        self.fc2 = Linear.load(checkpoint, f"{prefix}.linear_fc2", self.width, config.output_size, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(items, patches, hidden) → (items, tokens, output_size). A tap normalises tokens; the last merger takes
        what its norm gives of patches.
        """
        x = x.reshape(len(x), -1, self.width)
        x = self.norm(x) if self.is_tap else x
        return self.fc2(self.fc1.gelu(x, "none"))


class Qwen3VLEncoder:
    """See `engine.runner.VisionEncoder`. A picture is uint8 (1, height, width, 3), a clip's item (frames, …)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = Qwen3VLVisionConfig.read(checkpoint.config)
        model, width, patch = "model.visual", config.hidden_size, config.patch_size
        self.config = config
        self.image_size = 8 * patch * config.merge
        self.num_taps = len(config.taps)
        self.progress: Callable[[], None] = lambda: None
        shape = (width, 3, config.frames, patch, patch)
        halves = [0.5] * 3
        self.embed = PatchEmbedding(
            checkpoint,
            f"{model}.patch_embed.proj",
            shape,
            config.merge,
            bias=True,
            clip_mean=halves,
            clip_std=halves,
        )
        self.positions = Embedding.load(checkpoint, f"{model}.pos_embed", config.side**2, width)
        self.layers = [
            EncoderLayer(checkpoint, f"{model}.blocks.{index}", config) for index in range(config.num_layers)
        ]
        self.num_layers = config.num_layers
        self.merger = Merger(checkpoint, f"{model}.merger", config, is_tap=False)
        self._norms = [*(layer.attention_norm for layer in self.layers), self.merger.norm]
        self.taps = {
            layer: Merger(checkpoint, f"{model}.deepstack_merger_list.{index}", config, is_tap=True)
            for index, layer in enumerate(config.taps)
        }

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each item → (vision tokens, output_size * (1 + taps)). Items of one size go through together."""
        return encode_by_shape(
            pictures, lambda batch: encode_batch(self, batch), MAX_PATCHES * self.config.patch_size**2
        )

    def num_batches(self, shape: Sequence[int]) -> int:
        """See `SlicedEncoder.num_batches`: attention sees the whole item."""
        return 1

    def batches(self, picture: torch.Tensor) -> list[torch.Tensor]:
        """See `SlicedEncoder.batches`."""
        return [picture[None]]

    def begin(self, batch: torch.Tensor) -> EncoderState:
        """See `SlicedEncoder.begin`: uint8 (items, frames, height, width, 3)."""
        config = self.config
        grid = self.embed.grid(batch.shape[2], batch.shape[3])
        rows, columns = grid.rows * config.merge, grid.columns * config.merge
        x = self.embed(batch, grid)  # (items, patches, hidden)
        head_dim = config.hidden_size // config.num_heads
        if is_fused(x):
            from preprocess.vision import gpu_patches

            gpu_patches.add_positions_(x, self.positions.table, grid, config.side)
            rotation = gpu_patches.axial_rotation(grid, head_dim, config.rope_theta, x.dtype, x.device)
        else:
            at = places(rows, columns, config.merge, x.device)
            x = x + self._position_rows(at, rows, columns)
            rotation = axial_rotation(at, head_dim, config.rope_theta, x.dtype)
        return EncoderState(x, (rows, columns), rotation)

    def run(self, state: EncoderState, num_layers: int, out: Pair | None = None) -> bool:
        """See `VisionEncoder.run`."""
        assert state.rotation is not None
        added: torch.Tensor | None = None
        normed = state.normed
        for layer in self.layers[state.next_layer : state.next_layer + num_layers]:
            self.progress()
            state.x, added = layer(state.x, added, normed, state.rotation)
            normed = None
            tap = self.taps.get(state.next_layer)
            if tap is not None:
                state.x, added = total_of(state.x, added), None
                state.taps.append(tap(state.x))
            state.next_layer += 1
        leave(state, added, self._norms[state.next_layer], out)
        return state.next_layer == self.num_layers

    def finish(self, state: EncoderState) -> torch.Tensor:
        """See `SlicedEncoder.finish`: (items, tokens, output_size * (1 + taps))."""
        normed = self.merger.norm(state.x) if state.normed is None else state.normed
        return torch.cat((self.merger(normed), *state.taps), dim=-1)

    def _position_rows(self, at: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Position embeddings (patches, hidden) of patches at `at` (2, patches), as `stretch` says."""
        side = self.config.side
        (row, row_weight), (column, column_weight) = stretch(at[0], rows, side), stretch(at[1], columns, side)
        table = self.positions.table
        total = torch.zeros((at.shape[1], table.shape[1]), dtype=torch.float32, device=table.device)
        for y in range(2):
            for x in range(2):
                weight = (row_weight[y] * column_weight[x]).unsqueeze(1)
                total += table[row[y] * side + column[x]] * weight
        return total.to(table.dtype)


def stretch(index: torch.Tensor, count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a line of `side` learned positions place `index` of `count` lies, first and last on first and last.

    Two neighbours (2, places) and how much of each (2, places), in float32.
    """
    at = index.float() * (side - 1) / max(count - 1, 1)
    below = at.floor()
    share = at - below
    neighbours = torch.stack((below, below + 1)).long().clamp_(max=side - 1)
    return neighbours, torch.stack((1 - share, share))
