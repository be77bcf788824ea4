"""Measures at start how long parts of a step take on a loaded runner, so that the first steps are planned by figures.

Called once by the engine process, after the runner is warm and before anybody holds a slot: rows of the fresh slot
table point at the dummy slot. What is larger than was measured follows from straight lines until it comes. Where steps
overlap it measures as the engine does, from one result to the next while another step is always on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from engine.batch import OverlappedRunner, Row, RowSampling, Runner, is_awaited
from engine.step_costs import StepCosts
from preprocess.wire import SamplingParams

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
PROMPTS: Final = (16, 64, 256, 1024)
"""Tokens; fewer take their part of the first."""
BESIDE: Final = 8
"""Rows that decode while prompts are measured."""
PROMPTS_AHEAD: Final = (64, 128, 192, 256, 384, 512, 1024)
BESIDE_AHEAD: Final = 32
"""The same for a GPU, where these take milliseconds; reading weights hides the first tokens, and then no more."""
READING: Final = 64
READING_AHEAD: Final = 256
"""Tokens of a chunk that is measured behind `BEHIND` others, too; the latter for a GPU."""
BEHIND: Final = 1024
CONTEXT: Final = 64
"""Tokens before those that decode."""
REPEATS: Final = 3
LIMIT_S: Final = 1.5
"""After so long only the least is measured, once: a slow model is not to start much later for it."""


def measure(
    runner: Runner, max_batched_tokens: int, clock: Callable[[], float] = time.perf_counter, limit_s: float = LIMIT_S
) -> StepCosts:
    """The costs of decoding, of prompts up to a step's tokens, and of a picture of the encoder's own size."""
    return _Measurement(runner, clock, limit_s).costs(max_batched_tokens)


class _Measurement:
    def __init__(self, runner: Runner, clock: Callable[[], float], limit_s: float) -> None:
        self._runner = runner
        self._clock = clock
        self._until_s = clock() + limit_s
        self._sampling = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
        self._context = min(CONTEXT, runner.max_positions - 1)
        self._ahead = runner if isinstance(runner, OverlappedRunner) else None

    def costs(self, max_batched_tokens: int) -> StepCosts:
        runner, costs = self._runner, StepCosts(self._runner.added_s)
        costs.decode.add(1, self._step_s(1))
        self._picture(costs)
        sizes, most_beside = (PROMPTS_AHEAD, BESIDE_AHEAD) if self._ahead is not None else (PROMPTS, BESIDE)
        beside = min(most_beside, runner.max_rows - 1)
        for rows in sorted({*ROWS[1:], beside} - {0, 1}):
            if rows <= runner.max_rows and (self._has_time or rows == beside):
                costs.decode.add(rows, self._step_s(rows))
        steps_s: dict[int, float] = {}
        for tokens in sizes:
            is_first = tokens == sizes[0]
            if beside and tokens <= min(max_batched_tokens, runner.max_positions) and (self._has_time or is_first):
                steps_s[tokens] = self._step_s(beside, tokens)
                costs.add_prompt(beside, tokens, steps_s[tokens] - costs.decode.at(beside))
        self._reading(costs, beside, steps_s)
        return costs

    def _reading(self, costs: StepCosts, beside: int, steps_s: Mapping[int, float]) -> None:
        """What it adds to a chunk's step that others are behind it. Those are of slots of their own, as a text's are:
        one that all share would be read from a cache.
        """
        runner, tokens = self._runner, READING_AHEAD if self._ahead is not None else READING
        has_place = runner.max_positions >= BEHIND + tokens and runner.num_slots > BEHIND
        if not (steps_s and has_place):
            return
        if tokens not in steps_s or not self._has_time:
            costs.add_reading(tokens, BEHIND, 0.0)
            return
        row = runner.slot_table[beside]
        row[:BEHIND] = torch.arange(1, BEHIND + 1, dtype=row.dtype, device=row.device)
        added_s = self._step_s(beside, tokens, behind=BEHIND) - steps_s[tokens]
        row[:BEHIND] = 0
        costs.add_reading(tokens, BEHIND, added_s)

    def _picture(self, costs: StepCosts) -> None:
        side = self._runner.picture_side
        shape = (1, side, side, 3)
        num_slices = self._runner.num_slices(shape)
        num_tokens = len(self._runner.encode([torch.zeros(shape, dtype=torch.uint8)])[0])
        elapsed_s = self._timed(lambda: self._encode(shape, num_slices))
        if not is_awaited(self._runner):
            elapsed_s -= costs.decode.at(1)
        costs.slice.add(num_tokens / num_slices, elapsed_s / num_slices)

    def _encode(self, shape: tuple[int, ...], num_slices: int) -> None:
        pixels = torch.zeros(shape, dtype=torch.uint8)
        if num_slices > 1:
            self._runner.begin(pixels).run(num_slices)
        else:
            self._runner.encode([pixels])
        if not is_awaited(self._runner):
            self._runner.step(self._batch(1))  # waits for the device

    def _batch(self, rows: int, prompt_tokens: int = 0, behind: int = 0) -> list[Row]:
        """Of tokens that differ: each chooses experts of its own."""
        ids = [token % self._runner.vocab_size for token in range(rows + prompt_tokens)]
        batch = [Row(row, self._context, [ids[row]], self._sampling) for row in range(rows)]
        if prompt_tokens:
            batch.append(Row(rows, behind, ids[rows:], None))
        return batch

    def _step_s(self, rows: int, prompt_tokens: int = 0, behind: int = 0) -> float:
        batch = self._batch(rows, prompt_tokens, behind)
        if self._ahead is None:
            return self._timed(lambda: self._runner.step(batch))
        ahead = self._ahead
        flights = [ahead.launch(batch)]

        def next_result() -> None:
            flights.append(ahead.launch(batch))
            flights.pop(0).result()

        next_result()
        elapsed_s = self._timed(next_result)
        flights[0].result()
        return elapsed_s

    def _timed(self, work: Callable[[], object]) -> float:
        """The median of some runs, or the first that ends too late for another."""
        times: list[float] = []
        while len(times) < REPEATS and (not times or self._has_time):
            start_s = self._clock()
            work()
            times.append(self._clock() - start_s)
        return sorted(times)[len(times) // 2]

    @property
    def _has_time(self) -> bool:
        return self._clock() < self._until_s
