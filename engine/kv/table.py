"""The slot table: which slot holds each position of each running sequence. The scheduler writes it, attention reads
it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv.pool import SlotArray


class SlotTable:
    """The runner's (rows, positions) int32 tensor with a view of it for the host.

    On the CPU the view is the tensor's own memory; on a GPU it is a mirror, and each write is one copy that nobody
    waits for: it takes its place behind the batches in flight.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise TypeError(f"slot_table must be (rows, positions) int32, got {tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("slot_table must be contiguous: its cells are written by their number")
        self._device: torch.Tensor | None = None if tensor.device.type == "cpu" else tensor
        self._host: NDArray[np.int32] = tensor.numpy() if self._device is None else np.zeros(tensor.shape, np.int32)
        self._cells = self._host.data
        self.num_rows, self.width = tensor.shape

    @property
    def cells(self) -> memoryview | None:
        """[row, position] of the table, to be read and written one by one; None where writes must reach a device."""
        return self._cells if self._device is None else None

    def write_run(self, row: int, start: int, slots: SlotArray) -> None:
        """Set positions `start` … of one row."""
        self._host[row, start : start + len(slots)] = slots
        if self._device is not None:
            self._device[row, start : start + len(slots)] = _send(slots, self._device.device)

    def write_cells(self, rows: NDArray[np.int64], positions: NDArray[np.int64], slots: SlotArray) -> None:
        """Set any positions of any rows, (slots,) each, with one launch: each step waits for it."""
        cells = rows * self.width + positions
        self._host.reshape(-1)[cells] = slots
        if self._device is not None:
            sent = _send(np.concatenate((cells.view(np.int32), slots)), self._device.device)
            places = sent[: 2 * len(slots)].view(torch.int64)
            self._device.view(-1).index_copy_(0, places, sent[2 * len(slots) :])

    def read_run(self, row: int, start: int, stop: int) -> SlotArray:
        """Slots of positions `start` … `stop - 1` of one row; a view that later writes change."""
        return self._host[row, start:stop]


def _send(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device that nobody waits for; pinned memory is used again only once it has been sent."""
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
