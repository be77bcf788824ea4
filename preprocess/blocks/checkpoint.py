"""Reads the tensors of a Hugging Face folder: safetensors only, one file or many, packed weights included.

On a CPU they are views of the mapped files. For a GPU they are read ahead by many threads, see `ParallelReader`.

Models ask for each tensor by name and shape, and call `finish` at the end, so that whatever is missing, misshapen or
left over is named before the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from preprocess.blocks.fields import Fields, read_json
from preprocess.blocks.packed import SUFFIXES, Quantisation, dequantise, unpack
from preprocess.blocks.parallel_reader import ParallelReader, places
from preprocess.errors import ModelError

_IGNORED: Final = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq", ".embeddings.position_ids")
"""Buffers that older transformers versions stored; they follow from the configuration."""

_log = logging.getLogger(__name__)


class Checkpoint:
    """The configuration and tensors of a model folder.

    Args:
        folder: A Hugging Face model folder.
        dtype: Type that floating tensors are given out in.
        device: Where they are put.

    Raises:
        ModelError: No safetensors, or a file or field that cannot be used.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.config = Fields(read_json(folder / "config.json"), "config.json: ")
        quantisation = self._quantisation_fields()
        self._quantisation = None if quantisation is None else Quantisation(quantisation)
        self._file_of = _tensor_files(folder)
        self._open: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._ahead = self._reader() if device.type == "cuda" else None

    @contextmanager
    def giving(self, dtype: torch.dtype) -> Iterator[None]:
        """Floating tensors are given out in that type meanwhile."""
        usual, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = usual

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name, or `name` packed."""
        return name in self._file_of or f"{name}_packed" in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, where more than one could be meant."""
        if name not in self._file_of:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        try:
            return tuple(self._file(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise ModelError(f"{self.folder / self._file_of[name]}: tensor {name} cannot be read: {error}") from None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A floating tensor that is never packed, such as a norm, a bias or a convolution."""
        if name not in self._file_of:
            raise ModelError(f"{self.folder}: tensor {name} is missing (shape {shape} expected)")
        tensor = self._read_ahead(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{self.folder}: tensor {name} is {tensor.dtype}, expected floating point")
        return self._checked(name, tensor, shape)

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of whole numbers or booleans, such as a table of ids, in its own type."""
        tensor = self._read(name)
        if tensor.is_floating_point():
            raise ModelError(f"{self.folder}: tensor {name} is {tensor.dtype}, expected whole numbers")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(self.device)

    def weight(self, module: str, shape: tuple[int, int], *, kind: str = "Linear") -> torch.Tensor:
        """The weight of a linear layer or (`kind` ``"Embedding"``) an embedding table, packed or not."""
        if f"{module}.weight_packed" not in self._file_of:
            return self.tensor(f"{module}.weight", shape)
        if self._quantisation is None:
            raise ModelError(f"{module} is packed but config.json has no quantization_config")
        names = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES if f"{module}.{suffix}" in self._file_of}
        parts = {suffix: self._read(name) for suffix, name in names.items()}
        weight = dequantise(parts, self._quantisation.scheme(module, kind), module)
        return self._checked(f"{module}.weight", weight, shape)

    def integers(self, module: str, *, kind: str = "Linear") -> tuple[torch.Tensor, torch.Tensor] | None:
        """int8 (rows, columns) and scales (rows,) of a module packed in 8 symmetric bits with one scale a row.

        None for every other module, and where the scales are no numbers of `dtype`.
        """
        if f"{module}.weight_packed" not in self._file_of or self._quantisation is None:
            return None
        scheme = self._quantisation.scheme(module, kind)
        if scheme.bits != 8 or not scheme.symmetric or scheme.group_size or f"{module}.weight_g_idx" in self._file_of:
            return None
        scale = self._read(f"{module}.weight_scale").flatten()
        columns = int(self._read(f"{module}.weight_shape")[1])
        exact = scale.to(self.dtype)
        if not torch.equal(exact.to(scale.dtype), scale):
            return None
        return unpack(self._read(f"{module}.weight_packed"), 8, columns).to(self.device), exact.to(self.device)

    def finish(self) -> None:
        """Closes the files.

        Whole parts that nobody asked for, such as a head for training, are left alone, as transformers does.

        Raises:
            ModelError: A tensor of a part that was read was never asked for: the folder is of another architecture than
                its configuration says.
        """
        self.close()
        left = sorted(name for name in self._file_of.keys() - self._taken if not name.endswith(_IGNORED))
        parts = {_part(name) for name in self._taken}
        within = [name for name in left if _part(name) in parts]
        if within:
            raise ModelError(f"{self.folder}: tensors that the model does not have: {_some(within)}")
        if left:
            _log.warning("%s: tensors of parts that the model does not have are not read: %s", self.folder, _some(left))

    def close(self) -> None:
        """Let go of the files. What is asked for after all is read then."""
        self._open.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _reader(self) -> ParallelReader:
        """Whoever reads what is not packed."""
        left_alone = (*(f".{suffix}" for suffix in SUFFIXES), *_IGNORED)
        found = {}
        for file in sorted(set(self._file_of.values())):
            self._open[file] = _open(self.folder / file)  # names what is wrong with it
            for name, place in places(self.folder / file).items():
                if self._file_of.get(name) == file and not name.endswith(left_alone):
                    found[name] = place
        return ParallelReader(found, self.device)

    def _read_ahead(self, name: str) -> torch.Tensor:
        """As `_read`, of the reader that is ahead, if there is one."""
        if self._ahead is None or name not in self._ahead:
            return self._read(name)
        self._taken.add(name)
        try:
            return self._ahead.take(name)
        except OSError as error:
            raise ModelError(f"{self.folder / self._file_of[name]}: tensor {name} cannot be read: {error}") from None

    def _file(self, name: str) -> Any:
        """The open file that holds a tensor."""
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _open(self.folder / file)
        return self._open[file]

    def _read(self, name: str) -> torch.Tensor:
        self._taken.add(name)
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.folder / file}: tensor {name} cannot be read: {error}") from None
        return tensor

    def _checked(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(device=self.device, dtype=self.dtype)

    def _quantisation_fields(self) -> Fields | None:
        for fields in (self.config, self.config.section("text_config")):
            if fields.has("quantization_config"):
                return fields.section("quantization_config")
        return None


def _part(name: str) -> str:
    """The part of a model that a tensor belongs to, such as ``"model.visual"``."""
    return ".".join(name.split(".")[:-1][:2])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name → file name. One file goes before an index of several, as in transformers."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single.name)
    if not index.exists():
        raise ModelError(
            f"{folder} holds no model.safetensors (nor its index); pickled weights (.bin, .pt) are never read"
        )
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ModelError(f"{index} has no weight_map of tensor names to files")
    for file in set(listed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{index} names {file!r}, expected a .safetensors file in the same folder")
        if not (folder / file).exists():
            raise ModelError(f"{folder / file} is missing: {index.name} lists it")
    return dict(listed)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors, fetch it again: {error}") from None
