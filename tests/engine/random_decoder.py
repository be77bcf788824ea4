"""Decoders of any shape with random weights, and runners for them, without a model folder."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from engine.models.decoder import Decoder, DecoderConfig
from engine.runner import TorchRunner
from preprocess.blocks.rope import RopeConfig


class RandomCheckpoint:
    """What `Decoder` asks of a `Checkpoint`; every tensor follows from its name.

    Weights are the same numbers in float32 and bfloat16: whole numbers of 8 bits times a scale that bfloat16 holds.

    Args:
        dtype: Type that tensors are given out in.
        packed: Whether the whole numbers are given out too.
    """

    def __init__(self, dtype: torch.dtype, *, packed: bool) -> None:
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._packed = packed

    def has(self, name: str) -> bool:
        return not name.startswith("lm_head")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=_seeded(name)) * 0.2
        return (values + 1 if "norm" in name else values).bfloat16().to(self.dtype)

    def weight(self, module: str, shape: tuple[int, int], *, kind: str = "Linear") -> torch.Tensor:
        integers, scales = self._numbers(module, shape)
        weight = integers.float() * scales.float().unsqueeze(1)
        self._shapes = {**getattr(self, "_shapes", {}), module: shape}
        return (weight if self._packed else weight.bfloat16()).to(self.dtype)

    def integers(self, module: str, *, kind: str = "Linear") -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._packed or self.dtype is torch.float32:
            return None
        return self._numbers(module, self._shapes[module])

    def _numbers(self, module: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        integers = torch.randint(-127, 128, shape, generator=_seeded(module), dtype=torch.int8)
        scales = (torch.rand(shape[0], generator=_seeded(module)) + 0.5) * 0.02 * shape[1] ** -0.5
        return integers, scales.bfloat16()


class NoEncoder:
    """The encoder of a runner that sees no pictures."""

    image_size = 32

    def __init__(self, num_taps: int = 0) -> None:
        self.num_taps = num_taps
        self.progress: Callable[[], None] = lambda: None

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError


def decoder_config(**fields: object) -> DecoderConfig:
    """A small decoder's configuration, with `fields` replaced."""
    plain: dict[str, object] = {
        "vocab_size": 600,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "max_positions": 4096,
        "rope": RopeConfig(10000.0),
    }
    return DecoderConfig(**(plain | fields))  # type: ignore[arg-type]


def make_runner(
    kind: type[TorchRunner],
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    packed: bool = True,
    num_taps: int = 0,
    rows: int = 8,
    positions: int = 256,
) -> TorchRunner:
    """A runner whose rows own `positions` slots each, scattered over the pool."""
    checkpoint = RandomCheckpoint(dtype, packed=packed)
    with torch.inference_mode():
        model = Decoder(checkpoint, config, prefix="model", head="lm_head", tied=True)  # type: ignore[arg-type]
    num_slots = rows * positions + 1
    runner = kind(
        model,
        NoEncoder(num_taps),
        num_slots=num_slots,
        max_positions=positions,
        max_rows=rows,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    slots = torch.randperm(num_slots - 1, generator=_seeded("slots")) + 1
    runner.slot_table[:] = slots.view(rows, positions)
    return runner


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
