"""The vision encoders of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923).

They are transformers over patches of any grid, whose heads turn with row and column; four neighbouring patches become
one token at the end.

Attention sees one picture, or two frames of a clip. In Qwen2.5-VL most layers see only a window of it. There tokens are
put in the order of their windows once, those of one size together, so that each size is one batch of attention:

    5 × 3 tokens, windows of 2 × 2:    0 0 │ 1 1 │ 4        full ones 0 … 1, the right edge 4,
                                       0 0 │ 1 1 │ 4        the lower edge 2 … 3, the corner 5
                                       2 2 │ 3 3 │ 5
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.fusion import is_fused
from preprocess.blocks.linear import Linear
from preprocess.blocks.norm import LayerNorm, Pair, RMSNorm
from preprocess.blocks.rope import rotate_
from preprocess.vision.batching import encode_by_shape
from preprocess.vision.patches import PatchEmbedding, axial_rotation, places
from preprocess.vision.slices import EncoderState, Windows, encode_batch, leave

MAX_PATCHES: Final = 16_384
"""Patches that go through the encoder together, unless one item has more; more at once only cost memory."""

_SLICE: Final = 8192
"""Patches that go through an MLP together: of the largest pictures (65,536 patches) its inside would take gigabytes."""

_BLOCKS: Final = {"cuda": 64}
"""Inputs that products read at once, where others are slow."""

_EPS: Final = 1e-6
_MOST_GRIDS: Final = 256


@dataclass(frozen=True, slots=True)
class Qwen2VLVisionConfig:
    """Sizes of the encoder.

    Attributes:
        merge: Side of the block of patches that becomes one vision token.
        frames: Of a clip, that become one patch; a picture counts as so many equal ones.
        is_gated: Qwen2.5-VL's parts, RMS norms and gated MLPs, in place of layer norms and plain MLPs.
        window: Side of a window in tokens; 0: every layer sees all.
        full_layers: Layers that see all though there are windows.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge: int
    frames: int
    rope_theta: float
    output_size: int
    is_gated: bool
    window: int
    full_layers: tuple[int, ...]

    @classmethod
    def read(cls, config: Fields) -> Qwen2VLVisionConfig:
        """From `config.json`; absent fields are what transformers' configuration classes make them."""
        vision = config.section("vision_config")
        is_gated = config.choice("model_type", ("qwen2_vl", "qwen2_5_vl")) == "qwen2_5_vl"
        kind = "qwen2_5_vl" if is_gated else "qwen2_vl"
        vision.choice("model_type", (kind, f"{kind}_vision"), kind)
        for name in ("in_channels", "in_chans"):
            vision.refuse(name, unless=3, reason="only RGB is supported")
        act = "silu" if is_gated else "quick_gelu"
        vision.choice("hidden_act", (act,), act)
        width = vision.integer("hidden_size", 3584) if is_gated else vision.integer("embed_dim", 1280)
        merge, patch = vision.integer("spatial_merge_size", 2), vision.square("patch_size", 14)
        full = vision.values.get("fullatt_block_indexes", [7, 15, 23, 31])
        result = cls(
            hidden_size=width,
            intermediate_size=vision.integer("intermediate_size", 3420)
            if is_gated
            else round(width * vision.number("mlp_ratio", 4)),
            num_layers=vision.integer("depth", 32),
            num_heads=vision.integer("num_heads", 16),
            patch_size=patch,
            merge=merge,
            frames=vision.square("temporal_patch_size", 2),
            rope_theta=vision.section("rope_parameters").number("rope_theta", 10000.0),
            output_size=vision.integer("out_hidden_size" if is_gated else "hidden_size", 3584),
            is_gated=is_gated,
            window=vision.integer("window_size", 112) // merge // patch if is_gated else 0,
            full_layers=tuple(full) if isinstance(full, list) else (),
        )
        if result.hidden_size % (4 * result.num_heads):
            raise vision.error("hidden_size", result.hidden_size, f"a multiple of 4 × num_heads {result.num_heads}")
        if is_gated and not result.window:
            raise vision.error("window_size", vision.values["window_size"], f"at least {merge * patch}, one token")
        if not isinstance(full, list) or not all(isinstance(layer, int) for layer in full):
            raise vision.error("fullatt_block_indexes", full, "a list of layer indices")
        return result


class PlainMLP:
    """fc2(quick gelu(fc1(x))): x σ(1.702 x), after the Gaussian error linear unit (arXiv:1606.08415, section 2)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, width: int, inner: int) -> None:
        self.fc1 = Linear.load(checkpoint, f"{prefix}.fc1", width, inner, bias=True)
        self.fc2 = Linear.load(checkpoint, f"{prefix}.fc2", inner, width, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, hidden) → the same."""
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class GatedMLP:
    """down(silu(gate(x)) · up(x)) (SwiGLU, arXiv:2002.05202), with biases.

    On a GPU there is a whole number of blocks between: rows of Qwen2.5-VL's 3,420 do not begin at 16 bytes each, which
    its matrix units cannot read as they lie. What is added is zero and changes nothing.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, width: int, inner: int) -> None:
        more = -inner % _BLOCKS.get(checkpoint.device.type, 1)
        gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = Linear.load(checkpoint, gate_up, width, [inner, inner], bias=True, more_outputs=more)
        self.down = Linear.load(checkpoint, f"{prefix}.down_proj", inner, width, bias=True, more_inputs=more)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, hidden) → the same."""
        if is_fused(x):
            from preprocess.blocks.gpu_kernels import silu_mul

            return self.down(silu_mul(self.gate_up.without_bias(x), self.gate_up.bias))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class EncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). What the MLP adds is left to the next layer's first norm."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Qwen2VLVisionConfig) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        norm = RMSNorm if config.is_gated else LayerNorm
        self.attention_norm = norm.load(checkpoint, f"{prefix}.norm1", width, _EPS)
        self.qkv = Linear.load(checkpoint, f"{prefix}.attn.qkv", width, 3 * width, bias=True)
        self.out = Linear.load(checkpoint, f"{prefix}.attn.proj", width, width, bias=True)
        self.mlp_norm = norm.load(checkpoint, f"{prefix}.norm2", width, _EPS)
        mlp = GatedMLP if config.is_gated else PlainMLP
        self.mlp: Callable[[torch.Tensor], torch.Tensor] = mlp(checkpoint, f"{prefix}.mlp", width, inner)
        self.num_heads = config.num_heads

    def __call__(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        normed: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        windows: Windows,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (items, patches, hidden) and what is still to be added to it → the same two; attention stays within
        windows. `normed`: what the first norm gives, where it is known.
        """
        if normed is None:
            x, normed = self.attention_norm.of_sum(x, added)
        qkv = self.qkv(normed).view(*x.shape[:2], 3 * self.num_heads, -1)
        added = self.out(_attend(qkv, rotation, windows))
        if x.shape[1] <= _SLICE:
            x, normed = self.mlp_norm.of_sum(x, added)
            return x, self.mlp(normed)
        x = x + added
        for part in torch.split(x, _SLICE, dim=1):
            part += self.mlp(self.mlp_norm(part))
        return x, None


def _attend(qkv: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], windows: Windows) -> torch.Tensor:
    """Attention of heads (items, patches, 3 * heads, dim) that are not yet turned, within windows: (items, patches,
    heads * dim). `qkv` is changed.
    """
    items, patches, total, dim = qkv.shape
    if is_fused(qkv):
        from preprocess.vision.gpu_windows import attend_in_windows, fits

        if fits(windows):
            return attend_in_windows(qkv, rotation, windows)
    heads = total // 3
    rotate_(qkv[:, :, : 2 * heads], *rotation)  # queries and keys, not values
    attended = qkv.new_empty((items, patches, heads * dim))
    first = 0
    for count, size in windows:
        last = first + count * size
        within = qkv[:, first:last].reshape(items * count, size, 3, heads, dim)
        q, k, v = within.permute(2, 0, 3, 1, 4)  # each (windows, heads, size, dim)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # (windows, size, heads, dim)
        if len(windows) == 1:
            return seen.reshape(items, patches, heads * dim)
        attended[:, first:last] = seen.reshape(items, count * size, heads * dim)
        first = last
    return attended


class Merger:
    """merge × merge neighbouring patches → one token in the language model's width."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Qwen2VLVisionConfig) -> None:
        self.width = config.hidden_size * config.merge**2
        norm = RMSNorm if config.is_gated else LayerNorm
        self.norm = norm.load(checkpoint, f"{prefix}.ln_q", config.hidden_size, _EPS)
        self.fc1 = Linear.load(checkpoint, f"{prefix}.mlp.0", self.width, self.width, bias=True)
        self.fc2 = Linear.load(checkpoint, f"{prefix}.mlp.2", self.width, config.output_size, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the norm gives of patches, (items, patches, hidden) → (items, tokens, output_size)."""
        return self.fc2(self.fc1.gelu(x.reshape(len(x), -1, self.width), "none"))


class Qwen2VLEncoder:
    """See `engine.runner.VisionEncoder`. A picture is uint8 (1, height, width, 3), a clip's item (frames, …)."""

    num_taps = 0

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = Qwen2VLVisionConfig.read(checkpoint.config)
        width, patch = config.hidden_size, config.patch_size
        model = "visual" if checkpoint.has("visual.patch_embed.proj.weight") else "model.visual"
        self.config = config
        self.image_size = 8 * patch * config.merge
        self.progress: Callable[[], None] = lambda: None
        shape = (width, 3, config.frames, patch, patch)
        self.embed = PatchEmbedding(checkpoint, f"{model}.patch_embed.proj", shape, config.merge, bias=False)
        self.layers = [
            EncoderLayer(checkpoint, f"{model}.blocks.{index}", config) for index in range(config.num_layers)
        ]
        self.num_layers = config.num_layers
        self.merger = Merger(checkpoint, f"{model}.merger", config)
        self._norms = [*(layer.attention_norm for layer in self.layers), self.merger.norm]
        self._known_windows: OrderedDict[tuple[int, int], tuple[torch.Tensor, Windows]] = OrderedDict()

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each item → (vision tokens, output_size). Items of one size go through together."""
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
        head_dim, merge = config.hidden_size // config.num_heads, config.merge
        grid = self.embed.grid(batch.shape[2], batch.shape[3], config.window)
        shape = grid.rows * merge, grid.columns * merge
        x = self.embed(batch, grid)  # (items, patches, hidden)
        windows: Windows = []
        order = None
        if is_fused(x):
            from preprocess.vision import gpu_patches

            rotation = gpu_patches.axial_rotation(grid, head_dim, config.rope_theta, x.dtype, x.device)
            if config.window:
                windows = windows_of(grid.rows, grid.columns, config.window, merge**2)
                order = gpu_patches.window_order(grid, x.device)
            return EncoderState(x, shape, rotation, order, windows)
        at = places(*shape, merge, x.device)
        if config.window:
            order, windows = self._windows(grid.rows, grid.columns, x.device)
            x, at = _ordered(x, order, 1, merge**2), _ordered(at, order, 1, merge**2)
        return EncoderState(x, shape, axial_rotation(at, head_dim, config.rope_theta, x.dtype), order, windows)

    def run(self, state: EncoderState, num_layers: int, out: Pair | None = None) -> bool:
        """See `VisionEncoder.run`."""
        assert state.rotation is not None
        whole: Windows = [(1, state.x.shape[1])]
        added: torch.Tensor | None = None
        normed = state.normed
        for layer in self.layers[state.next_layer : state.next_layer + num_layers]:
            self.progress()
            has_windows = state.windows and state.next_layer not in self.config.full_layers
            windows = state.windows if has_windows else whole
            state.x, added = layer(state.x, added, normed, state.rotation, windows)
            normed = None
            state.next_layer += 1
        leave(state, added, self._norms[state.next_layer], out)
        return state.next_layer == self.num_layers

    def finish(self, state: EncoderState) -> torch.Tensor:
        """See `SlicedEncoder.finish`: (items, tokens, output_size)."""
        tokens = self.merger(self.merger.norm(state.x) if state.normed is None else state.normed)
        return tokens if state.order is None else torch.empty_like(tokens).index_copy_(1, state.order, tokens)

    def _windows(self, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, Windows]:
        """`window_order` of a grid of tokens: kept, since the same grids come again and again."""
        if (rows, columns) not in self._known_windows:
            if len(self._known_windows) >= _MOST_GRIDS:
                self._known_windows.popitem(last=False)
            order, windows = window_order(rows, columns, self.config.window, self.config.merge**2)
            self._known_windows[rows, columns] = order.to(device), windows
        return self._known_windows[rows, columns]


def window_order(rows: int, columns: int, window: int, patches: int) -> tuple[torch.Tensor, Windows]:
    """int64 (rows * columns,): the tokens of a grid window by window, windows of one size together; and the windows.

    `patches`: of a token. Windows begin at the upper left, so that those at the other edges may be smaller.
    """
    token = torch.arange(rows * columns).view(rows, columns)
    row_edge, column_edge = rows - rows % window, columns - columns % window
    order: list[torch.Tensor] = []
    for top, bottom in ((0, row_edge), (row_edge, rows)):
        for left, right in ((0, column_edge), (column_edge, columns)):
            part = token[top:bottom, left:right]
            if not part.numel():
                continue
            high, wide = min(window, bottom - top), min(window, right - left)
            cut = part.view(part.shape[0] // high, high, part.shape[1] // wide, wide).transpose(1, 2)
            order.append(cut.flatten())
    return torch.cat(order), windows_of(rows, columns, window, patches)


def windows_of(rows: int, columns: int, window: int, patches: int) -> Windows:
    """The windows of `window_order`."""
    windows: Windows = []
    for high, down in ((window, rows // window), (rows % window, 1)):
        for wide, across in ((window, columns // window), (columns % window, 1)):
            if down * across * high * wide:
                windows.append((down * across, high * wide * patches))
    return windows


def _ordered(x: torch.Tensor, order: torch.Tensor, dim: int, patches: int) -> torch.Tensor:
    """`x` with the tokens of `dim` in another order, the patches of each staying together."""
    shape = (*x.shape[:dim], -1, patches, *x.shape[dim + 1 :])
    return x.reshape(shape).index_select(dim, order).reshape(x.shape)
