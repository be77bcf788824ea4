"""Checks what a client asked of the sampling, and fills in what it left open.

`check_options` needs no model: the server calls it before a job is sent, a worker again. `Defaults` is what the model
folder says. All ranges of sampling values live here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from preprocess.errors import ClientError
from preprocess.model_folder import ModelFolder
from preprocess.wire import GREEDY_TEMPERATURE, GenerationOptions, SamplingParams

MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 1_000
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIASES: Final = 1_024
MAX_LOGPROBS: Final = 20
DEFAULT_MAX_TOKENS: Final = 4_096
"""Longest answer that nobody asked for by number."""

_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

_LARGEST_NUMBER: Final = 2**31 - 1
"""Of counts and token ids."""

_NEARLY_GREEDY: Final = 1e-4
"""Below it logits over the temperature leave the range of float32, and only the likeliest token is left anyway."""


def check_options(options: GenerationOptions) -> None:
    """Raises `ClientError` for the first value out of its range, with the range."""
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise _refuse(name, f"{name} is {value}; it must lie between {low:g} and {high:g}")
    for name, high in (("top_p", 1), ("repetition_penalty", 10)):
        if getattr(options, name) == 0:
            raise _refuse(name, f"{name} is 0; it must be above 0 and at most {high}")
    if options.top_k is not None and options.top_k < -1:
        raise _refuse("top_k", f"top_k is {options.top_k}; it must be at least 1, or 0 or -1 for all tokens")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise _refuse("max_tokens", f"max_tokens is {options.max_tokens}; it must be at least 1")
    if options.min_tokens < 0:
        raise _refuse("min_tokens", f"min_tokens is {options.min_tokens}; it must be at least 0")
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise _refuse(
            "min_tokens", f"min_tokens is {options.min_tokens}, which is more than max_tokens, {options.max_tokens}"
        )
    if options.logprobs is not None and not 0 <= options.logprobs <= MAX_LOGPROBS:
        raise _refuse("top_logprobs", f"top_logprobs is {options.logprobs}; it must lie between 0 and {MAX_LOGPROBS}")
    if options.seed is not None and not -(2**63) <= options.seed < 2**63:
        raise _refuse("seed", f"seed is {options.seed}; it must fit into 64 bits, sign included")
    for name in ("max_tokens", "min_tokens", "top_k"):
        if (getattr(options, name) or 0) > _LARGEST_NUMBER:
            raise _refuse(name, f"{name} is {getattr(options, name)}; it must be at most {_LARGEST_NUMBER}")
    _check_stop(options)
    _check_token_ids("stop_token_ids", options.stop_token_ids)
    _check_token_ids("logit_bias", options.logit_bias)
    _check_logit_bias(options)


def _check_stop(options: GenerationOptions) -> None:
    if len(options.stop) > MAX_STOP_STRINGS:
        raise _refuse("stop", f"stop has {len(options.stop)} strings; at most {MAX_STOP_STRINGS} are accepted")
    for text in options.stop:
        if not text:
            raise _refuse("stop", "stop holds an empty string; each must have at least one character")
        if len(text) > MAX_STOP_LENGTH:
            raise _refuse(
                "stop", f"a stop string has {len(text):,} characters; at most {MAX_STOP_LENGTH:,} are accepted"
            )
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _refuse(
            "stop_token_ids",
            f"stop_token_ids has {len(options.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are accepted",
        )


def _check_token_ids(param: str, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if not 0 <= token_id <= _LARGEST_NUMBER:
            raise _refuse(
                param, f"{param} names token {token_id}; token ids are 0 and above, below the vocabulary size"
            )


def _check_logit_bias(options: GenerationOptions) -> None:
    if len(options.logit_bias) > MAX_LOGIT_BIASES:
        raise _refuse(
            "logit_bias", f"logit_bias has {len(options.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are accepted"
        )
    for token_id, bias in options.logit_bias.items():
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise _refuse(
                "logit_bias", f"the logit_bias of token {token_id} is {bias}; it must lie between -100 and 100"
            )


@dataclass(frozen=True)
class Defaults:
    """What the model folder says of sampling where the client says nothing.

    `do_sample` false, or absent as in most folders, means greedy, as `generate` of transformers reads it; `top_k`,
    `top_p` and `min_p` then count for nothing.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, folder: ModelFolder, eos_ids: tuple[int, ...], vocab_size: int) -> Defaults:
        """Read `generation_config.json`."""
        given = folder.generation_config

        def number(name: str, otherwise: float) -> Any:
            value = given.get(name)
            return value if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise

        samples = given.get("do_sample") is True
        return cls(
            temperature=float(number("temperature", 1.0)) if samples else GREEDY_TEMPERATURE,
            top_k=int(number("top_k", 0)) if samples else 0,
            top_p=float(number("top_p", 1.0)) if samples else 1.0,
            min_p=float(number("min_p", 0.0)) if samples else 0.0,
            repetition_penalty=float(number("repetition_penalty", 1.0)),
            max_new_tokens=int(number("max_new_tokens", DEFAULT_MAX_TOKENS)),
            eos_ids=eos_ids,
            vocab_size=vocab_size,
        )


def resolve(options: GenerationOptions, defaults: Defaults, num_prompt_tokens: int, max_context: int) -> SamplingParams:
    """Everything that a sequence needs to be sampled.

    Raises `ClientError` where prompt and answer cannot fit into the context, with the counts, and for token ids outside
    the vocabulary.
    """
    left = max_context - num_prompt_tokens
    if left < 1:
        raise ClientError(
            f"the prompt has {num_prompt_tokens:,} tokens (pictures included); the model's context is {max_context:,} "
            "tokens and must hold the answer too. Send less text, or fewer or smaller pictures",
            code="context_length_exceeded",
            param="messages",
        )
    if options.max_tokens is not None and options.max_tokens > left:
        raise ClientError(
            f"the prompt has {num_prompt_tokens:,} tokens (pictures included), max_tokens is {options.max_tokens:,}, "
            f"together {num_prompt_tokens + options.max_tokens:,}; the model's context is {max_context:,} tokens, "
            f"so max_tokens can be at most {left:,} here",
            code="context_length_exceeded",
            param="max_tokens",
        )
    max_tokens = options.max_tokens or min(left, max(defaults.max_new_tokens, options.min_tokens))
    if options.min_tokens > max_tokens:
        raise _refuse(
            "min_tokens", f"min_tokens is {options.min_tokens}, but only {max_tokens} tokens are left for the answer"
        )
    for name, ids in (("logit_bias", options.logit_bias), ("stop_token_ids", options.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < defaults.vocab_size:
                raise _refuse(
                    name, f"{name} names token {token_id}; the model's tokens are 0 … {defaults.vocab_size - 1}"
                )
    ends = [] if options.ignore_eos else list(defaults.eos_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        temperature=_temperature(options, defaults),
        top_k=max(0, _first(options.top_k, defaults.top_k)),
        top_p=_first(options.top_p, defaults.top_p),
        min_p=_first(options.min_p, defaults.min_p),
        repetition_penalty=_first(options.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        seed=secrets.randbits(63) if options.seed is None else options.seed & (2**63 - 1),
        stop_token_ids=[*ends, *(token_id for token_id in options.stop_token_ids if token_id not in ends)],
        logprobs=options.logprobs,
    )


def _temperature(options: GenerationOptions, defaults: Defaults) -> float:
    if options.temperature is not None:
        return options.temperature if options.temperature >= _NEARLY_GREEDY else GREEDY_TEMPERATURE
    narrows = options.top_p not in (None, 1.0) or options.top_k not in (None, 0, -1) or options.min_p not in (None, 0.0)
    if narrows and defaults.temperature == GREEDY_TEMPERATURE:
        return 1.0  # who narrows the sampling wants some: greedy would ignore it silently
    return defaults.temperature


def _first(asked: Any, default: Any) -> Any:
    return default if asked is None else asked


def _refuse(param: str, message: str) -> ClientError:
    return ClientError(message, code="invalid_value", param=param)
