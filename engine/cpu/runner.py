"""Runs a dense decoder on a CPU with AVX-512: a step's layers are one call of `step.cpp`, whatever rows it has.

Each token's arithmetic is its own there: what is said does not depend on batches, chunks, cached prefixes or drafts,
not in bfloat16 either. The vision encoder and sampling are torch's, as in `TorchRunner`.

A processor with AMX multiplies large matrices several times as fast as AVX-512 does, and torch uses it: there chunks of
prompts are torch's, and what holds for all tokens elsewhere holds for decoding and drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Row
from engine.cpu.native import NativeModel, Step, is_beside_torch, library
from engine.models.decoder import Decoder
from engine.runner import MAX_DRAFTS, TorchRunner, VisionEncoder
from engine.speculation.drafter import Drafter
from engine.speculation.tree import hidden, offsets
from preprocess.blocks.rope import MRope

SHORT: Final = 16
"""Rows of at most so many tokens, decoding and verifying ones among them, are never left to torch."""

MOST_AT_ONCE: Final = 64
"""Steps of more tokens are computed layer by layer, telling of progress: on a large model they take seconds."""


class CpuRunner(TorchRunner):
    """See `engine.batch.Runner`. Arguments as `TorchRunner`'s; the type is bfloat16, and `why_not` is empty."""

    def __init__(
        self,
        model: Decoder,
        encoder: VisionEncoder,
        *,
        num_slots: int,
        max_positions: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            model,
            encoder,
            num_slots=num_slots,
            max_positions=max_positions,
            max_rows=max_rows,
            dtype=dtype,
            device=device,
            padding_rows=max_rows * MAX_DRAFTS,  # of the guesses of trees; rows nobody writes take no memory
        )
        self._places = self.padded_table.numpy()
        loaded = library()
        assert loaded is not None
        self.kernel = "native"
        self._library = loaded
        self.chunks_by_torch = is_beside_torch()
        self.native = NativeModel(model, keep=self.chunks_by_torch)
        self.threads = torch.get_num_threads()
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._step = Step(
            slot_table=self.slot_table.data_ptr(),
            kv_pool=self.kv_pool.data_ptr(),
            num_slots=num_slots,
            table_width=max_positions,
        )
        table = model.embedding.table
        self._table_at, self._table_stride = table.data_ptr(), table.stride(0) * table.itemsize

    def guess_with(self, drafter: Drafter) -> None:
        """See `TorchRunner.guess_with`."""
        super().guess_with(drafter)
        if (told := drafter.told) is not None:
            self._told_layers = np.array(told.layers, np.int32)
            self._step.told, self._step.num_told = self._told_layers.ctypes.data, len(told.layers)
            self._step.features = told.features.data_ptr()

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Runs the forward of a step: float32 logits (tokens to sample, vocab), in the order of `rows`."""
        is_long = [self.chunks_by_torch and len(row.token_ids) > SHORT for row in rows]
        if not any(is_long):
            return self._run(rows)
        by_torch = super().logits([row for row, long in zip(rows, is_long, strict=True) if long])
        if all(is_long):
            return by_torch
        native = self._run([row for row, long in zip(rows, is_long, strict=True) if not long])
        counts = [0 if row.sampling is None else 1 + len(row.drafted) for row in rows]
        from_torch = torch.tensor(is_long).repeat_interleave(torch.tensor(counts))
        logits = torch.empty((len(from_torch), self.vocab_size))
        logits[from_torch], logits[~from_torch] = by_torch, native
        return logits

    def _run(self, rows: Sequence[Row]) -> torch.Tensor:
        """`logits` by the library."""
        rows = self._without_trees(rows)
        lengths = [len(row.token_ids) for row in rows]
        num_tokens = sum(lengths)
        table = np.empty((len(rows), 4), np.int32)  # `Row` of step.cpp
        ends: list[int] = []
        first = 0
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            table[index] = row.table_row, row.start, first, length
            first += length
            if row.sampling is not None:
                ends.extend(range(first - 1 - len(row.drafted), first))
        ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens)
        embeddings, taps = self._embeddings(rows, table, ids)
        rotation, rotation_rows = self._rotations(rows, table, num_tokens)
        ends_array = np.array(ends, np.int32)
        logits = torch.empty((len(ends), self.vocab_size))

        step, model = self._step, ctypes.byref(self.native.model)
        step.rows, step.num_rows = table.ctypes.data, len(rows)
        step.embeddings, step.taps, step.num_tokens = embeddings.ctypes.data, taps.ctypes.data, num_tokens
        step.rotation, step.rotation_rows = rotation.data_ptr(), rotation_rows.ctypes.data
        step.ends, step.num_ends, step.logits = ends_array.ctypes.data, len(ends), logits.data_ptr()
        self._reserve(num_tokens)
        num_layers = self.model.config.num_layers
        at_once = num_layers if num_tokens <= MOST_AT_ONCE else 1
        for layer in range(0, num_layers, at_once):
            self.model.progress()
            self._library.beholder_step(model, ctypes.byref(step), layer, layer + at_once, self.threads)
        return logits

    def _without_trees(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The same with each guess of a tree as a row of its own, whose places are those of the tokens that it sees:
        the library knows chains only, and computes a token alike in any row.
        """
        if all(row.parents is None for row in rows):
            return rows
        plain: list[Row] = []
        place = self.max_rows
        for row in rows:
            if row.parents is None:
                plain.append(row)
                continue
            num_tokens, axes, own = len(row.token_ids), row.positions, self._places[row.table_row]
            num_given = num_tokens - len(row.drafted)
            given = None if axes is None else axes[:, :num_given]
            plain.append(replace(row, token_ids=row.token_ids[:num_given], positions=given, drafted=(), parents=None))
            depths, seen = offsets(row.parents, num_tokens), ~hidden(row.parents, num_tokens)
            for index, sampling in enumerate(row.drafted, start=num_given):
                start = row.start + depths[index]
                self._places[place, : row.start] = own[: row.start]
                self._places[place, row.start : start + 1] = own[row.start : row.start + num_tokens][seen[index]]
                at = None if axes is None else axes[:, index : index + 1]
                plain.append(Row(place, start, row.token_ids[index : index + 1], sampling, (), at, row.position_delta))
                place += 1
        return plain

    def _embeddings(
        self, rows: Sequence[Row], table: NDArray[np.int32], ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Of each token the address of its embedding, and how many taps (DeepStack) stand behind it."""
        taps = np.zeros(len(ids), np.int32)
        if any(row.vision for row in rows):
            for row, first in zip(rows, table[:, 2].tolist(), strict=True):
                for part in row.vision:
                    ids[first + part.start : first + part.start + part.count] = 0  # may be ids above the vocabulary
        addresses = self._table_at + ids * self._table_stride
        for row, first in zip(rows, table[:, 2].tolist(), strict=True):
            for part in row.vision:
                at = first + part.start
                stride = part.embeddings.stride(0) * part.embeddings.itemsize
                addresses[at : at + part.count] = (
                    part.embeddings.data_ptr() + np.arange(part.first, part.first + part.count) * stride
                )
                taps[at : at + part.count] = self.encoder.num_taps
                if self._told is not None:
                    start = row.start + part.start
                    seen = part.embeddings.view(len(part.embeddings), -1)[part.first : part.first + part.count]
                    slots = self.slot_table[row.table_row, start : start + part.count].long()
                    self._told.seen.index_copy_(0, slots, seen[:, : self._told.seen.shape[1]])
        return addresses.view(np.uint64), taps

    def _rotations(
        self, rows: Sequence[Row], table: NDArray[np.int32], num_tokens: int
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """bfloat16 (any, 2, head_dim) of `Rope`, and which of them each token is rotated by."""
        lengths = table[:, 3]
        # Of each token the position in its row: all tokens counted, from each row's first on, from its start on.
        positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(table[:, 1] - table[:, 2], lengths)
        rope = self.model.rope
        if not isinstance(rope, MRope):
            return rope.table, positions
        rotary = self._rotary(rows, torch.from_numpy(positions))
        return torch.cat(rope.at(rotary), dim=1), np.arange(num_tokens, dtype=np.int64)

    def _reserve(self, num_tokens: int) -> None:
        """Have a workspace for so many tokens, which begins at a multiple of 64 bytes."""
        size = self._library.beholder_workspace(ctypes.byref(self.native.model), num_tokens)
        if size + 64 > len(self._workspace):
            self._workspace = torch.empty(size + 64, dtype=torch.uint8)
            self._step.workspace = -(-self._workspace.data_ptr() // 64) * 64
