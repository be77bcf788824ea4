"""Reads tensors of safetensors files by many threads, straight to a device.

    file ─▶ pinned memory ─▶ device, piece by piece

`Checkpoint` asks for tensors one by one and puts them together; here the next ones are read meanwhile, as many as a
bounded number of bytes holds, so that neither the host nor the device ever has all weights twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types that are read here. Others are small or packed, and read by whoever unpacks them."""

NUM_THREADS: Final = 8
PIECE_BYTES: Final = 8 << 20
"""What a thread reads at once; each has pinned memory for so much."""

AHEAD_BYTES: Final = 2 << 30
"""Read before anybody asked, at most, but for one tensor: more than the parts of any layer that are put together."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: bytes `offset` … of a file."""

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def places(file: Path) -> dict[str, Place]:
    """The tensors of a file that is known to be sound, but for those of other types than `DTYPES`."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in DTYPES:
            first, end = entry["data_offsets"]
            found[name] = Place(file, 8 + length + first, end - first, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return found


@dataclass(slots=True, eq=False)
class _Reading:
    """A tensor on its way. The reader's lock guards `pieces` (to be taken), `left` (not there yet) and `error`."""

    place: Place
    tensor: torch.Tensor
    allocated: torch.cuda.Event | None
    pieces: deque[int]
    left: int
    error: Exception | None = None


class ParallelReader:
    """Tensors by name.

    Args:
        found: Where they are.
        device: Where they go.
        ahead_bytes: As `AHEAD_BYTES`.
        threads: How many read.
    """

    def __init__(
        self,
        found: Mapping[str, Place],
        device: torch.device,
        *,
        ahead_bytes: int = AHEAD_BYTES,
        threads: int = NUM_THREADS,
    ) -> None:
        self._places = found
        self._device = device
        self._most_ahead = ahead_bytes
        self._lock = threading.Condition()
        self._in_order = deque(sorted(found, key=_in_model_order))
        self._asked: set[str] = set()  # before their turn in that order
        self._ahead: dict[str, _Reading] = {}
        self._ahead_bytes = 0
        self._unread: deque[_Reading] = deque()  # what is waited for stands first
        self._closed = False
        self._failure: Exception | None = None
        self._files = {place.file: os.open(place.file, os.O_RDONLY) for place in found.values()}
        self._threads = [threading.Thread(target=self._work, name="weights", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def take(self, name: str) -> torch.Tensor:
        """The tensor on the device, as it is in the file. Raises `OSError` where the file ends too early."""
        with self._lock:
            reading = self._ahead.pop(name, None)
            if reading is None:
                self._asked.add(name)
                reading = self._begin(name)
            else:
                self._ahead_bytes -= reading.place.num_bytes
                if reading.pieces:
                    self._unread.remove(reading)
            if reading.pieces:
                self._unread.appendleft(reading)
            self._lock.notify_all()
            while reading.left and self._failure is None:
                self._lock.wait()
        failure = reading.error or self._failure
        if failure is not None:
            raise failure
        return reading.tensor

    def close(self) -> None:
        """End the threads; what was read and not asked for is forgotten."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        self._ahead = {}
        self._unread.clear()

    def _begin(self, name: str) -> _Reading:
        """Memory for a tensor, and its pieces. The lock is held."""
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype, device=self._device)
        allocated = None
        if self._device.type == "cuda":  # what had this memory before may still be read by work that was sent
            allocated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            allocated.record()
        pieces = deque(range(0, place.num_bytes, PIECE_BYTES))
        return _Reading(place, tensor, allocated, pieces, len(pieces))

    def _next(self) -> tuple[_Reading, int] | None:
        """The next piece to read; None at the end."""
        with self._lock:
            while not self._closed:
                if self._unread:
                    reading = self._unread[0]
                    first = reading.pieces.popleft()
                    if not reading.pieces:
                        self._unread.popleft()
                    return reading, first
                if not self._look_ahead():
                    self._lock.wait()
        return None

    def _look_ahead(self) -> bool:
        """Begin with the next tensor that somebody will ask for, if there is one and room for it. The lock is held."""
        while self._in_order and self._in_order[0] in self._asked:
            self._in_order.popleft()
        if not self._in_order:
            return False
        name = self._in_order[0]
        num_bytes = self._places[name].num_bytes
        if self._ahead_bytes and self._ahead_bytes + num_bytes > self._most_ahead:
            return False
        self._in_order.popleft()
        reading = self._ahead[name] = self._begin(name)
        self._ahead_bytes += num_bytes
        if reading.pieces:
            self._unread.append(reading)
        return True

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                self._read_pieces()
        except Exception as error:  # whoever waits for a tensor gets it
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _read_pieces(self) -> None:
        is_cuda = self._device.type == "cuda"
        staged = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        memory = staged.numpy().data
        stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        while (taken := self._next()) is not None:
            reading, first = taken
            count = min(PIECE_BYTES, reading.place.num_bytes - first)
            error = None
            try:
                _read(self._files[reading.place.file], memory[:count], reading.place.offset + first)
            except OSError as failed:
                error = failed
            target = reading.tensor.view(-1).view(torch.uint8)[first : first + count]
            if stream is None:
                target.copy_(staged[:count])
            else:
                assert reading.allocated is not None
                stream.wait_event(reading.allocated)
                with torch.cuda.stream(stream):
                    target.copy_(staged[:count], non_blocking=True)
                stream.synchronize()
            with self._lock:
                reading.error = reading.error or error
                reading.left -= 1
                if not reading.left:
                    self._lock.notify_all()


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    at = 0
    while at < len(into):
        count = os.preadv(descriptor, [into[at:]], offset + at)
        if not count:
            raise OSError("the file ends too early")
        at += count


def _in_model_order(name: str) -> list[tuple[int, str]]:
    """``layers.2.`` before ``layers.10.``, as models ask."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
