"""Checks what a client asked of the sampling, and fills in what it left open.

`check_options` needs no model: the server calls it before a job is sent, a worker again. `Defaults` is what the model
folder says. All ranges of sampling values live here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from preprocess.blocks.fields import Fields
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

_LARGEST_NUMBER: Final = 2**31 - 1
"""Of counts and token ids."""

_NEARLY_GREEDY: Final = 1e-4
"""Below it logits over the temperature leave the range of float32, and only the likeliest token is left anyway."""


def check_options(options: GenerationOptions, *, limit_name: str = "max_tokens") -> None:
    """Raises `ClientError` for the first value out of its range: which, what came, what is expected.

    `limit_name` is what the client calls `max_tokens`.
    """
    bounded(limit_name, options.max_tokens, 1, _LARGEST_NUMBER)
    bounded("min_tokens", options.min_tokens, 0, _LARGEST_NUMBER)
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise _refuse(
            "min_tokens", f"`min_tokens` is {options.min_tokens}, more than `{limit_name}` {options.max_tokens}."
        )
    bounded("temperature", options.temperature, 0, 2)
    bounded("top_p", options.top_p, 0, 1, above_low=True)
    bounded("top_k", options.top_k, -1, _LARGEST_NUMBER)
    bounded("min_p", options.min_p, 0, 1)
    bounded("presence_penalty", options.presence_penalty, -2, 2)
    bounded("frequency_penalty", options.frequency_penalty, -2, 2)
    bounded("repetition_penalty", options.repetition_penalty, 0, 10, above_low=True)
    bounded("seed", options.seed, -(2**63), 2**63 - 1)
    bounded("top_logprobs", options.logprobs, 0, MAX_LOGPROBS)
    _check_stop(options)
    _check_logit_bias(options.logit_bias)


def bounded(name: str, value: float | None, low: int, high: int, *, above_low: bool = False) -> None:
    """Refuse a value outside [low, high], or outside (low, high] with `above_low`. None is no value; NaN is outside."""
    if value is None or (low <= value <= high and not (above_low and value == low)):
        return
    relation = f"above {low} and at most {high}" if above_low else f"{low} to {high}"
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
    raise _refuse(name, f"`{name}` is {shown}; expected {relation}.")


def _check_stop(options: GenerationOptions) -> None:
    if len(options.stop) > MAX_STOP_STRINGS:
        raise _refuse("stop", f"`stop` holds {len(options.stop)} strings; at most {MAX_STOP_STRINGS} are accepted.")
    for index, text in enumerate(options.stop):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            path = f"stop[{index}]"
            raise _refuse(path, f"`{path}` has {len(text)} characters; expected 1 to {MAX_STOP_LENGTH}.")
    ids = options.stop_token_ids
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _refuse(
            "stop_token_ids", f"`stop_token_ids` holds {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are accepted."
        )
    for index, token_id in enumerate(ids):
        bounded(f"stop_token_ids[{index}]", token_id, 0, _LARGEST_NUMBER)


def _check_logit_bias(biases: Mapping[int, float]) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        raise _refuse(
            "logit_bias", f"`logit_bias` holds {len(biases)} tokens; at most {MAX_LOGIT_BIASES} are accepted."
        )
    for token_id, bias in biases.items():
        path = f"logit_bias[{str(token_id)[:20]}]"
        if not 0 <= token_id <= _LARGEST_NUMBER:
            raise _refuse(path, f"`{path}` is no token id.")
        bounded(path, bias, -100, 100)


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
        """Read `generation_config.json`. Raises `ServiceError` for a value that nothing can be sampled with."""
        given = Fields(folder.generation_config, "generation_config.json: ")
        temperature = given.between("temperature", 1.0, 0, math.inf)  # 1e-6 in some folders, which write greedy so
        samples = given.flag("do_sample", False) and temperature >= _NEARLY_GREEDY
        return cls(
            temperature=temperature if samples else GREEDY_TEMPERATURE,
            top_k=given.integer("top_k", 0, minimum=-1) if samples else 0,
            top_p=given.between("top_p", 1.0, 0, 1) if samples else 1.0,
            min_p=given.between("min_p", 0.0, 0, 1) if samples else 0.0,
            repetition_penalty=given.number("repetition_penalty", 1.0),
            max_new_tokens=given.integer("max_new_tokens", DEFAULT_MAX_TOKENS),
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
            f"The prompt has {num_prompt_tokens:,} tokens (pictures included); the model's context is {max_context:,} "
            "tokens and must hold the answer too. Send less text, or fewer or smaller pictures.",
            code="context_length_exceeded",
            param="messages",
        )
    if options.max_tokens is not None and options.max_tokens > left:
        raise ClientError(
            f"The prompt has {num_prompt_tokens:,} tokens (pictures included), `max_tokens` is {options.max_tokens:,}, "
            f"together {num_prompt_tokens + options.max_tokens:,}; the model's context is {max_context:,} tokens, "
            f"so `max_tokens` can be at most {left:,} here.",
            code="context_length_exceeded",
            param="max_tokens",
        )
    max_tokens = options.max_tokens or min(left, max(defaults.max_new_tokens, options.min_tokens))
    if options.min_tokens > max_tokens:
        raise _refuse(
            "min_tokens", f"`min_tokens` is {options.min_tokens}, but only {max_tokens} tokens are left for the answer."
        )
    for name, ids in (("logit_bias", options.logit_bias), ("stop_token_ids", options.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < defaults.vocab_size:
                raise _refuse(
                    name, f"`{name}` names token {token_id}; the model's tokens are 0 … {defaults.vocab_size - 1}."
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
