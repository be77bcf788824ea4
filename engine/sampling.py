"""From logits to tokens, all rows of a step at once. Every row comes out the same alone, in any batch and in any order.

For one row, in this order (transformers' and OpenAI's):

1. what is no number counts as the lowest logit, infinities as very large ones;
2. repetition penalty over prompt and output (positive logits divided, negative multiplied, once an id);
3. minus frequency penalty × count in the output, minus presence penalty if in the output at all;
4. plus logit bias; banned ids to -inf;
5. temperature 0: the largest logit. Otherwise divided by the temperature, then
   * top-k: ids whose logit is at least the k-th largest;
   * top-p: of what is left, renormalised, the fewest most likely ids that together reach p. An id is kept while the ids
     before it have less than p, so the first always is; ids as likely as the last one kept are kept too;
   * min-p: of what is left, ids at least `min_p` times as likely as the most likely one;
   then the largest of logit + Gumbel noise (the Gumbel-max trick), which draws from their softmax.

Noise is a counter, not a stream: a hash of (seed, output index, token id). Nothing has to be kept between steps.
Log probabilities are those of step 1: the model's own, before penalties, bias and temperature, as vLLM reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from engine.batch import RowSampling, SampledToken
from preprocess.wire import SamplingParams, TokenLogprobs

COLDEST: Final = 1e-5
"""Temperatures below are greedy: dividing by them would say the same in infinities."""

LARGEST: Final = 1e30
"""Bound of logits: leaves room to divide by the coldest temperature in float32."""

CANDIDATES: Final = 1024
"""Most likely ids that are sorted at first; all are where these do not reach top-p or top-k."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[SampledToken]:
    """Draws a token a row.

    Args:
        logits: float32 (rows, vocab); not changed.
        rows: How to sample each.
    """
    raw = logits.nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST).clamp_(-LARGEST, LARGEST)
    scores = raw
    changed = [index for index, row in enumerate(rows) if _is_changed(row)]
    if changed:
        scores = raw.clone()
        for index in changed:
            _change(scores[index], rows[index])
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= COLDEST]
    if len(drawn) < len(rows):
        tokens = scores.argmax(-1)
        if drawn:
            tokens[torch.tensor(drawn, device=tokens.device)] = _draw(scores[drawn], [rows[i] for i in drawn])
    else:
        tokens = _draw(scores, rows)
    token_ids: list[int] = tokens.tolist()
    return [
        SampledToken(
            token_id, None if row.params.logprobs is None else _logprobs(raw[index], token_id, row.params.logprobs)
        )
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
    ]


def _is_changed(row: RowSampling) -> bool:
    """Whether anything touches the row's logits before temperature."""
    params = row.params
    return bool(
        row.banned_ids
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _change(scores: torch.Tensor, row: RowSampling) -> None:
    """Steps 2 to 4 on one row's logits (vocab,), in place."""
    params = row.params
    if params.repetition_penalty != 1.0 and (row.prompt_ids or row.output_ids):
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_ids:
        counts = torch.bincount(torch.tensor(row.output_ids, device=scores.device), minlength=len(scores)).float()
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device)
    if row.banned_ids:
        scores[torch.tensor(row.banned_ids, device=scores.device)] = -torch.inf


def _draw(scores: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Step 5 with noise: scores (rows, vocab) → int64 (rows,)."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=scores.device)
    scaled = scores / temperatures.unsqueeze(1)
    filtered = [index for index, row in enumerate(rows) if _is_filtered(row.params)]
    if filtered:
        chosen = torch.tensor(filtered, device=scores.device)
        part = scaled[chosen]
        lowest = _lowest_allowed(part, [rows[index].params for index in filtered])
        scaled[chosen] = part.masked_fill_(part < lowest, -torch.inf)
    scaled += gumbel_noise([(row.params.seed, row.output_index) for row in rows], scores.shape[1], scores.device)
    return scaled.argmax(-1)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _lowest_allowed(
    scaled: torch.Tensor, params: Sequence[SamplingParams], candidates: int = CANDIDATES
) -> torch.Tensor:
    """The smallest logit (rows, 1) that top-k, top-p and min-p leave, from logits (rows, vocab) after temperature."""
    device, vocab = scaled.device, scaled.shape[1]
    top_k = torch.tensor([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], device=device).unsqueeze(1)
    num_sorted = min(candidates, vocab)
    best = scaled.topk(num_sorted, dim=-1).values  # (rows, sorted), falling
    # Top-k beyond what is sorted: those rows wait for the full sort below.
    kth = best.gather(1, (top_k - 1).clamp(max=num_sorted - 1))
    limited = top_k < vocab
    lowest = torch.where(limited, kth, -torch.inf)
    unsure = bool((limited & (top_k > num_sorted)).any())
    if bool((top_p < 1.0).any()):
        total = scaled.masked_fill(scaled < lowest, -torch.inf).logsumexp(-1, keepdim=True)
        likely = (best.masked_fill(best < lowest, -torch.inf) - total).exp()
        before = likely.cumsum(-1) - likely  # probability of all that are more likely
        kept = ((before < top_p) & (likely > 0)).sum(-1, keepdim=True).clamp(min=1)
        lowest = torch.where(top_p < 1.0, torch.maximum(lowest, best.gather(1, kept - 1)), lowest)
        unsure = unsure or bool(((top_p < 1.0) & (kept == num_sorted)).any())
    if unsure and num_sorted < vocab:
        return _lowest_allowed(scaled, params, vocab)
    return torch.maximum(lowest, best[:, :1] + min_p.log())


def gumbel_noise(counters: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> torch.Tensor:
    """float32 (rows, vocab) standard Gumbel noise for rows of (seed, output index).

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014) over key + id × golden ratio; 40 bits become a uniform
    number between 0 and 1, both excluded.
    -log of an exponential variable is Gumbel; taking log1p keeps its upper tail, which decides, at full precision.
    """
    keys = torch.tensor([_signed(_key(seed, index)) for seed, index in counters], device=device).unsqueeze(1)
    hashed = keys + torch.arange(vocab, device=device) * _signed(_GOLDEN)  # int64 arithmetic wraps around
    hashed = (hashed ^ _shift(hashed, 30)) * _signed(_MIX_1)
    hashed = (hashed ^ _shift(hashed, 27)) * _signed(_MIX_2)
    bits = _shift(hashed ^ _shift(hashed, 31), 24)  # 40 of them
    uniform = ((bits.float() + 0.5) * 2.0**-40).clamp_(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 shifted right, filled with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _key(seed: int, output_index: int) -> int:
    """64 bits that mix seed and output index."""
    key = (seed * _GOLDEN + output_index * _MIX_2 + 1) & _MASK
    key = ((key ^ (key >> 30)) * _MIX_1) & _MASK
    key = ((key ^ (key >> 27)) * _MIX_2) & _MASK
    return key ^ (key >> 31)


def _signed(value: int) -> int:
    """64 bits as int64 reads them."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _logprobs(raw: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """The sampled token's log probability and the `count` best ones, from one row's logits (vocab,)."""
    logprobs = raw.log_softmax(-1)
    top: list[tuple[int, float]] = []
    if count:
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
