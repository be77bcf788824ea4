"""How the responses of a session are asked for and sampled: what the client says, what a preset says, the defaults.

    response.create  >  the preset that it names  >  the session's own fields  >  the session's preset  >  defaults

A `prompt` and a `preset` are one question: who asks another one, in a session or in a response, does not ask it under
the preset that was there before, and neither in its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from preprocess.errors import ClientError
from preprocess.wire import GenerationOptions
from server.complaints import invalid
from server.presets import Preset, given_fields, left_open, preset_of, with_preset
from server.request_models import DEFAULT_PROMPT, SAMPLING_FIELDS, Sampling
from server.sampling_rules import generation_options
from server.shape_models import SHAPE_FIELDS, JsonSchemaFormat, StructuredOutputs, is_given
from server.stream.client_events import Ask
from server.stream.settings_events import SESSION_SAMPLING
from server.stream.terms import Terms

DEFAULT_TOKENS: Final = 256
_NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True)
class Question:
    """What is asked, and how the answer is sampled: `shown` as clients read it, `options` as the pipeline takes it."""

    prompt: str
    shown: Sampling
    options: GenerationOptions


def session_question(own: Mapping[str, Any], terms: Terms) -> Question:
    """What a session asks of every frame.

    Args:
        own: The fields that its client has set.
        terms: What the server offers.

    Raises:
        ClientError: Naming the field below `session`.
    """
    try:
        preset = preset_of(terms.presets, own["preset"]) if "preset" in own else None
        prompt = _prompt(own.get("prompt"), preset, DEFAULT_PROMPT)
        sampling = _with_own(Sampling(), own)
        _check_tokens(sampling, terms)
        return _question(prompt, sampling if preset is None else with_preset(sampling, preset), terms, "session")
    except ClientError as error:
        raise below("session", error) from None


def asked_question(ask: Ask, own: Mapping[str, Any], session: Question, terms: Terms) -> Question:
    """What one `response.create` asks.

    Raises:
        ClientError: Naming the field below `response`.
    """
    sampling = Sampling(**{name: getattr(ask, name) for name in SAMPLING_FIELDS})
    try:
        generation_options(sampling)  # alone, so that a refusal names what came now
        _check_tokens(sampling, terms)
        named = None if ask.preset is None else preset_of(terms.presets, ask.preset)
        if named is not None:
            sampling = with_preset(sampling, named)
        shape_from = "response" if given_fields(sampling) & set(SHAPE_FIELDS) else "session"
        sampling = _with_own(sampling, own)
        if ask.prompt is None and named is None and "preset" in own:
            sampling = with_preset(sampling, preset_of(terms.presets, own["preset"]))
        return _question(_prompt(ask.prompt, named, session.prompt), sampling, terms, shape_from)
    except ClientError as error:
        raise below("response", error) from None


def below(path: str, error: ClientError) -> ClientError:
    """The same refusal of a field that lies deeper in the event."""
    if not error.param:
        message, param = error.message.replace("The body", f"`{path}`", 1), path
    else:
        param = f"{path}.{error.param}"
        message = error.message.replace(f"`{error.param}`", f"`{param}`", 1)
    return ClientError(message, status=error.status, code=error.code, param=param)


def _prompt(text: str | None, preset: Preset | None, otherwise: str) -> str:
    return text or otherwise if preset is None else preset.prompt_for(text)


def _with_own(sampling: Sampling, own: Mapping[str, Any]) -> Sampling:
    """With the session's own fields where it leaves them open."""
    fields = {name: own[name] for name in SESSION_SAMPLING if name in own}
    return msgspec.structs.replace(sampling, **left_open(fields, given_fields(sampling)))


def _check_tokens(sampling: Sampling, terms: Terms) -> None:
    """What a client asks for must be possible; a preset asks for as much as there may be."""
    name = "max_tokens" if sampling.max_completion_tokens is None else "max_completion_tokens"
    num_tokens, limit = getattr(sampling, name), terms.limits.max_response_tokens
    if num_tokens is not None and num_tokens > limit:
        raise invalid(name, f"`{name}` is {num_tokens}; expected at most {limit}.")


def _question(prompt: str, sampling: Sampling, terms: Terms, shape_from: str) -> Question:
    num_tokens = sampling.max_completion_tokens if sampling.max_tokens is None else sampling.max_tokens
    shown = msgspec.structs.replace(
        sampling,
        max_tokens=min(DEFAULT_TOKENS if num_tokens is None else num_tokens, terms.limits.max_response_tokens),
        max_completion_tokens=None,
    )
    options = generation_options(shown)
    if options.grammar is not None:  # a worker compiles it later; its refusal shall name the same field
        grammar = msgspec.structs.replace(options.grammar, param=f"{shape_from}.{options.grammar.param}")
        options = msgspec.structs.replace(options, grammar=grammar)
    return Question(prompt, _complete(shown), options)


def _complete(sampling: Sampling) -> Sampling:
    """With null for every part of a shape that was left out, so that it can be written as JSON."""
    wanted, structured = sampling.response_format, sampling.structured_outputs
    if isinstance(wanted, JsonSchemaFormat) and not is_given(wanted.json_schema.schema):
        wanted = JsonSchemaFormat(msgspec.structs.replace(wanted.json_schema, schema=_NULL))
    if isinstance(structured, StructuredOutputs) and not is_given(structured.json):
        structured = msgspec.structs.replace(structured, json=_NULL)
    return msgspec.structs.replace(sampling, response_format=wanted, structured_outputs=structured)
