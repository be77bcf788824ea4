"""Steps that check drafts, as CUDA graphs: decode rows of several tokens each, all of which are sampled.

    tokens    │ · · a b │ a b c d │ · · · a │ … │ · · · · │        width 4: 1, 3 and 0 drafts, and a row of padding
              └─ row 0 ─┘└─ row 1 ─┘└─ row 2 ─┘

A step takes the next captured number of rows, and the next width that holds its longest row. What fills a row up stands
before its tokens: attention lines a row's tokens up with the end of its keys, so it never reads a slot behind them.
Padding writes to the dummy slot, and nobody looks at what it draws.

A size is captured when it first comes, so whoever never drafts pays nothing, and there are at most `MOST_TOKENS` tokens
in one; larger steps run kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.flashinfer_backend import FlashInferAttention, Lengths, PartPlan, StepPlan, Workspace
from engine.batch import Row
from engine.gpu.forward import FusedDecoder
from engine.gpu.graph import Graph, GraphMemory
from engine.gpu.ops import decode_inputs, gather_slots
from engine.gpu.sampling import draw, temperature_of
from engine.gpu.step_graphs import StepResult, cut
from engine.sampling import noise_key

WIDTHS: Final = (2, 4, 8, 16)
"""Tokens of a row: those of `engine.speculation.controller.LENGTHS`, and the one before them."""

MOST_TOKENS: Final = 512
"""Of a captured step. Their logits take most of its memory: 300 MiB at a vocabulary of 152,000."""

logger = logging.getLogger("beholder.engine")


def row_sizes(most: int) -> list[int]:
    """Captured numbers of rows: few, at most half as many again as wanted."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < most:
        sizes += [3 * sizes[-1] // 2, 2 * sizes[-1]]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """Where a step of some size has its inputs, in one array of int32."""

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.rows * self.width

    def cut(self, flat: Any) -> dict[str, Any]:
        """Names for the parts of an array of `length` int32, numpy or torch."""
        names = ("temperatures", "sample_places", "ids", "positions", "places", "rotary")
        of_tokens = dict.fromkeys(names, self.tokens)
        rows = self.rows
        return cut(flat, keys=2 * self.tokens, **of_tokens, row_places=rows, row_queries=rows + 1, row_keys=rows + 1)

    @property
    def length(self) -> int:
        """Of the array."""
        return 8 * (self.tokens + 4) + 3 * (self.rows + 5)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph[tuple[torch.Tensor, torch.Tensor]]
    plan: list[int]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What all sizes share: inputs, token ids, slots of tokens, slots of keys, the plan of attention."""

    inputs: torch.Tensor
    token_ids: torch.Tensor
    slots: torch.Tensor
    key_slots: torch.Tensor
    workspace: Workspace


class VerifyGraphs:
    """Captures at first use, replays at each step.

    Args:
        decoder: The model.
        attention: Its attention.
        table: int32 (rows + 1, positions): the slot table and one row more, of dummies.
        future: int64 (rows + 1,): what was drawn last, by place in the table. Rows with drafts leave nothing there, as
            only the host can say which of their tokens stand.
        memory: That of the other steps' graphs.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        attention: FlashInferAttention,
        table: torch.Tensor,
        future: torch.Tensor,
        memory: GraphMemory,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._table = table
        self._future = future
        self._memory = memory
        self._dummy = table.shape[0] - 1
        self._has_axes = decoder.model.config.rope.sections is not None
        self._row_sizes = row_sizes(self._dummy)
        self._buffers: _Buffers | None = None
        self._logits: dict[int, torch.Tensor] = {}  # by number of tokens
        self._captured: dict[tuple[int, int], _Captured | None] = {}

    def size_of(self, rows: Sequence[Row]) -> tuple[int, int] | None:
        """Rows and width of the captured step that these rows take; None: there is none, they are not alone in it, or
        one has fewer tokens in all than that is wide.
        """
        if len(rows) > self._dummy or not all(_is_checked(row) for row in rows):
            return None
        longest = max(len(row.token_ids) for row in rows)
        width = next((width for width in WIDTHS if width >= longest), None)
        size = next(size for size in self._row_sizes if size >= len(rows))
        if width is None or size * width > MOST_TOKENS:
            return None
        return (size, width) if all(row.start + len(row.token_ids) >= width for row in rows) else None

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult | None:
        """Launches a step of decode rows with drafts or without; None where it has to run kernel by kernel."""
        size = self.size_of(rows)
        if size is None:
            return None
        layout = VerifyLayout(*size)
        is_first = size not in self._captured
        if is_first:
            self._captured[size] = self._capture(layout)
        captured = self._captured[size]
        if captured is None:
            return None
        plan, picks = self._send(rows, layout)
        if list(plan) != captured.plan:
            raise RuntimeError(f"a step of {size[0]} rows of {size[1]} was captured for another plan of attention")
        captured.graph.replay()
        return StepResult(*captured.graph.result, picks, is_first)

    def _send(self, rows: Sequence[Row], layout: VerifyLayout) -> tuple[Any, list[int]]:
        """Inputs and the plan of attention to the device; the plan, and which tokens are the rows'."""
        buffers = self._shared()
        staged = torch.zeros(layout.length, dtype=torch.int32, pin_memory=True)
        parts: dict[str, NDArray[np.int32]] = layout.cut(staged.numpy())
        for name in ("places", "sample_places", "row_places"):
            parts[name].fill(self._dummy)
        totals = np.full(layout.rows, layout.width, np.int32)
        at = np.empty(0, np.int64)
        if num_rows := len(rows):
            counts = np.array([len(row.token_ids) for row in rows])
            starts = np.array([row.start for row in rows])
            own_places = np.array([row.table_row for row in rows])
            deltas = np.array([row.position_delta * self._has_axes for row in rows])
            firsts = layout.width * np.arange(1, num_rows + 1) - counts
            ordinals = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # within its row
            at = np.repeat(firsts, counts) + ordinals
            totals[:num_rows] = starts + counts
            parts["row_places"][:num_rows] = own_places
            parts["ids"][at] = [token_id for row in rows for token_id in row.token_ids]
            parts["places"][at] = np.repeat(own_places, counts)
            parts["positions"][at] = np.repeat(starts, counts) + ordinals
            parts["rotary"][at] = np.repeat(starts + deltas, counts) + ordinals
            sampling = [how for row in rows for how in (row.sampling, *row.drafted) if how is not None]
            parts["keys"].view(np.int64)[at] = [noise_key(how) for how in sampling]
            parts["temperatures"].view(np.float32)[at] = [temperature_of(how.params) for how in sampling]
            parts["sample_places"][firsts[counts == 1]] = own_places[counts == 1]
        lengths = Lengths.of(np.full(layout.rows, layout.width, np.int32), totals)
        parts["row_queries"][:], parts["row_keys"][:] = lengths.query, lengths.keys
        plan = self._attention.schedule(lengths, buffers.workspace, padded_tokens=layout.tokens, width=layout.width)
        buffers.inputs[: layout.length].copy_(staged, non_blocking=True)
        return plan, at.tolist()

    def _shared(self) -> _Buffers:
        if self._buffers is None:
            device = self._table.device
            inputs = torch.zeros(VerifyLayout(MOST_TOKENS, 1).length, dtype=torch.int32, device=device)
            token_ids = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
            slots = torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device)
            key_slots = torch.zeros(self._table.numel(), dtype=torch.int32, device=device)
            self._buffers = _Buffers(inputs, token_ids, slots, key_slots, Workspace(device))
        return self._buffers

    def _capture(self, layout: VerifyLayout) -> _Captured | None:
        """None, and a line in the log, where memory does not do."""
        tokens, dims = layout.tokens, (layout.rows, layout.width)
        try:
            plan, _ = self._send([], layout)
            if tokens not in self._logits:
                vocab = self._decoder.model.config.vocab_size
                self._logits[tokens] = torch.empty((tokens, vocab), dtype=torch.float32, device=self._table.device)
            self._forward(layout, plan)  # kernels compile and libraries set up outside of the capture
            return _Captured(Graph(lambda: self._forward(layout, plan), self._memory), list(plan))
        except torch.OutOfMemoryError:
            logger.warning("steps of %d rows of %d tokens run without a graph", *dims, exc_info=True)
            return None

    def _forward(self, layout: VerifyLayout, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The step as it is captured."""
        buffers, tokens = self._shared(), layout.tokens
        parts: dict[str, torch.Tensor] = layout.cut(buffers.inputs)
        token_ids, slots = buffers.token_ids[:tokens], buffers.slots[:tokens]
        decode_inputs(parts["ids"], parts["places"], parts["positions"], self._future, self._table, token_ids, slots)
        queries, keys, key_slots = parts["row_queries"], parts["row_keys"], buffers.key_slots
        gather_slots(self._table, parts["row_places"], keys, key_slots)
        part = PartPlan(self._attention, 0, tokens, buffers.workspace, info, queries, keys, key_slots)
        plan = StepPlan(self._attention.pool, slots, [part])
        hidden = self._decoder.model.embed(token_ids)
        logits = self._logits[tokens].copy_(self._decoder.logits(hidden, parts["rotary"], plan))
        drawn = torch.empty(tokens, dtype=torch.int64, device=logits.device)
        temperatures = parts["temperatures"].view(torch.float32)
        keys = parts["keys"].view(torch.int64)
        draw(logits, temperatures, keys, drawn, self._future, parts["sample_places"])
        return logits, drawn


def _is_checked(row: Row) -> bool:
    """Whether all of a row's tokens are sampled, and it has nothing else."""
    return row.sampling is not None and len(row.token_ids) == 1 + len(row.drafted) and not row.vision
