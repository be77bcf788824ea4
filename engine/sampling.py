"""From logits to tokens, all rows of a step at once. Every row comes out the same alone, in any batch and in any order.

For one row, in this order (transformers' and OpenAI's):

1. what is no number counts as the lowest logit, infinities as very large ones;
2. repetition penalty over prompt and output (positive logits divided, negative multiplied, once an id);
3. minus frequency penalty × count in the output, minus presence penalty if in the output at all;
4. plus logit bias; banned ids, and what the row's grammar does not allow, to -inf;
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

import numpy as np
import torch

from engine.batch import DraftedAlike, Row, RowSampling, SampledToken
from preprocess.wire import SamplingParams, TokenLogprobs

COLDEST: Final = 1e-5
"""Temperatures below are greedy: dividing by them would say the same in infinities."""

LARGEST: Final = 1e30
"""Bound of logits: leaves room to divide by the coldest temperature in float32."""

CANDIDATES: Final = 64
"""Most likely ids that filters look at first; more where these are not enough."""

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
    raw = finite(logits)
    scores = raw
    changed = [index for index, row in enumerate(rows) if is_changed(row)]
    masked = [index for index, row in enumerate(rows) if row.allowed is not None]
    if changed or masked:
        scores = raw.clone()
        for index in changed:
            _change(scores[index], rows[index])
        if masked:
            forbid(scores, rows, masked)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature >= COLDEST]
    if len(drawn) < len(rows):
        tokens = scores.max(-1).indices  # several times as fast as argmax
        if drawn:
            tokens[torch.tensor(drawn, device=tokens.device)] = _draw(scores[drawn], [rows[i] for i in drawn])
    else:
        tokens = _draw(scores, rows)
    token_ids: list[int] = tokens.tolist()
    return [
        SampledToken(token_id, None if row.params.logprobs is None else _logprobs(raw[index], token_id, row.params))
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
    ]


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Step 1: logits with numbers only, a copy."""
    return logits.nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST).clamp_(-LARGEST, LARGEST)


def is_changed(row: RowSampling) -> bool:
    """Whether anything touches the row's logits before temperature."""
    return bool(row.banned_ids) or _changes(row.params)


def _changes(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias or params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )


def plainly_greedy(rows: Sequence[RowSampling]) -> list[int]:
    """Which rows want the largest of their finite logits, or of those that a grammar allows, and nothing else."""
    greedy: list[int] = []
    params, is_plain = None, False
    for index, row in enumerate(rows):
        if row.params is not params:  # a row and its drafts share them
            params = row.params
            is_plain = params.temperature < COLDEST and params.logprobs is None and not _changes(params)
        if is_plain and not row.banned_ids:
            greedy.append(index)
    return greedy


def ways(row: Row) -> list[RowSampling]:
    """How each token is drawn that a row asks for. Where each is the largest of its logits, one way stands for all: a
    draft's differs from the row's own in noise alone, which takes no part.
    """
    how = row.sampling
    if how is None:
        return []
    if isinstance(row.drafted, DraftedAlike) and how.allowed is None and is_plainly_greedy(how):
        return [how] * (1 + len(row.drafted))
    return [how, *row.drafted]


def is_plainly_greedy(row: RowSampling) -> bool:
    """Whether a row, and with it every draft behind it, wants that: bans end with the first tokens."""
    return not row.banned_ids and len(plainly_greedy((row,))) == 1


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
    banned = [token_id for token_id in row.banned_ids if token_id < len(scores)]  # a folder may name ends it cannot say
    if banned:
        scores[torch.tensor(banned, device=scores.device)] = -torch.inf


def forbid(scores: torch.Tensor, rows: Sequence[RowSampling], masked: Sequence[int]) -> None:
    """What grammars do not allow, to -inf in scores (rows, vocab), in place and for all `masked` rows at once."""
    words = np.stack([allowed.words() for index in masked if (allowed := rows[index].allowed) is not None])
    vocab = scores.shape[1]
    if scores.device.type == "cpu":  # numpy unpacks bits several times as fast as torch's integers do
        bits = torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little"))
    else:
        packed = torch.from_numpy(words).to(scores.device, non_blocking=True)
        shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
        bits = (packed.unsqueeze(2) >> shifts).bitwise_and_(1).flatten(1)[:, :vocab]  # (masked, at most vocab)
        bits = torch.nn.functional.pad(bits, (0, vocab - bits.shape[1]))
    forbidden = bits == 0  # (masked, vocab)
    if len(masked) == len(scores):
        scores.masked_fill_(forbidden, -torch.inf)
    else:
        for index, row in zip(masked, forbidden, strict=True):
            scores[index].masked_fill_(row, -torch.inf)


def _draw(scores: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Step 5 with noise: scores (rows, vocab) → int64 (rows,)."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=scores.device)
    scaled = scores / temperatures.unsqueeze(1)
    filtered = [index for index, row in enumerate(rows) if is_filtered(row.params)]
    if len(filtered) == len(rows):
        return _draw_filtered(scaled, rows)
    noise = gumbel_noise(_counters(rows), torch.arange(scaled.shape[1], device=scaled.device))
    tokens = noise.add_(scaled).max(-1).indices
    if filtered:
        chosen = torch.tensor(filtered, device=scores.device)
        tokens[chosen] = _draw_filtered(scaled[chosen], [rows[index] for index in filtered])
    return tokens


def is_filtered(params: SamplingParams) -> bool:
    """Whether draws leave ids out."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw_filtered(scaled: torch.Tensor, rows: Sequence[RowSampling], candidates: int = CANDIDATES) -> torch.Tensor:
    """Tokens (rows,) drawn among what top-k, top-p and min-p leave of logits (rows, vocab) after temperature.

    Only the `candidates` most likely ids are looked at; rows whose last candidate is still allowed are done again with
    more, so that a row is treated alike whatever its neighbours need.
    """
    device, vocab = scaled.device, scaled.shape[1]
    params = [row.params for row in rows]
    top_k = torch.tensor([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], device=device).unsqueeze(1)
    keys = torch.tensor([noise_key(row) for row in rows], device=device)
    tokens, unsure = draw_among(scaled, keys, top_k, top_p, min_p, candidates)
    if candidates < vocab:
        left = unsure.nonzero().flatten()
        if len(left):
            again = [rows[index] for index in left.tolist()]
            tokens[left] = _draw_filtered(scaled[left], again, 16 * candidates)
    return tokens


def draw_among(
    scaled: torch.Tensor,
    keys: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_draw_filtered` of logits (rows, vocab) with settings (rows, 1) and noise keys (rows,), without asking the host.

    Returns:
        Tokens (rows,), and bool (rows,): ids beyond the `candidates` most likely ones would have been allowed too.
    """
    vocab = scaled.shape[1]
    num = min(candidates, vocab)
    best, ids = scaled.topk(num, dim=-1)  # (rows, num), falling
    limited = top_k < vocab
    kth = best.gather(1, (top_k - 1).clamp(max=num - 1))
    lowest = torch.where(limited, kth, -torch.inf)  # (rows, 1): the smallest logit that is allowed
    among_k = best.masked_fill(best < lowest, -torch.inf)
    total = torch.where(limited, among_k.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
    likely = (among_k - total).exp()
    before = likely.cumsum(-1) - likely  # probability of all that are more likely
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    lowest = torch.where(top_p < 1.0, torch.maximum(lowest, best.gather(1, kept - 1)), lowest)
    lowest = torch.maximum(lowest, best[:, :1] + min_p.log())

    noisy = _gumbel_noise(keys, ids).add_(best).masked_fill_(best < lowest, -torch.inf)
    tokens = ids.gather(1, noisy.max(-1, keepdim=True).indices).squeeze(1)
    return tokens, ((best[:, -1:] >= lowest) & (best[:, -1:] > -torch.inf)).flatten()


def noise_key(row: RowSampling) -> int:
    """What seed and output index of a row make of its noise, as an int64."""
    return _signed(_key(row.params.seed, row.output_index))


def _counters(rows: Sequence[RowSampling]) -> list[tuple[int, int]]:
    return [(row.params.seed, row.output_index) for row in rows]


def gumbel_noise(counters: Sequence[tuple[int, int]], token_ids: torch.Tensor) -> torch.Tensor:
    """float32 (rows, ids) standard Gumbel noise of int64 ids, (ids,) or (rows, ids), for rows of (seed, output index).

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014) over key + id × golden ratio; 40 bits become a uniform
    number between 0 and 1, both excluded.
    -log of an exponential variable is Gumbel; taking log1p keeps its upper tail, which decides, at full precision.
    """
    keys = torch.tensor([_signed(_key(seed, index)) for seed, index in counters], device=token_ids.device)
    return _gumbel_noise(keys, token_ids)


def _gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    hashed = token_ids * _signed(_GOLDEN) + keys.unsqueeze(1)  # int64 arithmetic wraps around
    hashed = _fold_(hashed, 30).mul_(_signed(_MIX_1))
    hashed = _fold_(hashed, 27).mul_(_signed(_MIX_2))
    bits = _shift(_fold_(hashed, 31), 24)  # 40 of them
    uniform = bits.float().add_(0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _fold_(value: torch.Tensor, bits: int) -> torch.Tensor:
    return value.bitwise_xor_(_shift(value, bits))


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 shifted right, filled with zeros."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


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


def _logprobs(raw: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs:
    """The sampled token's log probability, and the `logprobs` best ones or those of `score_ids`, from one row's logits
    (vocab,).
    """
    logprobs = raw.log_softmax(-1)
    top: list[tuple[int, float]] = []
    count = params.logprobs or 0
    if params.score_ids:
        values = logprobs[torch.tensor(params.score_ids, device=raw.device)]
        top = list(zip(params.score_ids, values.tolist(), strict=True))
    elif count:
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
