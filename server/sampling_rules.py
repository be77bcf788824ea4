"""Sampling fields of a request → options for the pipeline. Their ranges are those of `preprocess.options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from preprocess.options import bounded, check_options
from preprocess.wire import GenerationOptions
from server.complaints import invalid, of_validation, unknown
from server.request_models import SAMPLING_FIELDS, Sampling
from server.shape_rules import grammar_of, shapes_of

MAX_PRIORITY: Final = 2**31 - 1


def generation_options(
    request: Sampling, *, logprobs: int | None = None, logit_bias: Mapping[int, float] | None = None
) -> GenerationOptions:
    """The sampling fields, checked; `logprobs` and `logit_bias` only the chat route knows.

    Raises:
        ClientError: Naming the field, what came and what is expected.
    """
    if request.max_tokens is not None and request.max_completion_tokens not in {None, request.max_tokens}:
        raise invalid("max_completion_tokens", "`max_tokens` and `max_completion_tokens` differ; expected one of them.")
    bounded("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    skip_special_tokens = request.skip_special_tokens
    options = GenerationOptions(
        max_tokens=request.max_completion_tokens if request.max_tokens is None else request.max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=request.temperature,
        top_k=0 if request.top_k == -1 else request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=dict(logit_bias or {}),
        seed=request.seed,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        stop_token_ids=request.stop_token_ids or [],
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
        logprobs=logprobs,
        grammar=grammar_of(request.response_format, request.structured_outputs),
    )
    check_options(options, limit_name="max_completion_tokens" if request.max_tokens is None else "max_tokens")
    return options


def sampling_options(values: Mapping[str, object]) -> GenerationOptions:
    """Sampling fields that came as Python values.

    Raises:
        ClientError: An unknown field, or a value that cannot be.
    """
    for name in values:
        if name not in SAMPLING_FIELDS:
            raise unknown(name, SAMPLING_FIELDS)
    try:
        return generation_options(msgspec.convert(shapes_of(values), Sampling))
    except msgspec.ValidationError as error:
        raise of_validation(error, Sampling) from None
