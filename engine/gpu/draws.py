"""Draws that no graph makes: of steps that run kernel by kernel, and again where what is asked for is not plain.

Called by `engine.gpu.runner`; what a draw is stands in `engine.gpu.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Row, RowSampling, SampledToken
from engine.gpu.sampling import draw, draw_bounded, is_bounded, is_plain, temperature_of
from engine.sampling import noise_key, sample, ways


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step samples, in order: in which place of the slot table the token is the last one drawn, how it is drawn,
    which sample it is.
    """

    places: list[int]
    sampling: list[RowSampling]
    picks: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row], nowhere: int, picks: list[int] | None = None) -> Wanted:
        """`picks` None: samples are in the order of the rows. Which of a row's tokens is its last is not known while it
        has drafts: those go to the place `nowhere`.
        """
        places, sampling = [], []
        for row in rows:
            if row.sampling is not None:
                places += [nowhere if row.drafted else row.table_row] * (1 + len(row.drafted))
                sampling += ways(row)
        return cls(places, sampling, list(range(len(places))) if picks is None else picks)


class Draws:
    """On the device of `future`, int64 (rows + 1,): what was drawn last, by place in the slot table."""

    def __init__(self, future: torch.Tensor) -> None:
        self._future = future
        self._device = future.device

    def draw(self, logits: torch.Tensor, wanted: Wanted) -> torch.Tensor:
        """Greedy and plain draws of all rows, int64 (rows,)."""
        count = len(wanted.places)
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        if count:
            staged = np.empty((4, count), np.int32)
            staged[:2] = (
                np.array([noise_key(row) for row in wanted.sampling], np.int64).view(np.int32).reshape(2, count)
            )
            staged[2] = np.array([temperature_of(row.params) for row in wanted.sampling], np.float32).view(np.int32)
            staged[3] = wanted.places
            given = torch.from_numpy(staged).pin_memory().to(self._device, non_blocking=True)
            keys = given[:2].view(-1).view(torch.int64)
            draw(logits, given[2].view(torch.float32), keys, tokens, self._future, given[3])
        return tokens

    def redraw(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Wanted) -> dict[int, SampledToken]:
        """Draws again for rows whose draw is not plain, into `tokens` and the future; those that only the host can do
        are waited for and returned.
        """
        odd: list[int] = []
        known_way, is_odd = None, False
        for index, way in enumerate(wanted.sampling):
            if way is not known_way:  # tokens of a row may share one
                known_way, is_odd = way, not is_plain(way)
            if is_odd:
                odd.append(index)
        if not odd:
            return {}
        bounded = [index for index in odd if is_bounded(wanted.sampling[index])]
        hard = [index for index in odd if not is_bounded(wanted.sampling[index])]
        known: dict[int, SampledToken] = {}
        if bounded:
            drawn = draw_bounded(logits[self._samples(bounded, wanted)], [wanted.sampling[index] for index in bounded])
            self._replace(tokens, bounded, wanted, drawn)
        if hard:
            sampled = sample(logits[self._samples(hard, wanted)], [wanted.sampling[index] for index in hard])
            known = dict(zip(hard, sampled, strict=True))
            self._replace(tokens, hard, wanted, on_device([token.token_id for token in sampled], self._device))
        return known

    def _replace(self, tokens: torch.Tensor, indices: list[int], wanted: Wanted, drawn: torch.Tensor) -> None:
        tokens[self._samples(indices, wanted)] = drawn
        self._future[on_device([wanted.places[index] for index in indices], self._device)] = drawn

    def _samples(self, indices: Sequence[int], wanted: Wanted) -> torch.Tensor:
        return on_device([wanted.picks[index] for index in indices], self._device)


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
