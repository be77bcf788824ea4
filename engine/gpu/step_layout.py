"""Where the graphs of whole steps have their inputs, and what a step writes there: host's work, and no tensors.

Called by `engine.gpu.step_graphs` and, for the order of a step, by `engine.gpu.runner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.flashinfer_backend import Lengths
from engine.batch import Row, RowSampling
from engine.gpu.decode_attention import part_keys
from engine.gpu.sampling import temperature_of
from engine.sampling import noise_key

MOST_CHUNKS: Final = 16
"""Chunks of prompts in a captured step."""


def cut(flat: Any, **counts: int) -> dict[str, Any]:
    """Parts of an array of 4-byte numbers one behind the other, each from 16 bytes on, as vector loads like it."""
    parts: dict[str, Any] = {}
    at = 0
    for name, count in counts.items():
        parts[name] = flat[at : at + count]
        at += count + (-count) % 4
    return parts


def is_decode(row: Row) -> bool:
    """Whether a row is one token that samples, at the place that its delta says."""
    if len(row.token_ids) != 1 or row.sampling is None or row.vision:
        return False
    return row.positions is None or bool((row.positions == row.start + row.position_delta).all())


@dataclass(frozen=True)
class StepRows:
    """A step in the order that graphs take: rows of one token that sample, then chunks. `order`: of the sampling rows,
    which decode row or (after them) chunk each is.
    """

    decodes: list[Row]
    chunks: list[Row]
    order: list[tuple[bool, int]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepRows:
        """Sort a step's rows."""
        decodes: list[Row] = []
        chunks: list[Row] = []
        order = []
        for row in rows:
            is_one = is_decode(row)
            kind = decodes if is_one else chunks
            if row.sampling is not None:
                order.append((is_one, len(kind)))
            kind.append(row)
        return cls(decodes, chunks, order)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return int(self.chunk_lengths.query[-1]) if self.chunks else 0

    @cached_property
    def chunk_lengths(self) -> Lengths:
        """Of chunks, and of as many of none that there are `MOST_CHUNKS`."""
        new, total = np.zeros((2, max(MOST_CHUNKS, len(self.chunks))), np.int32)
        new[: len(self.chunks)] = [len(row.token_ids) for row in self.chunks]
        total[: len(self.chunks)] = [row.start + len(row.token_ids) for row in self.chunks]
        return Lengths.of(new, total)


class _Sample(NamedTuple):
    """Where it is drawn, the token that it follows, whose it is and how it is drawn."""

    at: int
    end: int
    row: Row
    how: RowSampling


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step of some size has its inputs: offsets into one array of int32, and its numbers of rows.

    Lines of `tokens`: ids, positions, places, three rotary axes, whether vision. Of `samples` (decode rows, then one
    for each chunk): two for keys, then ends, places and temperatures.
    """

    decode: int
    prompt: int
    chunks: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.decode + self.prompt

    @property
    def samples(self) -> int:
        """Rows that may draw a token."""
        return self.decode + self.chunks

    def cut(self, flat: Any) -> dict[str, Any]:
        """Names for the parts of an array of `length` int32, numpy or torch."""
        return cut(
            flat,
            keys=2 * self.samples,
            ends=self.samples,
            sample_places=self.samples,
            temperatures=self.samples,
            ids=self.tokens,
            positions=self.tokens,
            places=self.tokens,
            rotary=3 * self.tokens,
            is_vision=self.tokens,
            part_keys=self.decode,
            chunk_queries=self.chunks + 1,
            chunk_keys=self.chunks + 1,
            chunk_places=self.chunks,
        )

    @property
    def length(self) -> int:
        """Of the array."""
        return 5 * (self.samples + 4) + 7 * (self.tokens + 4) + self.decode + 3 * self.chunks + 40

    def write(
        self,
        parts: Mapping[str, NDArray[np.int32]],
        rows: StepRows,
        *,
        dummy: int,
        kv_heads: int,
        has_axes: bool,
    ) -> None:
        """What a step computes, into the parts of an array of zeros; filled up with what is nobody's.

        Args:
            parts: See `cut`.
            rows: No more than this size holds.
            dummy: Row of the slot table that is nobody's.
            kv_heads: Heads of keys.
            has_axes: Whether the model rotates by three positions.
        """
        parts["places"].fill(dummy)
        parts["sample_places"].fill(dummy)
        sampling = self._write_decodes(parts, rows.decodes, has_axes=has_axes)
        sampling += self._write_chunks(parts, rows.chunks, has_axes=has_axes)
        if sampling:
            at, ends, places = np.array([(sample.at, sample.end, sample.row.table_row) for sample in sampling]).T
            parts["ends"][at] = ends
            parts["sample_places"][at] = places
            temperatures = [temperature_of(sample.how.params) for sample in sampling]
            if any(temperatures):  # else noise takes no part
                parts["temperatures"].view(np.float32)[at] = temperatures
                parts["keys"].view(np.int64)[at] = [noise_key(sample.how) for sample in sampling]
        if self.decode:
            lengths = np.ones(self.decode, np.int32)
            lengths[: len(rows.decodes)] += parts["positions"][: len(rows.decodes)]
            parts["part_keys"][:] = part_keys(lengths, kv_heads)
        if self.chunks:
            parts["chunk_queries"][:] = rows.chunk_lengths.query
            parts["chunk_keys"][:] = rows.chunk_lengths.keys
            parts["chunk_places"][: len(rows.chunks)] = [row.table_row for row in rows.chunks]

    def _write_decodes(
        self, parts: Mapping[str, NDArray[np.int32]], rows: Sequence[Row], *, has_axes: bool
    ) -> list[_Sample]:
        count = len(rows)
        if not count:
            return []
        of_rows = [(row.start, row.token_ids[0], row.table_row, row.position_delta * has_axes) for row in rows]
        positions, ids, places, deltas = np.array(of_rows, np.int32).T
        parts["ids"][:count] = ids
        parts["positions"][:count] = positions
        parts["places"][:count] = places
        parts["rotary"].reshape(3, self.tokens)[:, :count] = positions + deltas
        return [_Sample(at, at, row, row.sampling) for at, row in enumerate(rows) if row.sampling is not None]

    def _write_chunks(
        self, parts: Mapping[str, NDArray[np.int32]], rows: Sequence[Row], *, has_axes: bool
    ) -> list[_Sample]:
        sampling = []
        rotary = parts["rotary"].reshape(3, self.tokens)
        first = self.decode
        for index, row in enumerate(rows):
            stop = first + len(row.token_ids)
            parts["ids"][first:stop] = [0] * len(row.token_ids) if row.vision else row.token_ids
            for part in row.vision:
                parts["is_vision"][first + part.start : first + part.start + part.count] = 1
            if row.vision:
                ids = np.array(row.token_ids, np.int64)
                parts["ids"][first:stop] = np.where(parts["is_vision"][first:stop] == 1, 0, ids)
            parts["positions"][first:stop] = np.arange(row.start, row.start + stop - first)
            parts["places"][first:stop] = row.table_row
            rotary[:, first:stop] = (
                parts["positions"][first:stop] + row.position_delta * has_axes
                if row.positions is None or not has_axes
                else row.positions
            )
            if row.sampling is not None:
                sampling.append(_Sample(self.decode + index, stop - 1, row, row.sampling))
            first = stop
        return sampling
