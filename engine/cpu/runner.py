"""Runs a dense decoder on a CPU with AVX-512 or AVX2: a step's layers are one call of `step.cpp`, whatever rows it has.

Each token's arithmetic is its own there: what is said does not depend on batches, chunks, cached prefixes or drafts,
not in bfloat16 either. The vision encoder and sampling are torch's, as in `TorchRunner`; the encoder computes in
float32 where torch has no quick products of bfloat16, and its results are rounded to that.

A processor with AMX multiplies large matrices several times as fast as AVX-512 does. `step.cpp` uses it for weights of
8 bits; of models with others chunks of prompts are torch's there, and what holds for all tokens elsewhere holds for
decoding and drafts.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from engine.batch import DraftedAlike, Row, SampledToken, TokenMask
from engine.cpu.native import NativeModel, Step, address, is_beside_torch, library
from engine.models.decoder import Decoder
from engine.runner import MAX_DRAFTS, TorchRunner, VisionEncoder
from engine.sampling import is_plainly_greedy, plainly_greedy, sample
from engine.speculation.drafter import Drafter
from engine.speculation.tree import hidden, offsets
from preprocess.blocks.rope import MRope

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHORT: Final = 16
"""Rows of at most so many tokens before guesses are never left to torch, nor are guesses."""

LOGITS: Final = 32
"""Steps that draw so many tokens at most write logits where the last one did."""

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
        self.chunks_by_torch = is_beside_torch(model)
        self.native = NativeModel(model, keep=self.chunks_by_torch)
        self.threads = torch.get_num_threads()
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._num_reserved = 0
        self._logits = torch.empty((LOGITS, self.vocab_size))
        self._step = Step(
            slot_table=self.slot_table.data_ptr(),
            kv_pool=self.kv_pool.data_ptr(),
            num_slots=num_slots,
            table_width=max_positions,
        )
        self._model_at, self._step_at = ctypes.addressof(self.native.model), ctypes.addressof(self._step)
        table = model.embedding.table
        self._table_at, self._table_stride = table.data_ptr(), table.stride(0) * table.itemsize

    def guess_with(self, drafter: Drafter) -> None:
        """See `TorchRunner.guess_with`."""
        super().guess_with(drafter)
        if (told := drafter.told) is not None:
            self._told_layers = array("i", told.layers)
            self._step.told, self._step.num_told = address(self._told_layers), len(told.layers)
            self._step.features = told.features.data_ptr()

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """See `Runner.step`."""
        wanted = [row for row in rows if row.sampling is not None]
        if all(map(_takes_largest, wanted)) and not any(map(self._is_long, rows)):
            return self._largest(self._run(rows, is_kept=False), wanted)
        return self._drawn(rows)

    @torch.inference_mode()
    def _drawn(self, rows: Sequence[Row]) -> list[SampledToken]:
        """A step whose tokens are drawn in any way."""
        asked = [sampling for row in rows if row.sampling is not None for sampling in (row.sampling, *row.drafted)]
        logits = self.logits(rows)
        greedy = plainly_greedy(asked)
        if not greedy:
            return sample(logits, asked) if asked else []
        best = self._best(logits, greedy, [asked[index].allowed for index in greedy])
        if len(greedy) == len(asked):
            return best
        places = dict(zip(greedy, best, strict=True))
        others = [index for index in range(len(asked)) if index not in places]
        drawn = sample(logits[torch.tensor(others)], [asked[index] for index in others])
        places.update(zip(others, drawn, strict=True))
        return [places[index] for index in range(len(asked))]

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Runs the forward of a step: float32 logits (tokens to sample, vocab), in the order of `rows`."""
        is_long = list(map(self._is_long, rows))
        if not any(is_long):
            return self._run(rows)
        by_torch = super().logits([_given(row) for row, long in zip(rows, is_long, strict=True) if long])
        others: list[Row] = []
        whose: list[bool] = []  # of each token to sample: torch's
        for row, long in zip(rows, is_long, strict=True):
            if not long:
                others.append(row)
            elif row.drafted:
                others.append(_guessed(row))
            if row.sampling is not None:
                whose += [long, *[False] * len(row.drafted)]
        if not others:
            return by_torch
        native, from_torch = self._run(others), torch.tensor(whose, dtype=torch.bool)
        logits = torch.empty((len(whose), self.vocab_size))
        logits[from_torch], logits[~from_torch] = by_torch, native
        return logits

    def _is_long(self, row: Row) -> bool:
        """Whether what precedes its guesses is a chunk for torch."""
        return self.chunks_by_torch and len(row.token_ids) - len(row.drafted) > SHORT

    def _best(
        self, logits: torch.Tensor, indices: Sequence[int], allowed: Sequence[TokenMask | None]
    ) -> list[SampledToken]:
        """Of these rows of logits the largest, of those that a grammar allows where there is one: what `sample` says of
        rows that are `plainly_greedy`, in one call.
        """
        words = [mask.words() for mask in allowed if mask is not None]
        numbers = count()
        chosen = array("i")
        for index, mask in zip(indices, allowed, strict=True):
            chosen.extend((index, -1 if mask is None else next(numbers)))
        return self._best_of(logits, chosen, np.stack(words) if words else None)

    def _largest(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[SampledToken]:
        """The same of all tokens of rows, those after drafts among them."""
        words: list[NDArray[np.int32]] = []
        chosen = array("i")
        first = num_masks = 0
        for row in rows:
            end = first + 1 + len(row.drafted)
            if row.masks is None:
                for index in range(first, end):
                    chosen.extend((index, -1))
            else:
                words.append(row.masks.words())
                for index in range(first, end):
                    chosen.extend((index, num_masks + index - first))
                num_masks += end - first
            first = end
        masks = words[0] if len(words) == 1 else np.concatenate(words) if words else None
        return self._best_of(logits, chosen, masks)

    def _best_of(self, logits: torch.Tensor, chosen: array[int], masks: NDArray[np.int32] | None) -> list[SampledToken]:
        """See `beholder_best`: `chosen` are pairs of a row of logits and a mask or -1."""
        num = len(chosen) // 2
        ids = array("q", bytes(8 * num))
        self._library.beholder_best(
            logits.data_ptr(),
            address(chosen),
            num,
            self.vocab_size,
            None if masks is None else masks.ctypes.data,
            0 if masks is None else masks.shape[1],
            address(ids),
            self.threads,
        )
        return [SampledToken(token_id) for token_id in ids]

    def _run(self, rows: Sequence[Row], *, is_kept: bool = True) -> torch.Tensor:
        """`logits` by the library; unless `is_kept`, the next call may write over them. Its arrays are Python's own:
        those of numpy cost several times as much to make, and a step has ten.
        """
        rows, shared = self._without_trees(rows)
        table = array("i")  # `Row` of layout.h
        ids: list[int] = []
        ends = array("i")
        for row, num_shared in zip(rows, shared, strict=True):
            length = len(row.token_ids)
            table.extend((row.table_row, row.start, len(ids), length, num_shared))
            ids.extend(row.token_ids)
            if row.sampling is not None:
                ends.extend(range(len(ids) - 1 - len(row.drafted), len(ids)))
        num_tokens = len(ids)
        addresses, taps = self._embeddings(rows, ids)
        rotation, rotation_rows = self._rotations(rows)
        is_new = is_kept or len(ends) > len(self._logits)
        logits = torch.empty((len(ends), self.vocab_size)) if is_new else self._logits

        step = self._step
        step.rows, step.num_rows = address(table), len(rows)
        step.embeddings, step.taps, step.num_tokens = address(addresses), address(taps), num_tokens
        step.rotation, step.rotation_rows = rotation.data_ptr(), address(rotation_rows)
        step.ends, step.num_ends, step.logits = address(ends), len(ends), logits.data_ptr()
        self._reserve(num_tokens)
        num_layers = self.model.config.num_layers
        at_once = num_layers if num_tokens <= MOST_AT_ONCE else 1
        for layer in range(0, num_layers, at_once):
            self.model.progress()
            self._library.beholder_step(self._model_at, self._step_at, layer, layer + at_once, self.threads)
        return logits

    def _without_trees(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[int]]:
        """The same with each guess of a tree as a row of its own, whose places are those of the tokens that it sees:
        the library knows chains only, and computes a token alike in any row. And how many first places each row shares
        with the one before it, whose keys and values are read once for both.
        """
        if all(row.parents is None for row in rows):
            return rows, [0] * len(rows)
        plain: list[Row] = []
        shared: list[int] = []
        place = self.max_rows
        for row in rows:
            shared.append(0)
            if row.parents is None:
                plain.append(row)
                continue
            num_tokens, axes, own = len(row.token_ids), row.positions, self._places[row.table_row]
            num_given = num_tokens - len(row.drafted)
            given = None if axes is None else axes[:, :num_given]
            plain.append(replace(row, token_ids=row.token_ids[:num_given], positions=given, drafted=(), parents=None))
            depths, seen = offsets(row.parents, num_tokens), ~hidden(row.parents, num_tokens)
            self._places[place : place + len(row.drafted), : row.start] = own[: row.start]
            for index, sampling in enumerate(row.drafted, start=num_given):
                start = row.start + depths[index]
                self._places[place, row.start : start + 1] = own[row.start : row.start + num_tokens][seen[index]]
                at = None if axes is None else axes[:, index : index + 1]
                plain.append(Row(place, start, row.token_ids[index : index + 1], sampling, (), at, row.position_delta))
                shared.append(row.start)
                place += 1
        return plain, shared

    def _embeddings(self, rows: Sequence[Row], ids: Sequence[int]) -> tuple[array[int], array[int]]:
        """Of each token the address of its embedding, and how many taps (DeepStack) stand behind it."""
        table_at, stride = self._table_at, self._table_stride
        taps = array("i", bytes(4 * len(ids)))
        if not any(row.vision for row in rows):
            return array("Q", [table_at + token_id * stride for token_id in ids]), taps
        addresses = array("Q", bytes(8 * len(ids)))
        first = 0
        for row in rows:
            own = list(row.token_ids)
            for part in row.vision:
                own[part.start : part.start + part.count] = [0] * part.count  # may be ids above the vocabulary
            addresses[first : first + len(own)] = array("Q", [table_at + token_id * stride for token_id in own])
            for part in row.vision:
                at, size = first + part.start, part.embeddings.stride(0) * part.embeddings.itemsize
                begin = part.embeddings.data_ptr() + part.first * size
                addresses[at : at + part.count] = array("Q", [begin + index * size for index in range(part.count)])
                taps[at : at + part.count] = array("i", [self.encoder.num_taps]) * part.count
                if self._told is not None:
                    start = row.start + part.start
                    seen = part.embeddings.view(len(part.embeddings), -1)[part.first : part.first + part.count]
                    slots = self.slot_table[row.table_row, start : start + part.count].long()
                    self._told.seen.index_copy_(0, slots, seen[:, : self._told.seen.shape[1]])
            first += len(own)
        return addresses, taps

    def _rotations(self, rows: Sequence[Row]) -> tuple[torch.Tensor, array[int]]:
        """bfloat16 (any, 2, head_dim) of `Rope`, and which of them each token is rotated by."""
        positions = array("q")
        for row in rows:
            positions.extend(range(row.start, row.start + len(row.token_ids)))
        rope = self.model.rope
        if not isinstance(rope, MRope):
            return rope.table, positions
        with torch.inference_mode():
            rotary = self._rotary(rows, torch.tensor(positions))
            return torch.cat(rope.at(rotary), dim=1), array("q", range(len(positions)))

    def _reserve(self, num_tokens: int) -> None:
        """Have a workspace for so many tokens, which begins at a multiple of 64 bytes."""
        if num_tokens <= self._num_reserved:
            return
        size = self._library.beholder_workspace(self._model_at, num_tokens)
        self._workspace = torch.empty(size + 64, dtype=torch.uint8)
        self._step.workspace = -(-self._workspace.data_ptr() // 64) * 64
        self._num_reserved = num_tokens


def _given(row: Row) -> Row:
    """The same without guesses."""
    if not row.drafted:
        return row
    count = len(row.token_ids) - len(row.drafted)
    positions = None if row.positions is None else row.positions[:, :count]
    return replace(row, token_ids=row.token_ids[:count], positions=positions, drafted=(), masks=None)


def _guessed(row: Row) -> Row:
    """The guesses of a chain, as a row that follows what is given."""
    count = len(row.token_ids) - len(row.drafted)
    positions = None if row.positions is None else row.positions[:, count:]
    start, ids, drafted = row.start + count, row.token_ids[count:], row.drafted
    return Row(row.table_row, start, ids, drafted[0], (), positions, row.position_delta, drafted[1:])


def _takes_largest(row: Row) -> bool:
    """Whether all its tokens are the largest logits of those that its masks allow."""
    sampling = row.sampling
    assert sampling is not None
    return (
        (isinstance(row.drafted, DraftedAlike) or not row.drafted)
        and (row.masks is not None or sampling.allowed is None)
        and is_plainly_greedy(sampling)
    )
