"""Where the graphs of guesses have their inputs, and what a call writes there: host's work, and no tensors.

Called by `engine.gpu.guess_graphs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.batch import RowSampling
from engine.gpu.decode_attention import part_keys
from engine.gpu.filled_rows import FilledSize, FilledTexts
from engine.gpu.sampling import temperature_of
from engine.gpu.step_layout import cut
from engine.sampling import is_filtered, noise_key
from engine.speculation.drafter import DraftRow

MOST_GUESSES: Final = 16


@dataclass(frozen=True, slots=True)
class Texts:
    """How a model that guesses takes texts.

    Attributes:
        lag: See `engine.speculation.drafter.Drafter`.
        dummy: Row of the slot table that is nobody's.
        known_ids: Ids at or above are taken for id 0.
        vocab_size: The target's.
        kv_heads: Of the model's own entries.
        has_axes: Whether it rotates by three positions.
    """

    lag: int
    dummy: int
    known_ids: int
    vocab_size: int
    kv_heads: int
    has_axes: bool


@dataclass(frozen=True, slots=True)
class GuessLayout(FilledSize):
    """One array of int32: what all graphs of as many rows read, then the first one's, whose tokens are those of the
    filled rows.
    """

    def cut(self, flat: Any) -> dict[str, Any]:
        """Names for the parts of an array of `length` int32, numpy or torch."""
        of_rows = ("limits", "table_rows", "last", "offsets", "next_cuts", "temperatures", "top_k", "top_p", "min_p")
        return cut(
            flat,
            turn=1,
            keys=2 * MOST_GUESSES * self.rows,
            **dict.fromkeys(of_rows, self.rows),
            **dict.fromkeys(("ids", "places", "positions", "seen"), self.tokens),
            rotary=3 * self.tokens,
            cuts=self.parts,
        )

    @property
    def length(self) -> int:
        """Of the array."""
        return 8 * self.tokens + (2 * MOST_GUESSES + 9) * self.rows + 64

    def write(
        self,
        parts: Mapping[str, NDArray[np.int32]],
        rows: Sequence[DraftRow],
        lengths: Sequence[int],
        sampling: Sequence[RowSampling],
        texts: Texts,
    ) -> None:
        """What a call computes, into the parts of an array of zeros; filled up with rows that want nothing. `lengths`
        and `sampling`: how many guesses each row wants, and how the first is drawn.
        """
        lag = texts.lag
        for name in ("places", "table_rows"):
            parts[name].fill(texts.dummy)
        parts["positions"].fill(lag)
        ends = np.zeros(self.rows, np.int32)  # entries of each row once all is guessed
        if num_rows := len(rows):
            filled = FilledTexts.of_rows(rows, self.width, has_axes=texts.has_axes)
            at = filled.at
            ids = np.array([token_id for row in rows for token_id in row.token_ids])
            parts["ids"][at] = np.where(ids < texts.known_ids, ids, 0)
            parts["places"][at] = filled.each(filled.table_rows)
            parts["positions"][at] = filled.positions
            rotary = parts["rotary"].reshape(3, self.tokens)
            rotary[:, at] = filled.positions - lag + filled.each(filled.deltas)
            for row, first, count in zip(rows, filled.firsts, filled.counts, strict=True):
                if row.positions is not None and texts.has_axes:
                    rotary[:, first : first + count] = row.positions
            parts["limits"][:num_rows] = lengths
            stops = filled.starts + filled.counts
            parts["table_rows"][:num_rows] = filled.table_rows
            parts["last"][:num_rows] = stops - 1
            parts["offsets"][:num_rows] = filled.deltas - lag
            ends[:num_rows] = stops - lag + np.array(lengths)
            self._write_sampling(parts, lengths, sampling, texts.vocab_size)
        self.let_see(parts["seen"])
        parts["next_cuts"][:] = part_keys(np.maximum(ends, 1), texts.kv_heads)
        parts["cuts"][:] = part_keys(self.lengths(parts["positions"]) - lag, texts.kv_heads)

    def _write_sampling(
        self,
        parts: Mapping[str, NDArray[np.int32]],
        lengths: Sequence[int],
        sampling: Sequence[RowSampling],
        vocab_size: int,
    ) -> None:
        keys = parts["keys"].view(np.int64).reshape(MOST_GUESSES, self.rows)
        for index, (how, length) in enumerate(zip(sampling, lengths, strict=True)):
            params, temperature = how.params, temperature_of(how.params)
            if temperature == 0.0:
                continue
            parts["temperatures"].view(np.float32)[index] = temperature
            if is_filtered(params):
                parts["top_k"][index] = params.top_k if params.top_k > 0 else vocab_size
                parts["top_p"].view(np.float32)[index] = params.top_p
                parts["min_p"].view(np.float32)[index] = params.min_p
            keys[:length, index] = [
                noise_key(dataclasses.replace(how, output_index=how.output_index + later)) for later in range(length)
            ]
