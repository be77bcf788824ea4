"""Steps that check drafts, as CUDA graphs: decode rows of several tokens each, all of which are sampled.

    tokens    │ · · a b │ a b c d │ · · · a │ … │ · · · · │        width 4: 1, 3 and 0 drafts, and a row of padding
              └─ row 0 ─┘└─ row 1 ─┘└─ row 2 ─┘

A step takes the next captured number of rows, and the next width that holds its longest row. What fills a row up stands
before its tokens: attention takes a row's length from its last one. Padding writes to the dummy slot, and nobody looks
at what it draws.

Drafts are chains or trees, by what comes with a step's inputs: which tokens each sees, and where it is rotated to.

A size is captured when it first comes, those that come most while there is nothing to do, so whoever never drafts pays
nothing. There are at most `MOST_CHECKED` tokens in one; larger steps run kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.flashinfer_backend import FlashInferAttention, StepPlan
from engine.batch import Row
from engine.gpu.decode_attention import DecodePart, DecodeRows, part_keys
from engine.gpu.filled_rows import FilledSize, FilledTexts
from engine.gpu.forward import FusedDecoder
from engine.gpu.graph import Graph, GraphMemory
from engine.gpu.ops import decode_inputs
from engine.gpu.sampling import draw, temperature_of
from engine.gpu.skinny import of_each_kind
from engine.gpu.staging import Staging
from engine.gpu.step_graphs import StepResult
from engine.gpu.step_layout import cut
from engine.gpu.step_sizes import MOST_CHECKED, WIDTHS, checked_ahead, most_checked, row_sizes
from engine.runner import text_positions
from engine.sampling import noise_key, ways

logger = logging.getLogger("beholder.engine")


@dataclass(frozen=True, slots=True)
class VerifyLayout(FilledSize):
    """Where a step of some size has its inputs, in one array of int32."""

    def cut(self, flat: Any) -> dict[str, Any]:
        """Names for the parts of an array of `length` int32, numpy or torch."""
        names = ("temperatures", "sample_places", "ids", "positions", "places", "rotary", "seen")
        of_tokens = dict.fromkeys(names, self.tokens)
        return cut(flat, keys=2 * self.tokens, **of_tokens, part_keys=self.parts)

    @property
    def length(self) -> int:
        """Of the array."""
        return 10 * (self.tokens + 4)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What all sizes share: inputs, token ids, slots of tokens, logits."""

    staging: Staging
    token_ids: torch.Tensor
    slots: torch.Tensor
    logits: torch.Tensor


class VerifyGraphs:
    """Captures at first use or before, replays at each step.

    Args:
        decoder: The model.
        attention: Its attention, over a slot table with one row more, of dummies.
        future: int64 (rows + 1,): what was drawn last, by place in the table. Rows with drafts leave nothing there, as
            only the host can say which of their tokens stand.
        memory: That of the other steps' graphs.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        attention: FlashInferAttention,
        future: torch.Tensor,
        memory: GraphMemory,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._table = attention.slot_table
        self._future = future
        self._memory = memory
        self._dummy = self._table.shape[0] - 1
        self._has_axes = decoder.model.config.rope.sections is not None
        self._row_sizes = row_sizes(self._dummy)
        self._ahead = checked_ahead(self._dummy)
        self._buffers: _Buffers | None = None
        self._captured: dict[tuple[int, int], Graph[tuple[torch.Tensor, torch.Tensor]] | None] = {}

    def size_of(self, rows: Sequence[Row]) -> tuple[int, int] | None:
        """Rows and width of the captured step that these rows take; None: there is none, or it has something else."""
        if len(rows) > self._dummy or not all(_is_checked(row) for row in rows):
            return None
        longest = max(len(row.token_ids) for row in rows)
        width = next((width for width in WIDTHS if width >= longest), None)
        size = next(size for size in self._row_sizes if size >= len(rows))
        return None if width is None or size * width > MOST_CHECKED else (size, width)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult | None:
        """Launches a step of decode rows with drafts or without; None where it has to run kernel by kernel."""
        size = self.size_of(rows)
        if size is None:
            return None
        is_first = size not in self._captured
        if is_first:
            self._captured[size] = self._capture(size)
        graph = self._captured[size]
        if graph is None:
            return None
        picks = self._send(rows, self._layout(size))
        graph.replay()
        return StepResult(*graph.result, picks, is_first)

    def capture_next(self) -> bool:
        """Capture one size that may come soon. False: there is none, or memory did not do for one."""
        if None in self._captured.values():
            return False
        size = next((size for size in self._ahead if size not in self._captured), None)
        if size is None:
            return False
        self._captured[size] = self._capture(size)
        return self._captured[size] is not None

    @torch.inference_mode()
    def send_all(self) -> None:
        """Launch the work of each width, and of each kind of numbers of tokens, outside of graphs, of one layer of each
        kind: see `compile_launched`.
        """
        whole = self._decoder
        self._decoder = whole.thin()
        for size in [*((1, width) for width in WIDTHS), *of_each_kind(self._ahead)]:
            layout = self._layout(size)
            self._send([], layout)
            self._forward(layout)
        self._decoder = whole

    def _layout(self, size: tuple[int, int]) -> VerifyLayout:
        return VerifyLayout(*size, queries=min(size[1], self._attention.drafting.most_queries))

    def _send(self, rows: Sequence[Row], layout: VerifyLayout) -> list[int]:
        """Inputs to the device; which tokens are the rows'."""
        staging = self._shared().staging
        parts = staging.zeros(layout)
        for name in ("places", "sample_places"):
            parts[name].fill(self._dummy)
        at = np.empty(0, np.int64)
        trees: list[tuple[int, Sequence[int], int]] = []
        if rows:
            filled = FilledTexts.of_rows(rows, layout.width, has_axes=self._has_axes)
            at = filled.at
            if any(row.parents is not None for row in rows):
                trees += [
                    (first, row.parents, len(row.token_ids))
                    for first, row in zip(filled.firsts.tolist(), rows, strict=True)
                    if row.parents is not None
                ]
            parts["ids"][at] = [token_id for row in rows for token_id in row.token_ids]
            parts["places"][at] = filled.each(filled.table_rows)
            parts["positions"][at] = filled.positions
            in_text = np.concatenate([text_positions(row) for row in rows]) if trees else filled.positions
            parts["rotary"][at] = in_text + filled.each(filled.deltas)
            sampling = [way for row in rows for way in ways(row)]
            temperatures = [temperature_of(how.params) for how in sampling]
            if any(temperatures):
                parts["keys"].view(np.int64)[at] = [noise_key(how) for how in sampling]
                parts["temperatures"].view(np.float32)[at] = temperatures
            if plain := [index for index, row in enumerate(rows) if not row.drafted]:
                parts["sample_places"][filled.firsts[plain]] = filled.table_rows[plain]
        layout.let_see(parts["seen"], trees)
        parts["part_keys"][:] = part_keys(layout.lengths(parts["positions"]), self._attention.num_kv_heads)
        staging.send(layout)
        return at.tolist()

    def _shared(self) -> _Buffers:
        if self._buffers is None:
            device = self._table.device
            config = self._decoder.model.config
            most = most_checked(self._dummy)
            inputs = torch.zeros(VerifyLayout(most, 1, 1).length, dtype=torch.int32, device=device)
            token_ids = torch.zeros(most, dtype=torch.int64, device=device)
            slots = torch.zeros(most, dtype=torch.int32, device=device)
            logits = torch.empty((most, config.vocab_size), dtype=torch.float32, device=device)
            self._buffers = _Buffers(Staging(inputs), token_ids, slots, logits)
        return self._buffers

    @torch.inference_mode()
    def _capture(self, size: tuple[int, int]) -> Graph[tuple[torch.Tensor, torch.Tensor]] | None:
        """None, and a line in the log, where that fails, for want of memory most likely."""
        try:
            layout = self._layout(size)
            self._send([], layout)
            self._forward(layout)  # kernels compile and libraries set up outside of the capture
            return Graph(lambda: self._forward(layout), self._memory)
        except Exception:  # a capture that breaks off may raise something else than what broke it off
            logger.warning("steps of %d rows of %d tokens run without a graph", *size, exc_info=True)
            return None

    def _forward(self, layout: VerifyLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """The step as it is captured."""
        buffers, tokens = self._shared(), layout.tokens
        parts: dict[str, torch.Tensor] = layout.cut(buffers.staging.into)
        token_ids, slots = buffers.token_ids[:tokens], buffers.slots[:tokens]
        places, positions = parts["places"], parts["positions"]
        decode_inputs(parts["ids"], places, positions, self._future, self._table, token_ids, slots)
        rows = DecodeRows(places, positions, parts["part_keys"], parts["seen"], layout.queries)
        plan = StepPlan(self._attention.pool, slots, [DecodePart(0, tokens, self._attention.drafting, rows)])
        hidden = self._decoder.model.embed(token_ids)
        logits = buffers.logits[:tokens].copy_(self._decoder.logits(hidden, parts["rotary"], plan))
        drawn = torch.empty(tokens, dtype=torch.int64, device=logits.device)
        temperatures = parts["temperatures"].view(torch.float32)
        keys = parts["keys"].view(torch.int64)
        draw(logits, temperatures, keys, drawn, self._future, parts["sample_places"])
        return logits, drawn


def _is_checked(row: Row) -> bool:
    """Whether all of a row's tokens are sampled, and it has nothing else."""
    return row.sampling is not None and len(row.token_ids) == 1 + len(row.drafted) and not row.vision
