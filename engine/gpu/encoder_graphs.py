"""The vision encoder as CUDA graphs, one for each shape of picture that keeps coming: an encoder is hundreds of small
launches, which cost the host more time than the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.gpu.graph import Graph, GraphMemory
from engine.runner import VisionEncoder

MOST_SHAPES: Final = 24
"""Captured shapes that are kept; the one that was used longest ago makes room."""

PATIENCE: Final = 2
"""A shape is captured when it comes for this time."""

MOST_BYTES: Final = 3 * 2048 * 2048
"""Larger pictures keep the device busy without a graph, and a graph would keep the memory that they take."""

logger = logging.getLogger("beholder.engine")


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph[torch.Tensor]
    pixels: torch.Tensor


class EncoderGraphs:
    """The encoder, faster for pictures of a shape that has come before. Equal to the encoder for each picture alone."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self._seen: OrderedDict[torch.Size, int] = OrderedDict()
        self._captured: OrderedDict[torch.Size, _Captured | None] = OrderedDict()
        self._memory = GraphMemory()

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `VisionEncoder.__call__`; pictures are on the device."""
        return [self._encode(picture) for picture in pictures]

    def _encode(self, picture: torch.Tensor) -> torch.Tensor:
        shape = picture.shape
        if picture.numel() > MOST_BYTES:
            return self._encoder([picture])[0]
        if shape not in self._captured:
            count = self._seen.pop(shape, 0) + 1
            self._seen[shape] = count
            if len(self._seen) > 8 * MOST_SHAPES:
                self._seen.popitem(last=False)
            if count < PATIENCE:
                return self._encoder([picture])[0]
            if len(self._captured) >= MOST_SHAPES:
                self._captured.popitem(last=False)
            self._captured[shape] = self._capture(picture)
        captured = self._captured[shape]
        self._captured.move_to_end(shape)
        if captured is None:
            return self._encoder([picture])[0]
        captured.pixels.copy_(picture)
        captured.graph.replay()
        return captured.graph.result.clone()

    def _capture(self, picture: torch.Tensor) -> _Captured | None:
        """None, and a line in the log, where something in the encoder cannot be captured."""
        pixels = picture.clone()
        self._encoder([pixels])  # fills what the encoder keeps by shape, and sets libraries up
        try:
            return _Captured(Graph(lambda: self._encoder([pixels])[0], self._memory), pixels)
        except RuntimeError:
            logger.warning("pictures of shape %s are encoded without a graph", tuple(picture.shape), exc_info=True)
            return None
