"""8-bit weights in the `pack-quantized` form of compressed-tensors: one bf16 scale a row, four values in an int32.

`compress` and `decompress` work on state dicts; norms, biases and the patch convolution stay as they are.
Run `python -m samples.training.quantise CHECKPOINT OUT` to turn an exported bf16 folder into the 8-bit one.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "group_size": None,
                "block_structure": None,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether a weight is stored in 8 bits: every matrix of a Linear or an Embedding."""
    return name.endswith(".weight") and tensor.ndim == 2


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (rows, columns) as int8 and a bf16 scale (rows, 1), with `weight ≈ int8 * scale`."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-8).to(torch.bfloat16)
    return (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def pack(values: Tensor) -> Tensor:
    """int8 (rows, columns) as int32 (rows, columns / 4): offset by 128, lowest byte first."""
    return (values.to(torch.int16) + 128).to(torch.uint8).contiguous().view(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return (packed.contiguous().view(torch.uint8).to(torch.int16) - 128).to(torch.int8)


def compress(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A bf16 state dict in 8 bits."""
    compressed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_quantised(name, tensor):
            values, scale = quantise(tensor)
            compressed[f"{name}_packed"] = pack(values)
            compressed[f"{name}_scale"] = scale
            compressed[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            compressed[name] = tensor.to(torch.bfloat16)
    return compressed


def decompress(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An 8-bit state dict in bf16."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            plain[base] = (unpack(tensor).float() * state[f"{base}_scale"].float()).to(torch.bfloat16)
        elif not name.endswith(("_scale", "_shape")):
            plain[name] = tensor
    return plain


def write(checkpoint: Path, out: Path) -> None:
    """Copy an exported folder with its weights in 8 bits, in one file."""
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        state.update(load_file(shard))
    save_file(compress(state), out / "model.safetensors", metadata={"format": "pt"})
    for path in checkpoint.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "model.safetensors.index.json":
            shutil.copy(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION_CONFIG
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.checkpoint, arguments.out)


if __name__ == "__main__":
    main()
