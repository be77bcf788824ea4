"""Host memory between a GPU and what prepares its steps, used again and again: to ask torch for pinned memory takes the
host about as long as to send a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

TURNS: Final = 4
"""Arrays of inputs, used in turn: none is waited for, as hardly more than two steps are ever on their way."""
MOST_RESULTS: Final = 512
"""Tokens of a step whose memory is kept; larger ones are rare."""


class Inputs(Protocol):
    """Where a step of some size has its inputs; equal ones have them in the same places."""

    @property
    def length(self) -> int:
        """Of the array."""
        ...

    def cut(self, flat: Any) -> dict[str, Any]:
        """Names for the parts of an array of `length` int32, numpy or torch."""
        ...


class _Turn:
    """Pinned memory, and what tells when it has been read."""

    def __init__(self, length: int) -> None:
        self.pinned = torch.zeros(length, dtype=torch.int32, pin_memory=True)
        self.copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.sizes: dict[Inputs, tuple[NDArray[np.int32], Mapping[str, NDArray[np.int32]], torch.Tensor]] = {}


class Staging:
    """Inputs of steps on their way to a device: `zeros` to write to, then `send`.

    Args:
        into: int32 (most,): whence the device reads them.
    """

    def __init__(self, into: torch.Tensor) -> None:
        self.into = into
        self._turns = [_Turn(len(into)) for _ in range(TURNS)]
        self._next = 0
        self._targets: dict[int, torch.Tensor] = {}

    def zeros(self, inputs: Inputs) -> Mapping[str, NDArray[np.int32]]:
        """The parts of an array of zeros."""
        turn = self._turns[self._next]
        turn.copied.synchronize()
        known = turn.sizes.get(inputs)
        if known is None:
            pinned = turn.pinned[: inputs.length]
            values = pinned.numpy()
            known = turn.sizes[inputs] = values, inputs.cut(values), pinned
        known[0].fill(0)
        return known[1]

    def send(self, inputs: Inputs) -> None:
        """What was written since `zeros` of the same, without waiting for it."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % TURNS
        target = self._targets.get(inputs.length)
        if target is None:
            target = self._targets[inputs.length] = self.into[: inputs.length]
        target.copy_(turn.sizes[inputs][2], non_blocking=True)
        turn.copied.record()


class Results:
    """Memory for the tokens of steps, given back once they were read."""

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def take(self, count: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned int64 (at least `count`,), and an event."""
        if self._free and count <= MOST_RESULTS:
            return self._free.pop()
        pinned = torch.empty(max(count, MOST_RESULTS), dtype=torch.int64, pin_memory=True)
        return pinned, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def give_back(self, pinned: torch.Tensor, copied: torch.cuda.Event) -> None:
        """Nobody reads it any longer."""
        if len(pinned) == MOST_RESULTS:
            self._free.append((pinned, copied))
