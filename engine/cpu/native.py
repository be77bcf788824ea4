"""`step.cpp` from Python: the shared library, its structs declared a second time, and weights in its layout.

Knows nothing of rows and requests: `engine.cpu.runner` does.
"""

from __future__ import annotations

import ctypes
from array import array
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from engine.extension import opened
from engine.models.decoder import Decoder, DecoderConfig, DecoderLayer, GatedMLP
from engine.models.eagle3 import Eagle3Config
from preprocess.blocks.linear import Linear

VERSION: Final = 6
"""Of what layout.h and this file agree on; raised in both when that changes, so that no stale build is used."""

GROUP: Final = 128
"""Outputs whose weights stand together."""

HALF: Final = 64
"""Widths are padded to multiples of it; of a gated MLP, a half of a group is 32 gates and what they let through."""

MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 64
"""Most query heads that share a key head."""

BFLOAT16: Final = 0
INT8: Final = 1
TILED: Final = 2
"""`Form` of layout.h."""


class Vectors(IntEnum):
    """`Vectors` of step.cpp."""

    AVX2 = 1
    AVX512 = 2


_P, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Matrix(ctypes.Structure):
    """`Matrix` of layout.h."""

    _fields_ = (
        ("weights", _P),
        ("scales", _P),
        ("bias", _P),
        ("inputs", _I32),
        ("outputs", _I32),
        ("form", _I32),
    )


class Layer(ctypes.Structure):
    """`Layer` of layout.h."""

    _fields_ = (
        ("attention_norm", _P),
        ("qk_norm", _P),
        ("mlp_norm", _P),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(ctypes.Structure):
    """`Model` of layout.h."""

    _fields_ = (
        ("layers", _P),
        ("norm", _P),
        ("head", Matrix),
        ("num_layers", _I32),
        ("hidden", _I32),
        ("intermediate", _I32),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("eps", ctypes.c_float),
        ("has_tiles", _I32),
    )


class Step(ctypes.Structure):
    """`Step` of layout.h."""

    _fields_ = (
        ("rows", _P),
        ("embeddings", _P),
        ("taps", _P),
        ("rotation", _P),
        ("rotation_rows", _P),
        ("slot_table", _P),
        ("kv_pool", _P),
        ("ends", _P),
        ("logits", _P),
        ("workspace", _P),
        ("told", _P),
        ("features", _P),
        ("num_slots", _I64),
        ("table_width", _I64),
        ("num_rows", _I32),
        ("num_tokens", _I32),
        ("num_ends", _I32),
        ("num_told", _I32),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where it was not built, cannot be loaded, or was built from another version of step.cpp."""
    loaded = opened("engine.cpu._step", ctypes.CDLL)
    if loaded is None:
        return None
    loaded.beholder_version.restype = ctypes.c_int
    if loaded.beholder_version() != VERSION:
        return None
    for asks in (loaded.beholder_vectors, loaded.beholder_has_amx, loaded.beholder_has_tiles):
        asks.restype = ctypes.c_int
    loaded.beholder_use.argtypes = (_I32,)
    loaded.beholder_use.restype = None
    loaded.beholder_workspace.argtypes = (_P, _I32)
    loaded.beholder_workspace.restype = _I64
    loaded.beholder_step.argtypes = (_P, _P, _I32, _I32, _I32)
    loaded.beholder_step.restype = None
    loaded.beholder_draft_workspace.argtypes = (_P, _I32)
    loaded.beholder_draft_workspace.restype = _I64
    loaded.beholder_draft.argtypes = (_P, _P, _I32)
    loaded.beholder_draft.restype = None
    loaded.beholder_best.argtypes = (_P, _P, _I32, _I32, _P, _I32, _P, _I32)
    loaded.beholder_best.restype = None
    return loaded


def why_not(config: DecoderConfig, dtype: torch.dtype) -> str:
    """Why steps of such a model are not computed by the library, in a few words; empty where they are."""
    if dtype is not torch.bfloat16:
        return f"native computes in bfloat16, and the type is {str(dtype).removeprefix('torch.')}"
    if config.experts is not None:
        return "native knows no experts"
    if config.head_dim > MAX_HEAD_DIM or config.num_heads // config.num_kv_heads > MAX_GROUP:
        return "the model's heads are larger than native takes"
    loaded = library()
    if loaded is None:
        return "native was not built at install, for lack of a C++ compiler or of an x86-64 Linux"
    return "" if loaded.beholder_vectors() else "native needs a processor that has AVX2 and FMA"


def why_not_head(config: Eagle3Config) -> str:
    """Why a head is not computed by the library beside such a model's steps, in a few words; empty where it is."""
    if config.head_dim > MAX_HEAD_DIM or config.num_heads // config.num_kv_heads > MAX_GROUP:
        return "the draft head's heads are larger than native takes"
    return ""


def has_tiles() -> bool:
    """Whether 8-bit weights are multiplied in tiles here (AMX), as many tokens as there are in the time of one."""
    loaded = library()
    return loaded is not None and bool(loaded.beholder_has_tiles())


def is_beside_torch(decoder: Decoder) -> bool:
    """Whether torch computes long chunks of prompts, so that weights are held in both layouts: where it alone has tiles
    (AMX) for them, since they are not of 8 bits.
    """
    loaded = library()
    if loaded is None or not loaded.beholder_has_amx():
        return False
    return not has_tiles() or any(linear.weights()[0].dtype is not torch.int8 for linear in _products(decoder))


def copied_bytes(decoder: Decoder) -> int:
    """Memory that the library's layout takes beside torch's; 0 where it takes its place."""
    if not is_beside_torch(decoder):
        return 0
    return sum(linear.outputs * linear.inputs * linear.weights()[0].itemsize for linear in _products(decoder))


def _products(decoder: Decoder) -> list[Linear]:
    """Of a step, before the decoder's first."""
    products = [decoder.head]
    for layer in decoder.layers:
        assert isinstance(layer.mlp, GatedMLP)
        products += [layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down]
    return products


class Weights:
    """Weights in the library's layout, kept as long as this object lives.

    Args:
        takes: Whether they are taken out of the layers they come from, which cannot run afterwards.
    """

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes
        self._kept: list[Any] = []

    def products(self, linear: Linear, *sizes: int) -> list[Matrix]:
        """A layer whose outputs are `sizes` products side by side, each by itself; without sizes it is one."""
        weight, scales, bias = linear.take() if self._takes else linear.weights()
        ends = np.cumsum(sizes or [len(weight)]).tolist()
        parts = [slice(end - size, end) for end, size in zip(ends, sizes or ends, strict=True)]
        return [
            self._matrix(weight[part], None if scales is None else scales[part], None if bias is None else bias[part])
            for part in parts
        ]

    def product(self, linear: Linear) -> Matrix:
        """A layer."""
        return self.products(linear)[0]

    def gated(self, linear: Linear) -> Matrix:
        """A layer whose first half of outputs are gates, which come to stand beside what they let through."""
        weight, scales, bias = linear.take() if self._takes else linear.weights()
        parts = [None if part is None else _interleave(part) for part in (weight, scales, bias)]
        assert parts[0] is not None
        return self._matrix(parts[0], parts[1], parts[2])

    def vector(self, values: torch.Tensor) -> int:
        """The address of float32 (padded,)."""
        return self.keep(F.pad(values.float(), (0, padded(len(values)) - len(values))))

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's values."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def array(self, structs: ctypes.Array[Any]) -> int:
        """The address of structs."""
        self._kept.append(structs)
        return ctypes.addressof(structs)

    def _matrix(self, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None) -> Matrix:
        outputs, inputs = weight.shape
        form = BFLOAT16 if weight.dtype is not torch.int8 else TILED if has_tiles() else INT8
        return Matrix(
            weights=self.keep(lay_out_tiles(weight) if form == TILED else lay_out(weight)),
            scales=self.vector(torch.ones(outputs) if scales is None else scales),
            bias=self.vector(torch.zeros(outputs) if bias is None else bias),
            inputs=padded(inputs),
            outputs=outputs,
            form=form,
        )


class NativeModel:
    """A decoder's weights in the library's layout. Unless `keep`, they are taken out of the decoder, which cannot run
    afterwards.

    Attributes:
        model: What the library is given; valid as long as this object lives.
    """

    def __init__(self, decoder: Decoder, *, keep: bool) -> None:
        config = decoder.config
        self._weights = Weights(takes=not keep)
        layers = (Layer * config.num_layers)(*(self._layer(layer) for layer in decoder.layers))
        self.model = Model(
            layers=self._weights.array(layers),
            norm=self._weights.vector(decoder.norm.weight),
            head=self._weights.product(decoder.head),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            has_tiles=has_tiles(),
        )

    def _layer(self, layer: DecoderLayer) -> Layer:
        assert isinstance(layer.mlp, GatedMLP)
        norm, weights = layer.qk_norm, self._weights
        return Layer(
            attention_norm=weights.vector(layer.attention_norm.weight),
            qk_norm=None if norm is None else weights.keep(norm.weight.float().contiguous()),
            mlp_norm=weights.vector(layer.mlp_norm.weight),
            qkv=weights.product(layer.qkv),
            out=weights.product(layer.out),
            gate_up=weights.gated(layer.mlp.gate_up),
            down=weights.product(layer.mlp.down),
        )


def address(values: array[int]) -> int:
    """Where an array's values lie, as long as it lives and keeps its length."""
    return values.buffer_info()[0]


def padded(count: int) -> int:
    """The next multiple of `HALF`."""
    return -(-count // HALF) * HALF


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) → (groups, pairs of inputs, 8, 16 outputs, 2), zeros where there is nothing."""
    outputs, inputs = weight.shape
    pairs = padded(inputs) // 2
    whole = F.pad(weight, (0, 2 * pairs - inputs, 0, -outputs % GROUP))
    return whole.view(-1, 8, 16, pairs, 2).permute(0, 3, 1, 2, 4).contiguous()


def lay_out_tiles(weight: torch.Tensor) -> torch.Tensor:
    """int8 (outputs, inputs) → (32 outputs, 64 inputs, 2 tiles, 16 fours of inputs, 16 outputs, 4), see tiles.h."""
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, -inputs % HALF, 0, -outputs % HALF))
    return whole.view(-1, 2, 16, padded(inputs) // HALF, 16, 4).permute(0, 3, 1, 4, 2, 5).contiguous()


def _interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """(2 * inner, …), gates first → groups of 32 gates and then their 32 ups, zeros where there is nothing."""
    inner = len(gate_up) // 2
    halves = gate_up.view(2, inner, *gate_up.shape[1:])
    whole = halves.new_zeros((2, padded(inner), *gate_up.shape[1:]))
    whole[:, :inner] = halves
    parts = whole.view(2, -1, HALF // 2, *gate_up.shape[1:]).transpose(0, 1)  # (groups, 2, 32, …)
    return parts.reshape(-1, *gate_up.shape[1:])
