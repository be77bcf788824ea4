"""The 8-bit form is the one of compressed-tensors, and loses at most half a step."""

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme

from samples.training.quantise import QUANTIZATION_CONFIG, compress, decompress, pack, quantise, unpack


def test_unpacking_gives_back_every_int8() -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    assert torch.equal(unpack(pack(values)), values)


def test_packing_is_what_the_library_packs() -> None:
    values = torch.randint(-128, 128, (32, 96), dtype=torch.int8)
    assert torch.equal(pack(values), pack_to_int32(values, 8))


def test_a_weight_moves_by_at_most_half_a_step() -> None:
    weight = torch.randn(64, 96)
    values, scale = quantise(weight)
    error = (values.float() * scale.float() - weight).abs()
    inside = values.abs() < 127  # the largest values may be cut where the scale was rounded down
    assert (error <= scale.float() / 2 + 1e-6)[inside].all()
    assert (error <= scale.float()).all()


def test_the_library_reads_what_compress_writes() -> None:
    state = {
        "a.weight": torch.randn(8, 32).bfloat16(),
        "norm.weight": torch.ones(8).bfloat16(),
        "a.bias": torch.zeros(8),
    }
    packed = compress(state)
    assert set(packed) == {"a.weight_packed", "a.weight_scale", "a.weight_shape", "norm.weight", "a.bias"}
    scheme = QuantizationScheme(**QUANTIZATION_CONFIG["config_groups"]["group_0"])
    local = {name: packed[f"a.{name}"] for name in ("weight_packed", "weight_scale", "weight_shape")}
    theirs = PackedQuantizationCompressor.decompress(local, scheme)["weight"]
    assert torch.equal(theirs, decompress(packed)["a.weight"])
