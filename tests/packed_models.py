"""Quantises a tiny model folder with compressed-tensors itself, for tests that load its `pack-quantized` format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def pack(folder: Path, *, bits: int, group_size: int, symmetric: bool) -> tuple[Path, Path]:
    """Quantises every linear layer and embedding table of a float folder.

    Args:
        folder: A folder that `tiny_smolvlm` wrote.
        bits: 4 or 8.
        group_size: Columns with one scale; 0 is a whole row.
        symmetric: Whether there are zero points.

    Returns:
        The packed folder, and one with what compressed-tensors makes of the packed weights, in float.
    """
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import load_file, save_file

    strategy = "group" if group_size else "channel"
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group_size or None
    )
    scheme = QuantizationScheme(targets=["Linear", "Embedding"], weights=args)
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2:  # norms, biases, the convolution
            packed[name] = plain[name] = tensor
            continue
        module = name.removesuffix(".weight")
        groups = tensor.unflatten(1, (-1, group_size or tensor.shape[1]))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        state = {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}
        compressed = PackedQuantizationCompressor.compress(state, scheme)
        plain[name] = PackedQuantizationCompressor.decompress(compressed, scheme)["weight"]
        packed |= {f"{module}.{suffix}": part for suffix, part in compressed.items()}

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    result = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        target = folder / kind
        target.mkdir()
        for file in folder.glob("*.json*"):
            (target / file.name).write_bytes(file.read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
        result.append(target)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump()},
        "ignore": [],
        "kv_cache_scheme": None,
    }
    (result[0] / "config.json").write_text(json.dumps(config))
    return result[0], result[1]
