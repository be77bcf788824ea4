"""Tensors read ahead by many threads: the same as read one by one, in any order, with bounded memory, and by name where
a file ends too early.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from preprocess.blocks import parallel_reader
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.parallel_reader import ParallelReader, Place, places
from preprocess.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Of several sizes and types: smaller and larger than a piece, empty, a number, of a type that is left alone."""
    generator = torch.Generator().manual_seed(1)
    made = {f"layers.{layer}.weight": torch.randn(17, 100 + layer, generator=generator) for layer in range(12)}
    made |= {f"layers.{layer}.norm": torch.randn(33, generator=generator).bfloat16() for layer in range(12)}
    return made | {
        "embed.weight": torch.randn(700, 40, generator=generator).half(),
        "empty": torch.empty(0, 4),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "ids": torch.arange(9),
    }


@pytest.fixture
def file(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """The tensors in a file with metadata."""
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of a test have many, the last of them not whole."""
    monkeypatch.setattr(parallel_reader, "PIECE_BYTES", 1000)


@pytest.mark.parametrize("ahead_bytes", [1, 5_000, 1 << 30])
@pytest.mark.parametrize("order", ["as they are read ahead", "backwards"])
def test_tensors_are_those_of_the_file(
    file: Path, tensors: dict[str, torch.Tensor], ahead_bytes: int, order: str
) -> None:
    found = places(file)
    assert found.keys() == tensors.keys() - {"ids"}
    reader = ParallelReader(found, CPU, ahead_bytes=ahead_bytes, threads=3)
    names = sorted(found, key=parallel_reader._in_model_order, reverse=order == "backwards")
    for name in names:
        assert name in reader
        tensor = reader.take(name)
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(reader.take(names[3]), tensors[names[3]]), "a tied table is asked for twice"
    reader.close()


def test_no_more_is_read_ahead_than_was_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor that is waited for comes besides."""
    most = 20_000
    held: list[int] = []
    begin = ParallelReader._begin

    def counting(self: ParallelReader, name: str) -> parallel_reader._Reading:
        reading = begin(self, name)
        held.append(sum(other.place.num_bytes for other in self._ahead.values()))
        return reading

    monkeypatch.setattr(ParallelReader, "_begin", counting)
    found = places(file)
    largest = max(place.num_bytes for place in found.values())
    reader = ParallelReader(found, CPU, ahead_bytes=most, threads=3)
    for name in sorted(found, reverse=True):
        reader.take(name)
        assert reader._ahead_bytes == sum(other.place.num_bytes for other in reader._ahead.values())
    reader.close()
    assert 0 < max(held) <= max(most, largest)


def test_layers_are_read_in_the_order_of_their_numbers() -> None:
    names = ["a.layers.10.x", "a.layers.9.x", "a.norm", "a.layers.9.b", "a.embed"]
    ordered = sorted(names, key=parallel_reader._in_model_order)
    assert ordered == ["a.embed", "a.layers.9.b", "a.layers.9.x", "a.layers.10.x", "a.norm"]


def test_a_reader_that_nobody_asks_ends(file: Path) -> None:
    reader = ParallelReader(places(file), CPU, ahead_bytes=1, threads=2)
    reader.close()
    assert not any(thread.is_alive() for thread in reader._threads)


def test_what_a_thread_meets_reaches_whoever_waits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a device without memory, met while a tensor is begun that nobody has asked for."""

    def fails(self: ParallelReader) -> bool:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ParallelReader, "_look_ahead", fails)
    reader = ParallelReader(places(file), CPU, threads=1)
    reader._threads[0].join()
    with pytest.raises(RuntimeError, match="no memory"):
        reader.take("embed.weight")
    reader.close()


def test_a_file_that_shrinks_is_an_error_with_the_tensors_name(tiny_model: Path, tmp_path: Path) -> None:
    """As on a GPU: the same names of file and tensor as without a reader."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    checkpoint = Checkpoint(folder, dtype=torch.float32, device=CPU)
    files = sorted(set(checkpoint._file_of.values()))
    last = max(places(folder / files[-1]).items(), key=lambda item: item[1].offset)
    os.truncate(folder / files[-1], last[1].offset + 1)
    checkpoint._ahead = ParallelReader(dict([last]), CPU)
    with pytest.raises(ModelError, match=rf"{files[-1]}: tensor {last[0]} cannot be read: the file ends too early"):
        checkpoint.tensor(last[0], last[1].shape)
    checkpoint.close()


def test_a_checkpoint_gives_the_same_through_its_reader(tiny_model: Path) -> None:
    plain = Checkpoint(tiny_model, dtype=torch.float32, device=CPU)
    ahead = Checkpoint(tiny_model, dtype=torch.float32, device=CPU)
    ahead._ahead = ahead._reader()
    names = {name: place for file in set(plain._file_of.values()) for name, place in places(tiny_model / file).items()}
    assert names
    for name, place in names.items():
        assert torch.equal(plain.tensor(name, place.shape), ahead.tensor(name, place.shape))
    some, place = next(iter(names.items()))
    with pytest.raises(ModelError, match=rf"tensor {some} has shape"):
        ahead.tensor(some, (*place.shape, 1))
    with pytest.raises(ModelError, match="tensor nobody is missing"):
        ahead.tensor("nobody", (1,))
    ahead.finish()
    assert ahead._taken == set(names)


def test_places_of_a_file(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = places(file)
    data = file.read_bytes()
    place = found["number"]
    assert place == Place(file, place.offset, 8, torch.float64, ())
    assert data[place.offset : place.offset + 8] == tensors["number"].numpy().tobytes()
    assert load_file(file).keys() == tensors.keys()
