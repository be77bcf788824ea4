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
from engine.speculation.tree import child, lineages
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


def drafted_tokens(
    runner: Runner, params: dict[str, Any], seeds: range, drafts: list[int], parents: list[int]
) -> Counter[int]:
    """Counts of the token at which each seed's text leaves the drafts, or that follows them, drawn in 50 rows at once
    with the drafts in the row.
    """
    counts: Counter[int] = Counter()
    ways = [(), *lineages(drafts, parents)]
    shifted = [len(PROMPT) - 1 + parent for parent in parents]
    for first in range(0, len(seeds), 50):
        rows, own = [], seeds[first : first + 50]
        for row, seed in enumerate(own):
            sampling = SamplingParams(max_tokens=9, seed=seed, **params)
            asked = [RowSampling(sampling, len(way), tuple(PROMPT), way) for way in ways]
            is_chain = parents == list(range(len(parents)))
            ids = [*PROMPT, *drafts]
            rows.append(Row(row, 0, ids, asked[0], drafted=asked[1:], parents=None if is_chain else shifted))
        sampled = iter(runner.step(rows))
        for _ in own:
            tokens = [next(sampled) for _ in range(len(drafts) + 1)]
            counts[standing(drafts, tokens, None, parents)[-1].token_id] += 1
    return counts


def plain_tokens(
    runner: Runner, params: dict[str, Any], seeds: range, drafts: list[int], parents: list[int]
) -> Counter[int]:
    """The same by plain decoding, token by token."""
    counts: Counter[int] = Counter()
    ways = [(), *lineages(drafts, parents)]
    for first in range(0, len(seeds), 50):
        going = dict.fromkeys(seeds[first : first + 50], 0)  # seed → the draft that it has come to
        while going:
            rows = []
            for row, (seed, node) in enumerate(going.items()):
                sampling = SamplingParams(max_tokens=9, seed=seed, **params)
                asked = RowSampling(sampling, len(ways[node]), tuple(PROMPT), ways[node])
                rows.append(Row(row, 0, [*PROMPT, *ways[node]], asked))
            tokens = [token.token_id for token in runner.step(rows)]
            nodes = [child(drafts, parents, node, token) for node, token in zip(going.values(), tokens, strict=True)]
            counts.update(token for token, node in zip(tokens, nodes, strict=True) if node is None)
            going = {seed: node for seed, node in zip(going, nodes, strict=True) if node is not None}
    return counts


@pytest.mark.parametrize("shape", ["chain", "tree"])
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
def test_the_distribution_is_that_of_plain_sampling(runner: Runner, params: dict[str, Any], shape: str) -> None:
    def likeliest(said: list[int], count: int) -> list[int]:
        """So that drafts are right often."""
        asked = RowSampling(SamplingParams(max_tokens=1, temperature=0.0, logprobs=count), 0)
        logprobs = runner.step([Row(0, 0, [*PROMPT, *said], asked)])[0].logprobs
        assert logprobs is not None
        return [token for token, _ in logprobs.top]

    first, second = likeliest([], 2)
    drafts, parents = [first, *likeliest([first], 1)], [0, 1]
    if shape == "tree":
        drafts = [first, *likeliest([first], 2), second, *likeliest([second], 1)]
        parents = [0, 1, 1, 0, 4]
    ours = drafted_tokens(runner, params, range(DRAWS), drafts, parents)
    plain = plain_tokens(runner, params, range(10_000, 10_000 + DRAWS), drafts, parents)
    assert ours.total() == plain.total() == DRAWS
    common = [token for token, count in (ours + plain).items() if count >= 20]
    cells = [(ours[token], plain[token]) for token in common]
    cells.append((DRAWS - sum(a for a, _ in cells), DRAWS - sum(b for _, b in cells)))
    assert len(cells) > 2
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    degrees = len(cells) - 1
    assert chi_square < degrees + CRITICAL * (2 * degrees) ** 0.5, (chi_square, degrees)
