"""Measures plain decoding of a runner, without scheduler or server: for a Python prompt beside a change."""

from __future__ import annotations

import time

import torch

from engine.batch import Row, RowSampling
from engine.runner import TorchRunner
from preprocess.wire import SamplingParams


def decode_steps_per_s(runner: TorchRunner, rows: int, context: int, steps: int, *, seed: int = 0) -> float:
    """Greedy decode steps a second of `rows` sequences that begin with `context` tokens of random text.

    Takes over the runner's slot table and slots: nothing else may use the runner meanwhile. The median step counts.
    """
    length = context + steps + 1
    if rows > runner.max_rows or length > runner.max_positions or rows * length >= runner.num_slots:
        raise ValueError(f"{rows} rows of {length} tokens do not fit the runner")
    slots = torch.arange(1, 1 + rows * length, dtype=torch.int32).view(rows, length)
    runner.slot_table[:rows, :length] = slots.to(runner.slot_table.device)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, runner.vocab_size, (rows, context), generator=generator).tolist()
    params = SamplingParams(max_tokens=steps, temperature=0.0)
    tokens = [runner.step([Row(row, 0, prompt, RowSampling(params, 0))])[0] for row, prompt in enumerate(prompts)]
    times = []
    for step in range(steps):
        batch = [
            Row(row, context + step, [token.token_id], RowSampling(params, step + 1))
            for row, token in enumerate(tokens)
        ]
        started = time.perf_counter()
        tokens = runner.step(batch)
        times.append(time.perf_counter() - started)
    return 1.0 / sorted(times)[len(times) // 2]
