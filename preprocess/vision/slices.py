"""Encoding a picture in slices: an encoder stops between any two layers and goes on in a later step, to equal results.

    slices of a batch    │ begin, layer 0 │ layer 1 │ … │ layer n - 1, finish │
                         pixels → patches                 patches → vision tokens

A picture is one batch, or several where its tiles are many; then the slices of one follow those of the other. What goes
from slice to slice is an `EncoderState`. Knows nothing of when slices run: `engine.encoding` decides that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from preprocess.blocks.norm import LayerNorm, Pair, RMSNorm

Windows = list[tuple[int, int]]
"""Of a picture's patches in order: so many windows, of so many patches each."""


@dataclass(slots=True)
class EncoderState:
    """Where a batch stands.

    Attributes:
        x: What the next layer takes: (items, patches, hidden).
        normed: Its norm, with which the next layer begins, or what follows the last; None: not made yet.
        grid: Rows and columns of patches.
        rotation: Of the heads, for encoders that turn them.
        order: How tokens are ordered, where that is not row by row: int64 (tokens,).
        windows: What attention stays within, in the layers that have windows.
        taps: What earlier layers gave for DeepStack: (items, tokens, width) each.
        next_layer: The layer that comes next.
    """

    x: torch.Tensor
    grid: tuple[int, int]
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    order: torch.Tensor | None = None
    windows: Windows = field(default_factory=list)
    taps: list[torch.Tensor] = field(default_factory=list)
    next_layer: int = 0
    normed: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What it keeps until the next slice; the order of tokens is the encoder's own."""
        normed = () if self.normed is None else (self.normed,)
        return sum(tensor.nbytes for tensor in (self.x, *normed, *(self.rotation or ()), *self.taps))


class SlicedEncoder(Protocol):
    """What `SlicedEncoding` asks of an encoder. A whole encoding makes the same calls, one after the other.

    Attributes:
        num_layers: All of them.
    """

    num_layers: int

    def num_batches(self, shape: Sequence[int]) -> int:
        """Of a picture of this shape."""
        ...

    def batches(self, picture: torch.Tensor) -> list[torch.Tensor]:
        """uint8 (tiles or frames, height, width, 3) → what goes through the encoder together, views of the picture."""
        ...

    def begin(self, batch: torch.Tensor) -> EncoderState:
        """Pixels → patches, before the first layer. The state keeps nothing of the pixels."""
        ...

    def run(self, state: EncoderState, num_layers: int) -> bool:
        """The next layers, or as many as there are. True: none is left."""
        ...

    def finish(self, state: EncoderState) -> torch.Tensor:
        """After the last layer: (items, tokens, width)."""
        ...


def total_of(x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """What a layer gives in one: layers leave the last sum to the norm that follows, which reads it anyway."""
    return x if added is None else x + added


def leave(state: EncoderState, added: torch.Tensor | None, norm: LayerNorm | RMSNorm, out: Pair | None) -> None:
    """Ends a run: what the last layer added is in `state.x`. With `out` it and its norm, the one that comes next, are
    written there; without, nothing is kept that can be made again.
    """
    state.x, state.normed = (total_of(state.x, added), None) if out is None else norm.of_sum(state.x, added, out)


def num_slices(encoder: SlicedEncoder, shape: Sequence[int]) -> int:
    """In how many slices a picture of this shape is encoded."""
    return encoder.num_batches(shape) * encoder.num_layers


def encode_batch(encoder: SlicedEncoder, batch: torch.Tensor) -> torch.Tensor:
    """A batch as a whole: (items, tokens, width)."""
    state = encoder.begin(batch)
    encoder.run(state, encoder.num_layers)
    return encoder.finish(state)


class SlicedEncoding:
    """One picture's encoding. Equal to the encoder called with this picture alone, to the last bit.

    Args:
        encoder: Any of this package.
        picture: uint8 (tiles or frames, height, width, 3); after the first slice it is not looked at again.
        dtype: Of the result; else the encoder's.
    """

    def __init__(self, encoder: SlicedEncoder, picture: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._encoder = encoder
        self._dtype = dtype
        first, *later = encoder.batches(picture)
        self._batches = deque([first, *(batch.clone() for batch in later)])  # whoever sent the picture may be gone then
        self._state: EncoderState | None = None
        self._results: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """What is kept until the next slice."""
        state = 0 if self._state is None else self._state.num_bytes
        return state + sum(tensor.nbytes for tensor in (*self._batches, *self._results))

    @torch.inference_mode()
    def run(self, num_slices: int) -> None:
        """The next slices. Raises IndexError where not so many are left."""
        for _ in range(num_slices):
            if self._state is None:
                self._state = self._encoder.begin(self._batches.popleft())
            if self._encoder.run(self._state, 1):
                self._results.append(self._encoder.finish(self._state))
                self._state = None

    def result(self) -> torch.Tensor:
        """(vision tokens, width), after the last slice. Raises RuntimeError before."""
        if self._batches or self._state is not None:
            raise RuntimeError("a picture's encoding was asked for before its last slice")
        results = self._results
        whole = (results[0] if len(results) == 1 else torch.cat(results)).flatten(0, 1)
        return whole if self._dtype is None else whole.to(self._dtype)
