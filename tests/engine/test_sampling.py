"""Sampling against a naive reference, transformers' own processors, and the distribution it claims to draw from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import RowSampling
from engine.sampling import gumbel_noise, sample
from preprocess.wire import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def _row(index: int = 0, **params: Any) -> RowSampling:
    lists = {name: params.pop(name) for name in ("prompt_ids", "output_ids", "banned_ids") if name in params}
    return RowSampling(SamplingParams(max_tokens=100, **params), index, **lists)


def _ids(logits: torch.Tensor, rows: list[RowSampling]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def _logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _allowed(logits: np.ndarray[Any, Any], params: SamplingParams) -> set[int]:
    """What top-k, top-p and min-p leave, one token after the other, in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        kth = scaled[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if scaled[token] >= kth]
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total = sum(weights.values())
    before, kept = 0.0, []
    for token in order:
        # top_p 1 is no filter: the sum may round to 1 before the last token.
        if params.top_p < 1 and before / total >= params.top_p and weights[token] < weights[kept[-1]]:
            break
        kept.append(token)
        before += weights[token]
    return {token for token in kept if weights[token] >= params.min_p * weights[kept[0]]}


def _drawable(logits: torch.Tensor, params: dict[str, Any], draws: int = 400) -> set[int]:
    """Every id that some of `draws` seeds gives."""
    rows = [_row(temperature=params["temperature"], seed=seed, **_without(params)) for seed in range(draws)]
    return set(_ids(logits.expand(draws, -1), rows))


def _without(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "temperature"}


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 5, 12, 50]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    }
)


@settings(max_examples=80, deadline=None)
@given(filters, st.lists(st.integers(-12, 12), min_size=1, max_size=12))
def test_filters_leave_what_the_naive_reference_leaves(params: dict[str, Any], quarters: list[int]) -> None:
    """Logits in steps of a quarter, so that ties are common; 400 draws show every id that is not rare."""
    logits = torch.tensor(quarters, dtype=torch.float32) / 4
    allowed = _allowed(logits.numpy(), SamplingParams(max_tokens=1, **params))
    drawn = _drawable(logits, params)
    assert drawn <= allowed
    likely = (logits / params["temperature"]).softmax(-1)
    share = likely / likely[list(allowed)].sum()
    assert drawn >= {token for token in allowed if share[token] > 0.05}  # 400 draws miss one of these once in 10^9


@settings(max_examples=40, deadline=None)
@given(filters, st.integers(0, 1000))
def test_filters_equal_transformers(params: dict[str, Any], seed: int) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = _logits(1, 300, seed)
    scaled = logits.double() / params["temperature"]  # in float32 its sums round differently at the border
    if params["top_k"]:
        scaled = TopKLogitsWarper(params["top_k"])(None, scaled)
    if params["top_p"] < 1:
        scaled = TopPLogitsWarper(params["top_p"])(None, scaled)
    if params["min_p"]:
        scaled = MinPLogitsWarper(params["min_p"])(None, scaled)
    allowed = set(torch.nonzero(scaled[0] > -torch.inf).flatten().tolist())
    assert _allowed(logits[0].numpy(), SamplingParams(max_tokens=1, **params)) == allowed
    assert _drawable(logits[0], params, 100) <= allowed


def test_filters_beyond_the_sorted_candidates() -> None:
    """Flat logits over a large vocabulary: top-p reaches far beyond the ids that are sorted at first."""
    logits = _logits(1, 20_000, scale=0.01)[0]
    order = logits.argsort(descending=True)
    for params, count in ((_row(top_p=0.5), 10_000), (_row(top_k=5_000), 5_000)):
        rows = [RowSampling(params.params, index) for index in range(400)]
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[_ids(logits.expand(400, -1), rows)]
        assert count * 0.95 < ranks.max() < count * 1.02


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
    ],
)
def test_draws_follow_the_softmax_of_what_is_left(params: dict[str, Any]) -> None:
    """Chi-square over 20,000 counters, half of them seeds and half output indices."""
    logits = _logits(1, 10, seed=3, scale=1.2)[0]
    settings_of_row = SamplingParams(max_tokens=1, **params)
    allowed = sorted(_allowed(logits.numpy(), settings_of_row))
    expected = (logits / settings_of_row.temperature)[allowed].softmax(-1) * 20_000
    rows = [_row(index=7, seed=seed, **params) for seed in range(10_000)]
    rows += [_row(index=index, seed=7, **params) for index in range(10_000)]
    counts = torch.bincount(torch.tensor(_ids(logits.expand(len(rows), -1), rows)), minlength=10)
    assert counts.sum() == counts[allowed].sum()
    chi_square = float(((counts[allowed] - expected) ** 2 / expected).sum())
    freedom = len(allowed) - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)  # fixed counters: it passes for ever or never


def test_noise_is_gumbel_and_counters_are_independent() -> None:
    noise = gumbel_noise([(seed, index) for seed in range(40) for index in range(10)], torch.arange(2000))
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    # The tails: P(noise > x) = 1 - exp(-exp(-x)).
    for x in (-1.5, 3.0, 6.0, 9.0):
        expected = -math.expm1(-math.exp(-x)) * noise.numel()
        assert abs((noise > x).sum().item() - expected) < 5 * math.sqrt(expected)
    assert torch.corrcoef(noise).triu(1).abs().max() < 0.12  # 80,000 pairs of rows, sigma 0.022
    assert torch.corrcoef(noise.T[:400]).triu(1).abs().max() < 0.28  # pairs of token ids over 400 rows, sigma 0.05


def test_noise_is_stable_across_releases() -> None:
    """A seed that a user wrote down must give the same text tomorrow."""
    noise = gumbel_noise([(0, 0), (2**63 - 1, 41)], torch.arange(3))
    expected = torch.tensor([[0.42679, -0.32591, 0.76391], [1.45112, -0.95320, 2.09710]])
    torch.testing.assert_close(noise, expected, atol=1e-4, rtol=0)


row_settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 3, 40]),
        "top_p": st.sampled_from([1.0, 1.0, 0.4, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.4]),
        "logit_bias": st.dictionaries(st.integers(0, 199), st.sampled_from([-100.0, 3.5, 100.0]), max_size=2),
        "seed": st.integers(0, 2**63 - 1),
        "logprobs": st.sampled_from([None, 0, 3]),
        "index": st.integers(0, 5),
        "prompt_ids": st.lists(st.integers(0, 199), max_size=4),
        "output_ids": st.lists(st.integers(0, 199), max_size=4),
        "banned_ids": st.lists(st.integers(0, 199), max_size=2),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row_settings, min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 100))
def test_a_row_does_not_depend_on_its_batch(params: list[dict[str, Any]], shuffle: Any, seed: int) -> None:
    rows = [_row(**row) for row in params]
    logits = _logits(len(rows), 200, seed)
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    assert sample(logits[order], [rows[index] for index in order]) == [alone[index] for index in order]


@settings(max_examples=60, deadline=None)
@given(row_settings, st.integers(0, 100))
def test_penalties_bias_and_bans_equal_the_naive_reference(params: dict[str, Any], seed: int) -> None:
    logits = _logits(1, 200, seed)
    scores = logits[0].double().numpy().copy()
    for token in {*params["prompt_ids"], *params["output_ids"]}:
        penalty = params["repetition_penalty"]
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in params["output_ids"]:
        scores[token] -= params["frequency_penalty"]
    for token in set(params["output_ids"]):
        scores[token] -= params["presence_penalty"]
    for token, bias in params["logit_bias"].items():
        scores[token] += bias
    scores[params["banned_ids"]] = -np.inf
    best = _ids(logits, [_row(**{**params, "temperature": 0.0})])[0]
    assert scores[best] >= scores.max() - 1e-5
    # Bans hold where noise is added, too.
    drawn = _ids(logits, [_row(**{**params, "temperature": 1.7})])[0]
    assert drawn not in params["banned_ids"]


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = _logits(1, 50)
    seen = [3, 3, 17, 40, 2]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([seen]), logits.clone()).argmax(-1).tolist()
    row = _row(temperature=0.0, repetition_penalty=1.8, prompt_ids=seen[:2], output_ids=seen[2:])
    assert _ids(logits, [row]) == expected


def test_logprobs_are_the_models_own_whatever_the_row_asks_for() -> None:
    logits = _logits(1, 60)
    expected = logits[0].log_softmax(-1)
    row = _row(
        temperature=0.6, top_k=5, seed=4, logprobs=4, logit_bias={11: 100.0}, banned_ids=[int(expected.argmax())]
    )
    token = sample(logits, [row])[0]
    assert token.token_id == 11
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[11]))
    assert [token_id for token_id, _ in token.logprobs.top] == expected.argsort(descending=True)[:4].tolist()
    assert [value for _, value in token.logprobs.top] == pytest.approx(
        expected.sort(descending=True).values[:4].tolist()
    )
    assert sample(logits, [_row(temperature=0.0, logprobs=0)])[0].logprobs.top == []  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_logits_that_are_no_numbers_give_an_id_of_the_vocabulary(bad: float, share: float) -> None:
    logits = _logits(4, 64)
    logits[torch.rand(4, 64, generator=torch.Generator().manual_seed(1)) < share] = bad
    rows = [
        _row(temperature=0.0, logprobs=2),
        _row(temperature=1e-4, top_p=0.3, logprobs=2),
        _row(temperature=2.0, top_k=3, min_p=0.2, repetition_penalty=1.5, output_ids=[1, 2], banned_ids=[0]),
        _row(temperature=1.0),
    ]
    tokens = sample(logits, rows)
    for token in tokens:
        assert 0 <= token.token_id < 64
        if token.logprobs is not None:
            assert all(math.isfinite(value) for value in (token.logprobs.logprob, *dict(token.logprobs.top).values()))
    if math.isnan(bad) and share < 1:
        assert all(logits[index, token.token_id].isfinite() for index, token in enumerate(tokens))


def test_everything_banned_still_gives_an_id() -> None:
    """Even ids that are in no vocabulary, as the end ids of some folders."""
    rows = [_row(temperature=temperature, banned_ids=[*range(8), 50_000]) for temperature in (0.0, 1.0)]
    assert all(0 <= token_id < 8 for token_id in _ids(_logits(2, 8), rows))


def test_seed_and_output_index_decide() -> None:
    logits = torch.zeros(1, 5000)
    draws = {_ids(logits, [_row(index=index, seed=seed)])[0] for seed in range(10) for index in range(10)}
    assert len(draws) > 95
    assert _ids(logits, [_row(index=3, seed=8)]) == _ids(logits, [_row(index=3, seed=8)])


def test_logits_are_not_changed() -> None:
    logits = _logits(2, 30)
    before = logits.clone()
    sample(logits, [_row(temperature=0.0, logit_bias={1: 5.0}), _row(top_p=0.5)])
    assert torch.equal(logits, before)


class _Allowed:
    """A mask that is known at once."""

    def __init__(self, ids: list[int], num_words: int) -> None:
        self._bits = np.zeros(num_words * 32, np.uint8)
        self._bits[ids] = 1

    def words(self) -> np.ndarray[Any, Any]:
        return np.packbits(self._bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3, "top_k": 90}]
)
def test_masks_hold_in_mixed_batches_and_change_no_other_row(params: dict[str, Any]) -> None:
    logits = _logits(40, 100)
    free = [_row(index, **params) for index in range(40)]
    expected = _ids(logits, free)
    allowed = {index: [(index * 7) % 96, (index * 31 + 5) % 96, 64] for index in range(0, 40, 3)}
    rows = [
        replace(row, allowed=_Allowed(allowed[index], 3)) if index in allowed else row for index, row in enumerate(free)
    ]
    tokens = _ids(logits, rows)
    for index, token in enumerate(tokens):
        if index in allowed:
            alone = logits[index].clone()
            alone[[other for other in range(100) if other not in allowed[index]]] = -torch.inf
            assert token in allowed[index]
            assert token == _ids(alone.unsqueeze(0), [replace(rows[index], allowed=None)])[0]
        else:
            assert token == expected[index]


def test_log_probabilities_are_the_models_own_under_a_mask() -> None:
    logits = _logits(1, 100)
    token = sample(logits, [replace(_row(logprobs=2), allowed=_Allowed([7], 4))])[0]
    assert token.token_id == 7
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 7]))
