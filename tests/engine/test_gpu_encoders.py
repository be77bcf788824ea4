"""Encoders in a GPU's kernels: each kernel alone, and whole encoders against the same ones in torch's operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES

from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.blocks import norm, rope
from preprocess.vision import idefics3, patches, qwen2_vl, qwen3_vl
from preprocess.vision.normalisation import Normalisation
from preprocess.vision.patches import Grid, places, unfold
from preprocess.vision.qwen3_vl import stretch
from tests.engine.gpu import INTERPRETED, KERNEL_DEVICE, needs_triton

pytestmark = needs_triton

TYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
GRIDS = [Grid(1, 1, 2, 4), Grid(4, 8, 2, 4), Grid(3, 2, 2, 4), Grid(7, 9, 2, 4), Grid(5, 4, 1, 3), Grid(9, 13, 2, 2)]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(KERNEL_DEVICE, dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in float64: rounding of the type, and no more."""
    wanted = expected.double()
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype]


def _in_order(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """(…, patches, width), row by row → in the order of the grid's windows."""
    if not grid.window:
        return x
    order, _ = qwen2_vl.window_order(grid.rows, grid.columns, grid.window, grid.merge**2)
    return x.unflatten(-2, (grid.tokens, grid.merge**2)).index_select(-3, order.to(x.device)).flatten(-3, -2)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tokens_stand_in_the_order_of_their_windows(grid: Grid) -> None:
    from preprocess.vision.gpu_patches import window_order

    order, windows = qwen2_vl.window_order(grid.rows, grid.columns, grid.window, grid.merge**2)
    assert torch.equal(window_order(grid, torch.device(KERNEL_DEVICE)).cpu(), order)
    assert sum(count * size for count, size in windows) == grid.patches


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("grid", [*GRIDS[1:4], Grid(2, 3, 2), Grid(3, 5)], ids=str)
def test_pixels_are_cut_into_patches(grid: Grid, frames: int, dtype: torch.dtype) -> None:
    from preprocess.vision.gpu_patches import cut

    patch, side = 6, 6 * grid.merge
    shape = (2, frames, grid.rows * side, grid.columns * side, 3)
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    pixels = pixels.to(KERNEL_DEVICE)
    of = Normalisation(*_random(2, 3, dtype=torch.float32, seed=2).unbind(0))
    normalised = pixels.double() * of.scale.double() + of.shift.double()
    wanted = _in_order(unfold(normalised, patch, grid.merge), grid)
    width = wanted.shape[-1] + 20
    got = cut(pixels, of, grid, patch, width, dtype)
    _close(got[..., :-20], wanted, dtype)
    assert not got[..., -20:].any()


def test_what_fills_no_patch_is_not_seen() -> None:
    from preprocess.vision.gpu_patches import cut

    pixels = torch.randint(0, 256, (3, 1, 17, 22, 3), dtype=torch.uint8).to(KERNEL_DEVICE)
    of = Normalisation(torch.ones(3, device=KERNEL_DEVICE), torch.zeros(3, device=KERNEL_DEVICE))
    wanted = unfold(pixels[:, :, :16, :20].double(), 4, 1)
    assert torch.equal(cut(pixels, of, Grid(4, 5), 4, 48, torch.float32).double(), wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("grid", [*GRIDS, Grid(3, 7, 2)], ids=str)
def test_heads_turn_with_rows_and_columns(grid: Grid, dtype: torch.dtype) -> None:
    from preprocess.vision.gpu_patches import axial_rotation

    device = torch.device(KERNEL_DEVICE)
    at = _in_order(places(grid.rows * grid.merge, grid.columns * grid.merge, grid.merge, device).T, grid).T
    for got, wanted in zip(
        axial_rotation(grid, 20, 10000.0, dtype, device),
        patches.axial_rotation(at, 20, 10000.0, torch.float32),
        strict=True,
    ):
        assert got.shape == wanted.shape
        _close(got + 1, wanted + 1, dtype)  # sines may all be nearly zero


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("side", [1, 5, 48])
@pytest.mark.parametrize("grid", [Grid(1, 1, 2), Grid(3, 4, 2), Grid(7, 2, 1), Grid(30, 1, 2)], ids=str)
def test_learned_positions_are_stretched_over_the_grid(grid: Grid, side: int, dtype: torch.dtype) -> None:
    from preprocess.vision.gpu_patches import add_positions_

    table = _random(side * side, 24, dtype=dtype)
    x = _random(2, grid.patches, 24, dtype=dtype, seed=1)
    rows, columns = grid.rows * grid.merge, grid.columns * grid.merge
    at = places(rows, columns, grid.merge, x.device)
    (row, row_weight), (column, column_weight) = stretch(at[0], rows, side), stretch(at[1], columns, side)
    wanted = x.double()
    for y in range(2):
        for z in range(2):
            wanted += table[row[y] * side + column[z]].double() * (row_weight[y] * column_weight[z]).unsqueeze(1)
    _close(add_positions_(x, table, grid, side), wanted, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("windows", "heads", "dim"),
    [
        ([(2, 16)], 2, 80),
        ([(3, 64), (2, 16), (1, 48), (1, 12)], 2, 80),
        ([(1, 7)], 3, 20),
        ([(2, 36), (3, 9)], 1, 64),
        ([(1, 64), (2, 4), (1, 1)], 1, 72),
        ([(1, 50), (1, 4)], 5, 56),
    ],
)
def test_attention_stays_within_windows(
    windows: list[tuple[int, int]], heads: int, dim: int, dtype: torch.dtype
) -> None:
    from preprocess.vision.gpu_windows import attend_in_windows, fits

    assert fits(windows)
    count = sum(number * size for number, size in windows)
    qkv = _random(2, count, 3 * heads, dim, dtype=dtype)
    angles = _random(count, dim // 2, dtype=torch.float32, seed=1)
    rotation = rope.rotation(angles, dtype)
    got = attend_in_windows(qkv, rotation, windows)
    exact = qkv.double()
    turned = exact[:, :, : 2 * heads]
    turned.copy_(turned * rotation[0].double() + turned.roll(dim // 2, -1) * rotation[1].double())
    first = 0
    wanted = []
    for number, size in windows:
        for _ in range(number):
            q, k, v = exact[:, first : first + size].transpose(1, 2).chunk(3, dim=1)
            wanted.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            first += size
    _close(got, torch.cat(wanted, dim=1), dtype)


def test_large_or_many_windows_are_left_to_others() -> None:
    from preprocess.vision.gpu_windows import fits

    assert not fits([(1, 65)])
    assert not fits([(1, 4)] * 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_give_what_they_give_in_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their kernels, in the order in which layers call them, whole and in slices."""
    folder = FAMILIES[family](tmp_path)

    def load(device: str) -> TorchRunner:
        config = EngineConfig(str(folder), device=device, dtype="float32", threads=1, kv_tokens=64, max_running=1)  # type: ignore[arg-type]
        loaded = load_runner(config)
        assert isinstance(loaded, TorchRunner)
        return loaded

    plain = load("cpu")
    generator = torch.Generator().manual_seed(7)
    side = plain.picture_side
    sizes = [(1, 48, 80), (1, 48, 80), (2, 80, 48)] if family.startswith("qwen") else [(1, side, side), (2, side, side)]
    pictures = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes]
    wanted = plain.encode(pictures)
    if KERNEL_DEVICE == "cpu":
        for module in (norm, rope, patches, qwen2_vl, qwen3_vl, idefics3):
            monkeypatch.setattr(module, "is_fused", lambda x: True)
    fused = load(KERNEL_DEVICE)
    on_device = [picture.to(KERNEL_DEVICE) for picture in pictures]
    with torch.inference_mode():
        whole = fused.encoder(on_device)
    for got, expected in zip(whole, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=2e-4, rtol=1e-3)
    sliced = fused.begin(on_device[-1])
    for _ in range(fused.num_slices(on_device[-1].shape)):
        sliced.run(1)
    torch.testing.assert_close(sliced.result().cpu(), wanted[-1], atol=2e-4, rtol=1e-3)
