"""Bounds of the sampling fields, the same for every route and for the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from preprocess.wire import GenerationOptions
from server.complaints import invalid, of_validation, unknown
from server.request_models import SAMPLING_FIELDS, Sampling

_INT64: Final = 2**63
_INT32: Final = 2**31


def generation_options(request: Sampling) -> GenerationOptions:
    """The sampling fields, checked.

    Raises:
        ClientError: Naming the field, what came and what is expected.
    """
    if request.max_tokens is not None and request.max_completion_tokens not in {None, request.max_tokens}:
        raise invalid("max_completion_tokens", "`max_tokens` and `max_completion_tokens` differ; expected one of them.")
    token_limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    limit_name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    bounded(limit_name, token_limit, 1, _INT32 - 1)
    bounded("min_tokens", request.min_tokens, 0, _INT32 - 1)
    if token_limit is not None and (request.min_tokens or 0) > token_limit:
        raise invalid("min_tokens", f"`min_tokens` is {request.min_tokens}, more than `{limit_name}` {token_limit}.")
    bounded("temperature", request.temperature, 0, 2)
    bounded("top_p", request.top_p, 0, 1, above_low=True)
    bounded("top_k", request.top_k, -1, _INT32 - 1)
    bounded("min_p", request.min_p, 0, 1)
    bounded("presence_penalty", request.presence_penalty, -2, 2)
    bounded("frequency_penalty", request.frequency_penalty, -2, 2)
    bounded("repetition_penalty", request.repetition_penalty, 0, 10, above_low=True)
    bounded("seed", request.seed, -_INT64, _INT64 - 1)
    bounded("priority", request.priority, -_INT32, _INT32 - 1)
    skip_special_tokens = request.skip_special_tokens
    return GenerationOptions(
        max_tokens=token_limit,
        min_tokens=request.min_tokens or 0,
        temperature=request.temperature,
        top_k=0 if request.top_k == -1 else request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        stop=_stop_strings(request.stop),
        stop_token_ids=_token_ids(request.stop_token_ids or []),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
    )


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > 16:
        raise invalid("stop", f"`stop` holds {len(strings)} strings; at most 16 are accepted.")
    for i, text in enumerate(strings):
        path = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not text or len(text) > 1000:
            raise invalid(path, f"`{path}` has {len(text)} characters; expected 1 to 1000.")
    return list(strings)


def _token_ids(ids: list[int]) -> list[int]:
    if len(ids) > 256:
        raise invalid("stop_token_ids", f"`stop_token_ids` holds {len(ids)} ids; at most 256 are accepted.")
    for i, token_id in enumerate(ids):
        bounded(f"stop_token_ids[{i}]", token_id, 0, _INT32 - 1)
    return ids


def logit_bias(bias: dict[int, float]) -> dict[int, float]:
    """OpenAI's `logit_bias`, checked."""
    if len(bias) > 1024:
        raise invalid("logit_bias", f"`logit_bias` holds {len(bias)} tokens; at most 1024 are accepted.")
    for token_id, value in bias.items():
        path = f"logit_bias[{str(token_id)[:20]}]"
        if not 0 <= token_id < _INT32:
            raise invalid(path, f"`{path}` is no token id.")
        bounded(path, value, -100, 100)
    return bias


def sampling_options(values: Mapping[str, object]) -> GenerationOptions:
    """Sampling fields that came as Python values.

    Raises:
        ClientError: An unknown field, or a value that cannot be.
    """
    for name in values:
        if name not in SAMPLING_FIELDS:
            raise unknown(name, SAMPLING_FIELDS)
    try:
        return generation_options(msgspec.convert(dict(values), Sampling))
    except msgspec.ValidationError as error:
        raise of_validation(error, Sampling) from None


def bounded(name: str, value: float | None, low: int, high: int, *, above_low: bool = False) -> None:
    """Refuse a value outside [low, high], or outside (low, high] with `above_low`. None is no value."""
    if value is None or (low <= value <= high and not (above_low and value == low)):
        return
    relation = f"above {low} and at most {high}" if above_low else f"{low} to {high}"
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
    raise invalid(name, f"`{name}` is {shown}; expected {relation}.")
