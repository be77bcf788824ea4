"""The vision encoder as CUDA graphs, some for each shape of picture that keeps coming: an encoder is hundreds of small
launches, which cost the host more time than the device.

    graphs of a shape │ begin │ layers 0, 1 │ layers 2, 3 │ … │ finish │
    buffers      pixels      x 0           x 1           x 0 …        tokens, copied out at once
                                └ taps ┘

Between any two other work may run, such as steps with graphs of their own. So what goes from one to the next is in
buffers that no graph allocates, and each reads one and writes the other: x, and its norm besides, since whoever sums x
up has it in hand. A picture whose shape's buffers another one is using is encoded without graphs, as are shapes that
are new or large: all to the same result.

Pieces are captured before the first user for shapes that are known then, in idle moments for those that have come, and
beside steps as seldom as `engine.gpu.capture_pace` says.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.gpu.capture_pace import CapturePace
from engine.gpu.graph import Graph, GraphMemory
from engine.gpu.memory import ENCODER_BUFFERS
from engine.runner import VisionEncoder
from preprocess.vision.slices import EncoderState, encode_batch

LAYERS: Final = 2
"""Of a slice. One of Qwen3-VL-8B's takes 0.6 ms of an H200 for 1024 × 768 pixels: small beside a step, and still a
dozen replays a picture.
"""

LARGE: Final = 3 * 1536 * 1536
"""Bytes of pixels from which a slice is one layer, which then takes milliseconds."""

MOST_SHAPES: Final = 24
"""Captured shapes that are kept; the one that was used longest ago makes room."""

MOST_KEPT: Final = ENCODER_BUFFERS
"""Bytes of their buffers, unless one has more."""

PATIENCE: Final = 2
"""A shape is captured when it comes for this time, a piece every few steps as it is encoded; or before that while there
is nothing to do.
"""

MOST_BYTES: Final = 3 * 2048 * 2048
"""Larger pictures keep the device busy without a graph, and a graph would keep the memory that they take."""

logger = logging.getLogger("beholder.engine")


class ShapeGraphs:
    """What encodes pictures of one shape, one at a time: piece 0 begins, the last one finishes. A piece is captured
    when it has run once, and it is time.

    Args:
        encoder: The encoder.
        batch: Of this shape; its values do not matter.
        memory: Of the graphs.
        pace: Of captures.
    """

    def __init__(self, encoder: VisionEncoder, batch: torch.Tensor, memory: GraphMemory, pace: CapturePace) -> None:
        self._layers = layers_of(batch)
        self._encoder = encoder
        self._memory = memory
        self._pace = pace
        self._pixels = torch.empty_like(batch)
        # What a state holds beside x and taps depends on the shape alone.
        self._constant = encoder.begin(batch)
        x = self._constant.x
        self._buffers = (x, torch.empty_like(x)), (torch.empty_like(x), torch.empty_like(x))
        self._taps: dict[int, list[torch.Tensor]] = {}
        self._graphs: dict[int, Graph[list[torch.Tensor]]] = {}
        self._num_groups = -(-encoder.num_layers // self._layers)
        self._can_capture = True
        self._user: weakref.ref[Underway] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no picture that is still wanted is under way in these buffers."""
        return self._user is None or self._user() is None

    @property
    def num_bytes(self) -> int:
        """Of the buffers."""
        taps = [tap for own in self._taps.values() for tap in own]
        results = [tokens for graph in self._graphs.values() for tokens in graph.result]
        kept = (tensor for buffer in self._buffers for tensor in buffer)
        return sum(tensor.nbytes for tensor in (self._pixels, *kept, *taps, *results))

    def prepare(self) -> bool:
        """Capture the next piece, of a picture that nobody sends. False: all are captured."""
        index = next((index for index in range(self._num_groups + 2) if index not in self._graphs), None)
        if index is None or not self._can_capture or not self.is_free:
            return False
        self._capture(index, has_run=False)
        return True

    def begin(self, batch: torch.Tensor) -> Underway:
        """Pixels → patches."""
        state = Underway(self._buffers[0][0], self._constant.grid, layers=self._layers, graphs=self)
        self._user = weakref.ref(state)
        self._pixels.copy_(batch)
        self._run(0)
        return state

    def go_on(self, state: Underway) -> None:
        """The next layers."""
        index = state.next_layer // self._layers + 1
        self._run(index)
        state.next_layer = min(index * self._layers, self._encoder.num_layers)
        state.taps += self._taps[index]

    def finish(self) -> torch.Tensor:
        """Vision tokens."""
        [tokens] = self._run(self._num_groups + 1)
        self._user = None
        return tokens.clone()  # before another graph is replayed

    def _run(self, index: int) -> list[torch.Tensor]:
        graph = self._graphs.get(index)
        if graph is not None:
            graph.replay()
            return graph.result
        result = self._piece(index)
        if self._can_capture and self._pace.is_time:
            with self._pace.capturing():
                self._capture(index)
        return result

    def _capture(self, index: int, *, has_run: bool = True) -> None:
        """A piece that has run, or does now. One that fails is this shape's matter alone: others are captured."""
        try:
            if not has_run:
                self._piece(index)
            self._graphs[index] = Graph(lambda: self._piece(index), self._memory)
        except RuntimeError:
            shape = tuple(self._pixels.shape)
            logger.warning("pictures of shape %s are encoded without graphs", shape, exc_info=True)
            self._can_capture = False

    def _piece(self, index: int) -> list[torch.Tensor]:
        """What is captured: reads buffers and writes others, so that it may run again. The last gives vision tokens."""
        if index == 0:
            self._buffers[0][0].copy_(self._encoder.begin(self._pixels).x)
            return []
        known, (x, normed) = self._constant, self._buffers[(index - 1) % 2]
        state = EncoderState(x, known.grid, known.rotation, known.order, known.windows)
        if index > 1:
            state.normed = normed
        if index > self._num_groups:
            state.taps = [tap for own in self._taps.values() for tap in own]
            return [self._encoder.finish(state)]
        state.next_layer = (index - 1) * self._layers
        self._encoder.run(state, self._layers, self._buffers[index % 2])
        if index not in self._taps:
            self._taps[index] = [tap.clone() for tap in state.taps]
        for kept, tap in zip(self._taps[index], state.taps, strict=True):
            kept.copy_(tap)
        return []


@dataclass(slots=True, weakref_slot=True)
class Underway(EncoderState):
    """A batch on its way, so many layers at a time; through graphs, where there are. Who lets go of it gives it up."""

    layers: int = 1
    graphs: ShapeGraphs | None = None


class EncoderGraphs:
    """The encoder, faster for pictures of a shape that has come before; a `SlicedEncoder` that takes some layers for
    one. Equal to the encoder for each picture alone.

    Attributes:
        pace: When a piece may be captured as it is encoded; to be told of every step.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self.num_layers = encoder.num_layers
        self._encoder = encoder
        self._seen: OrderedDict[torch.Size, int] = OrderedDict()
        self._captured: OrderedDict[torch.Size, ShapeGraphs] = OrderedDict()
        self._memory = GraphMemory()
        self.pace = CapturePace()

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `VisionEncoder.__call__`; pictures are on the device."""
        return [
            torch.cat([encode_batch(self, batch) for batch in self.batches(picture)]).flatten(0, 1)
            for picture in pictures
        ]

    def num_slices(self, shape: Sequence[int]) -> int:
        """In how many slices a picture of this shape is encoded."""
        batches = self.batches(torch.empty(tuple(shape), dtype=torch.uint8, device="meta"))
        return sum(-(-self.num_layers // layers_of(batch)) for batch in batches)

    def num_batches(self, shape: Sequence[int]) -> int:
        """See `SlicedEncoder.num_batches`."""
        return self._encoder.num_batches(shape)

    def batches(self, picture: torch.Tensor) -> list[torch.Tensor]:
        """See `SlicedEncoder.batches`."""
        return self._encoder.batches(picture)

    def begin(self, batch: torch.Tensor) -> EncoderState:
        """See `SlicedEncoder.begin`."""
        graphs = self._graphs_of(batch)
        if graphs is not None and graphs.is_free:
            return graphs.begin(batch)
        begun = self._encoder.begin(batch)
        return Underway(begun.x, begun.grid, begun.rotation, begun.order, begun.windows, layers=layers_of(batch))

    def run(self, state: EncoderState, num_layers: int) -> bool:
        """See `SlicedEncoder.run`: so many times some layers."""
        assert isinstance(state, Underway)
        if state.graphs is None:
            return self._encoder.run(state, num_layers * state.layers)
        while num_layers and state.next_layer < self.num_layers:
            state.graphs.go_on(state)
            num_layers -= 1
        return state.next_layer == self.num_layers

    def finish(self, state: EncoderState) -> torch.Tensor:
        """See `SlicedEncoder.finish`."""
        assert isinstance(state, Underway)
        return self._encoder.finish(state) if state.graphs is None else state.graphs.finish()

    def knows(self, picture: torch.Tensor) -> bool:
        """Whether pictures of this one's shape have graphs."""
        return all(batch.shape in self._captured for batch in self.batches(picture))

    def _graphs_of(self, batch: torch.Tensor) -> ShapeGraphs | None:
        """None: it comes for the first time, or is too large."""
        shape = batch.shape
        if batch.numel() > MOST_BYTES:
            return None
        if shape not in self._captured:
            count = self._seen.pop(shape, 0) + 1
            self._seen[shape] = count
            if len(self._seen) > 8 * MOST_SHAPES:
                self._seen.popitem(last=False)
            if count < PATIENCE:
                return None
            self._make_room()
            try:
                self._add(batch)
            except torch.OutOfMemoryError:
                logger.warning("pictures of shape %s are encoded without a graph", tuple(shape), exc_info=True)
                return None
        self._captured.move_to_end(shape)
        return self._captured[shape]

    @torch.inference_mode()
    def prepare(self, device: torch.device) -> bool:
        """While there is nothing to do: capture a piece for a shape that has come, if there is room. Whether there is
        more to do.
        """
        if any(graphs.prepare() for graphs in reversed(self._captured.values())):
            return True
        shape = next(reversed(self._seen), None)
        if shape is None or self._is_full:
            return False
        self._add(torch.zeros(shape, dtype=torch.uint8, device=device))
        return True

    @torch.inference_mode()
    def expect(self, shape: Sequence[int], device: torch.device) -> None:
        """Pictures of this shape will come: `prepare` captures what they need, as if one had come last."""
        for batch in self.batches(torch.empty(tuple(shape), dtype=torch.uint8, device="meta")):
            if batch.numel() <= MOST_BYTES and batch.shape not in self._captured and not self._is_full:
                self._add(torch.zeros(batch.shape, dtype=torch.uint8, device=device))

    def _add(self, batch: torch.Tensor) -> None:
        self._captured[batch.shape] = ShapeGraphs(self._encoder, batch, self._memory, self.pace)
        self._seen.pop(batch.shape, None)

    @property
    def _is_full(self) -> bool:
        kept = self._captured.values()
        return len(kept) >= MOST_SHAPES or sum(graphs.num_bytes for graphs in kept) > MOST_KEPT

    def _make_room(self) -> None:
        while self._captured and self._is_full:
            self._captured.popitem(last=False)


def layers_of(batch: torch.Tensor) -> int:
    """Of a slice of such a batch."""
    return LAYERS if batch.numel() < LARGE else 1
