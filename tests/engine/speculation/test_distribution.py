"""What is sampled with drafts is distributed as without: chi-square over many seeds, the seeds of both sides apart.

Token equality for the same seed (`test_same_text`) says more; this holds without trusting that noise and text hang
together as they should.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Row, RowSampling, Runner
from engine.config import EngineConfig
from engine.load import load_runner
from engine.speculation.verify import standing
from preprocess.wire import SamplingParams

PROMPT = [(17 * index) % 400 + 30 for index in range(16)]
DRAWS = 1500
CRITICAL = 3.3
"""Standard deviations of chi-square beyond its mean: one false alarm in some thousand runs, and seeds are fixed."""


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> Runner:
    loaded = load_runner(EngineConfig(str(tiny_model), dtype="float32", threads=1, kv_tokens=2000, max_running=50))
    for row in range(50):
        loaded.slot_table[row, :32] = torch.arange(1 + 32 * row, 33 + 32 * row)
    return loaded


def third_tokens(runner: Runner, params: dict[str, Any], seeds: range, drafts: list[int]) -> Counter[int]:
    """Counts of what follows prompt, `drafts[0]` and `drafts[1]`, drawn in 50 rows at once.

    With the drafts in the row, where they are right; without, step by step, with those that said the same so far.
    """
    counts: Counter[int] = Counter()
    for first in range(0, len(seeds), 50):
        rows, own = [], seeds[first : first + 50]
        for row, seed in enumerate(own):
            sampling = SamplingParams(max_tokens=9, seed=seed, **params)
            asked = [
                RowSampling(sampling, index, tuple(PROMPT), tuple(drafts[:index])) for index in range(len(drafts) + 1)
            ]
            rows.append(Row(row, 0, [*PROMPT, *drafts], asked[0], drafted=asked[1:]))
        sampled = iter(runner.step(rows))
        for _ in own:
            counts[standing(drafts, [next(sampled) for _ in range(len(drafts) + 1)])[-1].token_id] += 1
    return counts


def plain_tokens(runner: Runner, params: dict[str, Any], seeds: range, drafts: list[int]) -> Counter[int]:
    """The same by plain decoding: the token at which each seed's text leaves the drafts, or that follows them."""
    counts: Counter[int] = Counter()
    for first in range(0, len(seeds), 50):
        going = list(seeds[first : first + 50])
        for index in range(len(drafts) + 1):
            said = drafts[:index]
            rows = [
                Row(
                    row,
                    0,
                    [*PROMPT, *said],
                    RowSampling(SamplingParams(max_tokens=9, seed=seed, **params), index, tuple(PROMPT), tuple(said)),
                )
                for row, seed in enumerate(going)
            ]
            tokens = [token.token_id for token in runner.step(rows)] if rows else []
            goes_on = [index < len(drafts) and token == drafts[index] for token in tokens]
            counts.update(token for token, on in zip(tokens, goes_on, strict=True) if not on)
            going = [seed for seed, on in zip(going, goes_on, strict=True) if on]
    return counts


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.3},
        {"temperature": 0.5, "top_k": 8},
        {"temperature": 0.4, "top_p": 0.6},
        {"temperature": 0.3, "min_p": 0.2},
        {"temperature": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_plain_sampling(runner: Runner, params: dict[str, Any]) -> None:
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    drafts: list[int] = []
    for _ in range(2):  # the likeliest, so that drafts are right often
        drafts.append(runner.step([Row(0, 0, [*PROMPT, *drafts], RowSampling(greedy, 0))])[0].token_id)
    ours = third_tokens(runner, params, range(DRAWS), drafts)
    plain = plain_tokens(runner, params, range(10_000, 10_000 + DRAWS), drafts)
    assert ours.total() == plain.total() == DRAWS
    common = [token for token, count in (ours + plain).items() if count >= 20]
    cells = [(ours[token], plain[token]) for token in common]
    cells.append((DRAWS - sum(a for a, _ in cells), DRAWS - sum(b for _, b in cells)))
    assert len(cells) > 2
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    degrees = len(cells) - 1
    assert chi_square < degrees + CRITICAL * (2 * degrees) ** 0.5, (chi_square, degrees)
