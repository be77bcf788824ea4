"""Weight-only integer weights as compressed-tensors writes them (format `pack-quantized`), turned back into floats.

A quantised module `m` has, instead of `m.weight`:

    m.weight_packed      int32 (rows, words)      values + 2^(bits-1), little end first, packed along the row
    m.weight_scale       float (rows, groups)     one group a row when the strategy is `channel`
    m.weight_zero_point  int32 (words, groups)    packed along the rows; only when asymmetric
    m.weight_g_idx       int   (columns,)         the group of each column; only with activation ordering
    m.weight_shape       int   (2,)               rows, columns

Source: the compressed-tensors documentation and its own `unpack_from_int32` and `dequantize`, which tests compare with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import torch

from preprocess.blocks.fields import Fields
from preprocess.errors import ModelError

SUFFIXES: Final = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """How the weights of some modules are packed: `bits` 4 or 8; `group_size` 0 is one group a row."""

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int


class Quantisation:
    """`quantization_config` of a model folder: which modules may be packed, and how.

    Raises:
        ModelError: Another method, format, number type or strategy than weight-only `pack-quantized`.
    """

    def __init__(self, fields: Fields) -> None:
        self._where = fields.where
        method = fields.values.get("quant_method")
        if method != "compressed-tensors":
            reason = "only weights packed by compressed-tensors are read; take the folder that is not quantised"
            raise ModelError(f"{fields.where}quant_method is {method!r}: {reason}")
        fields.choice("format", ("pack-quantized",))
        fields.refuse(
            "kv_cache_scheme", unless=None, reason="a quantised KV cache is not supported; requantise without it"
        )
        sparsity = fields.section("sparsity_config")
        sparsity.refuse("format", unless="dense", reason="sparse weights are not supported")
        ignore = fields.values.get("ignore") or []
        self._ignore = tuple(str(name) for name in ignore)
        groups = fields.section("config_groups")
        self._schemes = tuple(self._scheme(groups, name) for name in groups.values)

    def scheme(self, module: str, kind: str) -> PackedScheme:
        """The scheme of a packed module; `kind` is ``"Linear"`` or ``"Embedding"``.

        As in compressed-tensors an exact name wins over a pattern (``re:…``), and that over a kind.
        """
        if any(_matches(target, module, kind) for target in self._ignore):
            raise ModelError(f"{module} is packed in the checkpoint but {self._where}ignore excludes it")
        found = [
            (rank, scheme)
            for scheme in self._schemes
            for target in scheme.targets
            if (rank := _matches(target, module, kind))
        ]
        if not found:
            raise ModelError(
                f"{module} is packed in the checkpoint but no group of {self._where}config_groups targets it"
            )
        return max(found, key=lambda pair: pair[0])[1]

    @staticmethod
    def _scheme(groups: Fields, name: str) -> PackedScheme:
        group = groups.section(name)
        for field in ("input_activations", "output_activations"):
            group.refuse(field, unless=None, reason="only weights may be quantised; requantise as W8A16 or W4A16")
        group.refuse("format", unless="pack-quantized", reason="only pack-quantized is supported")
        weights = group.section("weights")
        weights.choice("type", ("int",), "int")
        bits = weights.integer("num_bits", 8)
        if bits not in (4, 8):
            raise weights.error("num_bits", bits, "4 or 8")
        strategy = weights.choice("strategy", ("channel", "group"), "group" if weights.has("group_size") else "channel")
        targets = group.values.get("targets") or []
        return PackedScheme(
            targets=tuple(str(target) for target in targets),
            bits=bits,
            symmetric=weights.flag("symmetric", True),
            group_size=weights.integer("group_size") if strategy == "group" else 0,
        )


def _matches(target: str, module: str, kind: str) -> int:
    """0 when `target` does not mean the module, else how specific it is."""
    if target == module:
        return 3
    if target.startswith("re:"):
        return 2 if re.match(target.removeprefix("re:"), module) else 0
    return 1 if target == kind else 0


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 (rows, words) → int8 (rows, columns)."""
    octets = packed.contiguous().view(torch.uint8)  # (rows, words * 4): the machine is little endian
    if bits == 8:
        return (octets ^ 0x80).view(torch.int8)[:, :columns]
    nibbles = torch.stack((octets & 0x0F, octets >> 4), dim=-1).flatten(1)  # (rows, words * 8)
    return nibbles.view(torch.int8)[:, :columns] - 8


def dequantise(parts: dict[str, torch.Tensor], scheme: PackedScheme, module: str) -> torch.Tensor:
    """The float weight (rows, columns) of a packed module, in the type of its scales.

    Args:
        parts: The module's tensors by suffix (`SUFFIXES`).
        scheme: How they are packed.
        module: Name for errors.
    """
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        if suffix not in parts:
            raise ModelError(f"{module}.{suffix} is missing")
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    shape: Any = parts["weight_shape"].tolist()
    rows, columns = int(shape[0]), int(shape[1])
    words = -(-columns * scheme.bits // 32)
    _expect(f"{module}.weight_packed", packed, (rows, words))
    if packed.dtype is not torch.int32:
        raise ModelError(f"{module}.weight_packed is {packed.dtype}, expected torch.int32")
    scale = scale.reshape(rows, -1) if scale.numel() else scale
    groups = scale.shape[-1]
    expected = -(-columns // scheme.group_size) if scheme.group_size else 1
    _expect(f"{module}.weight_scale", scale, (rows, expected))

    weight = unpack(packed, scheme.bits, columns).to(scale.dtype)  # (rows, columns)
    zero = None
    if not scheme.symmetric:
        if "weight_zero_point" not in parts:
            raise ModelError(f"{module}.weight_zero_point is missing: the scheme is asymmetric")
        packed_zero = parts["weight_zero_point"]
        _expect(f"{module}.weight_zero_point", packed_zero, (-(-rows * scheme.bits // 32), groups))
        zero = unpack(packed_zero.T, scheme.bits, rows).T.to(scale.dtype)  # (rows, groups)

    if "weight_g_idx" in parts or columns % groups:
        if "weight_g_idx" in parts:
            group_of = parts["weight_g_idx"].long()
            _expect(f"{module}.weight_g_idx", group_of, (columns,))
        else:
            group_of = torch.arange(columns) // scheme.group_size
        scale = scale[:, group_of]
        return (weight if zero is None else weight - zero[:, group_of]) * scale
    grouped = weight.view(rows, groups, columns // groups)
    if zero is not None:
        grouped = grouped - zero.unsqueeze(-1)
    return (grouped * scale.unsqueeze(-1)).view(rows, columns)


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
