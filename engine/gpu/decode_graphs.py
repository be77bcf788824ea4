"""Decode steps as CUDA graphs: one replay for inputs, layers, logits and draw, at every number of rows up to a limit.

A step's rows fill up the next captured size. Padding rows are rows of nobody: their place in the slot table is one of
its own behind the last, so that they read and write the dummy slot alone, and nobody looks at what they draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.flashinfer_backend import FlashInferAttention, FlashInferPlan, Lengths, Workspace
from engine.gpu.forward import FusedDecoder
from engine.gpu.ops import decode_inputs, gather_slots
from engine.gpu.sampling import draw

_KEYS, _IDS, _POSITIONS, _ROTARY, _PLACES, _INDPTR, _TEMPERATURES, _NUM_LINES = 0, 2, 3, 4, 5, 6, 7, 8


def graph_sizes(most: int) -> list[int]:
    """Captured sizes: close together where a step is short, at most an eighth too large beyond."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if size < most]
    size = 8
    while size < most:
        size += max(4, (size // 8) & ~3)
        sizes.append(min(size, most))
    return sizes if sizes and sizes[-1] == most else [*sizes, most]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, as the host knows them; arrays of (rows,).

    `ids` is -1 where the last step's draw is meant. `rotary`: position by which heads turn. `keys`: of the noise.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    rotary: NDArray[np.int32]
    places: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    keys: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan_info: Any
    logits: torch.Tensor
    tokens: torch.Tensor


class DecodeGraphs:
    """Captures at start, replays at each decode step.

    Args:
        decoder: The model.
        attention: Its attention.
        table: int32 (rows + 1, positions): the slot table and one row more, of dummies.
        future: int64 (rows + 1,): what was drawn last, by place in the table.
    """

    def __init__(
        self, decoder: FusedDecoder, attention: FlashInferAttention, table: torch.Tensor, future: torch.Tensor
    ) -> None:
        device = table.device
        self.most = table.shape[0] - 1
        self._decoder = decoder
        self._attention = attention
        self._table = table
        self._future = future
        self._line = self.most + 2
        self._inputs = torch.zeros((_NUM_LINES, self._line + self._line % 2), dtype=torch.int32, device=device)
        self._indices = torch.zeros(table.shape[0] * table.shape[1], dtype=torch.int32, device=device)
        self._query = torch.arange(self.most + 2, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(self.most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(self.most, dtype=torch.int32, device=device)
        self._workspace = Workspace(device)
        self._captured: dict[int, _Captured] = {}
        self._memory: Any = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first, so that the smaller ones share its memory."""
        for size in sorted(graph_sizes(self.most), reverse=True):
            self._captured[size] = self._capture(size)

    @torch.inference_mode()
    def run(self, rows: DecodeRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches a step: float32 logits (rows, vocab) and drawn tokens int64 (rows,), good until the next step."""
        count = len(rows.ids)
        size = next(size for size in sorted(self._captured) if size >= count)
        captured = self._captured[size]
        info = self._send(rows, size)
        if list(info) != captured.plan_info:
            raise RuntimeError(f"a decode step of {size} rows was captured for another plan of attention")
        captured.graph.replay()
        return captured.logits[:count], captured.tokens[:count]

    def _send(self, rows: DecodeRows, size: int) -> Any:
        """Inputs and attention's plan to the device, padded to `size` rows."""
        count, width = len(rows.ids), self._inputs.shape[1]
        staged = torch.empty((_NUM_LINES, width), dtype=torch.int32, pin_memory=True)
        lines = staged.numpy()
        lines[:, count : size + 1] = 0
        keys = lines[_KEYS:_IDS].reshape(-1).view(np.int64)
        keys[:count] = rows.keys
        keys[count:size] = 0
        lines[_IDS, :count] = rows.ids
        lines[_POSITIONS, :count] = rows.positions
        lines[_ROTARY, :count] = rows.rotary
        lines[_PLACES, :count] = rows.places
        lines[_PLACES, count:size] = self.most
        lines[_TEMPERATURES, :count] = rows.temperatures.view(np.int32)
        lengths = Lengths.of([1] * size, [*(rows.positions + 1), *([1] * (size - count))])
        lines[_INDPTR, : size + 1] = lengths.keys
        self._inputs.copy_(staged, non_blocking=True)
        return self._attention.schedule(lengths, self._workspace, padded_tokens=size)

    def _capture(self, size: int) -> _Captured:
        nobody = np.zeros(size, np.int32)
        rows = DecodeRows(
            nobody,
            nobody,
            nobody,
            np.full(size, self.most, np.int32),
            nobody.astype(np.float32),
            nobody.astype(np.int64),
        )
        info = self._send(rows, size)
        torch.cuda.synchronize()
        self._forward(size, info)  # kernels compile and libraries set up outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits, tokens = self._forward(size, info)
        self._memory = graph.pool()
        return _Captured(graph, list(info), logits, tokens)

    def _forward(self, size: int, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The step as it is captured."""
        inputs = self._inputs
        places, indptr = inputs[_PLACES, :size], inputs[_INDPTR, : size + 1]
        token_ids, slots = self._token_ids[:size], self._slots[:size]
        decode_inputs(
            inputs[_IDS, :size], places, inputs[_POSITIONS, :size], self._future, self._table, token_ids, slots
        )
        gather_slots(self._table, places, indptr, self._indices)
        plan = FlashInferPlan(
            self._attention, self._workspace, info, slots, (self._query[: size + 1], indptr), self._indices
        )
        hidden = self._decoder.model.embed(token_ids)
        logits = self._decoder.logits(hidden, inputs[_ROTARY, :size], plan)
        tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
        keys = inputs[_KEYS:_IDS].view(-1).view(torch.int64)[:size]
        draw(logits, inputs[_TEMPERATURES, :size].view(torch.float32), keys, tokens, self._future, places)
        return logits, tokens
