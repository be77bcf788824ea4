"""Steps that run kernel by kernel: those larger than any graph, or for which there was no memory, and the first ones.

Called by `engine.gpu.runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.backend import Segment
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.batch import FUTURE_TOKEN, Row, VisionRows
from engine.gpu.draws import on_device
from engine.gpu.forward import FusedDecoder
from engine.models.decoder import DeepStack
from engine.runner import text_positions


class EagerSteps:
    """Launches a step's forward.

    Args:
        decoder: The model.
        attention: Its attention.
        future: int64 (rows + 1,): what was drawn last, by place in the slot table.
        num_taps: DeepStack features behind a vision token's own.
    """

    def __init__(
        self, decoder: FusedDecoder, attention: FlashInferAttention, future: torch.Tensor, *, num_taps: int
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._future = future
        self._num_taps = num_taps
        self._device = future.device

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Float32 logits (tokens to sample, vocab), row by row."""
        order = sorted(range(len(rows)), key=lambda index: _layout_key(rows[index]))  # as attention wants them
        by_length = [rows[index] for index in order]
        logits = self._logits(by_length)
        if order == list(range(len(rows))):
            return logits
        counts = [0 if row.sampling is None else 1 + len(row.drafted) for row in by_length]
        ends = np.cumsum(counts)
        of_row = {index: range(end - count, end) for index, end, count in zip(order, ends, counts, strict=True)}
        return logits[on_device([at for index in range(len(rows)) for at in of_row[index]], self._device)]

    def _logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """The same of rows in rising length, trees of drafts last."""
        lengths = [len(row.token_ids) for row in rows]
        ends = np.cumsum(lengths, dtype=np.int64) - 1
        total = int(ends[-1]) + 1
        staged = np.empty((2, total), np.int64)  # ids, positions in the sequence
        pictures: list[tuple[int, VisionRows]] = []  # (first token, what stands there)
        first = 0
        for row, length in zip(rows, lengths, strict=True):
            staged[0, first : first + length] = row.token_ids
            staged[1, first : first + length] = np.arange(row.start, row.start + length)
            for part in row.vision:
                staged[0, first + part.start : first + part.start + part.count] = 0  # may be ids above the vocabulary
                pictures.append((first + part.start, part))
            if row.token_ids[0] == FUTURE_TOKEN:
                staged[0, first] = -1 - row.table_row
            first += length
        parts = [staged.reshape(-1)]
        has_axes = self._decoder.model.config.rope.sections is not None
        has_trees = any(row.parents is not None for row in rows)
        if has_axes:
            parts.append(self._axes(rows, total).reshape(-1))
        elif has_trees:
            parts.append(np.concatenate([text_positions(row) for row in rows]))
        of_rows = [
            np.arange(end - len(row.drafted), end + 1)
            for row, end in zip(rows, ends, strict=True)
            if row.sampling is not None
        ]
        sampling_ends = np.concatenate(of_rows) if of_rows else ends[:0]
        parts.append(sampling_ends)
        sent = torch.from_numpy(np.concatenate(parts)).pin_memory().to(self._device, non_blocking=True)
        ids, positions = sent[:total], sent[total : 2 * total]
        rotary = positions
        if has_axes:
            rotary = sent[2 * total : 5 * total].view(3, total)
        elif has_trees:
            rotary = sent[2 * total : 3 * total]
        if any(row.token_ids[0] == FUTURE_TOKEN for row in rows):
            ids = torch.where(ids < 0, self._future[(-1 - ids).clamp(min=0)], ids)

        hidden = self._decoder.model.embed(ids)  # (tokens, hidden)
        width = hidden.shape[1]
        embeddings = [(at, part.embeddings[part.first : part.first + part.count]) for at, part in pictures]
        for at, rows_of in embeddings:
            hidden[at : at + len(rows_of)] = rows_of.view(len(rows_of), -1)[:, :width]
        segments = [Segment(row.table_row, row.start, len(row.token_ids), row.parents) for row in rows]
        plan = self._attention.plan(segments, positions)
        if self._decoder.told is not None:
            for at, rows_of in embeddings:
                self._decoder.told.see(plan.places[at : at + len(rows_of)], rows_of.view(len(rows_of), -1)[:, :width])
        if not len(sampling_ends):  # the last layer's results are nobody's, but its keys and values are
            self._decoder.logits(hidden, rotary, plan, self._taps(embeddings), sent[:1] * 0)
            return torch.empty((0, self._decoder.model.config.vocab_size), device=self._device)
        return self._decoder.logits(
            hidden, rotary, plan, self._taps(embeddings), sent[len(sent) - len(sampling_ends) :]
        )

    def _axes(self, rows: Sequence[Row], total: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """(3, tokens): rotary positions."""
        axes = np.empty((3, total), np.int64)
        first = 0
        for row in rows:
            stop = first + len(row.token_ids)
            own = row.positions
            axes[:, first:stop] = text_positions(row) + row.position_delta if own is None else own
            first = stop
        return axes

    def _taps(self, pictures: Sequence[tuple[int, torch.Tensor]]) -> DeepStack | None:
        """What the first layers add at vision tokens, given as (first token, embeddings)."""
        if not pictures or not self._num_taps:
            return None
        tokens = torch.cat([torch.arange(at, at + len(part), device=self._device) for at, part in pictures])
        width = self._decoder.model.config.hidden_size
        taps = torch.cat([part.view(len(part), -1, width)[:, 1:] for _, part in pictures])  # (tokens, taps, hidden)
        return DeepStack(tokens, taps.transpose(0, 1).contiguous())


def _layout_key(row: Row) -> tuple[bool, int]:
    return row.parents is not None, len(row.token_ids)
