"""What clients may send: the request models, and the rules that turn one into a `Call` or refuse it by name.

Bodies of many megabytes come through here on the event loop, so decoding is msgspec's, pictures stay the base64 text
that they arrived as, and nothing looks at a picture beyond the first characters of its URL.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, Final, Literal, TypeVar

import msgspec

from preprocess.errors import ClientError
from preprocess.wire import Detail, GenerationOptions, ImagePart, Message, TextPart
from server.settings import Settings

DEFAULT_PROMPT: Final = "Describe the picture."
MAX_CHOICES: Final = 16
_INT64: Final = 2**63
_INT32: Final = 2**31
_SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True):
    """A request that may go to the dispatcher."""

    messages: list[Message]
    options: GenerationOptions
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    session_id: str = ""
    priority: int = 0
    as_text: bool = False

    @property
    def num_images(self) -> int:
        """Pictures in all turns."""
        return sum(isinstance(part, ImagePart) for message in self.messages for part in message.content)


# ---- request models -------------------------------------------------------------------------------------------------


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `image_url` of a content part."""

    url: str
    detail: Detail | None = None


class TextContent(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """A content part with text."""

    text: str


class ImageContent(msgspec.Struct, frozen=True, tag="image_url", forbid_unknown_fields=True):
    """A content part with a picture."""

    image_url: ImageUrl


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn, with the fields that clients send back of an earlier answer: those must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextContent | ImageContent]
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream has besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and captions share. null is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    session_id: str | None = None
    priority: int | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    # Change nothing in the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Would change the answer, and are not served: accepted only with a value that means "off" (see _HARMLESS).
    store: Any = None
    service_tier: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None


# Field → values that ask for nothing beyond what is served. null always is one.
_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
}
_MESSAGE_EXTRAS: Final = (
    "name",
    "refusal",
    "annotations",
    "audio",
    "tool_calls",
    "function_call",
    "reasoning",
    "reasoning_content",
)


class CaptionRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a JSON `POST /v1/captions`; a form has the same fields, its files being the pictures."""

    prompt: str | None = None
    format: Literal["json", "text"] | None = None
    detail: Detail | None = None
    image: str | None = None
    images: list[str] | None = None


_chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
_caption_decoder: Final = msgspec.json.Decoder(CaptionRequest)


# ---- chat -----------------------------------------------------------------------------------------------------------


def chat_call(body: bytes | bytearray, settings: Settings, session_header: str | None = None) -> Call:
    """The call that a chat completion body asks for.

    Raises:
        ClientError: 400 naming the field, or 404 for another model.
    """
    request = _decode(_chat_decoder, body)
    _check_model(request.model, settings)
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name)
        if value is not None and not _is_one_of(value, harmless):
            hint = f" except as {_shown(harmless[0])}" if harmless else ""
            raise _unsupported(name, f"`{name}` is not supported{hint}: leave it out.")
    options = _options(request)
    if request.logprobs:
        _bounded("top_logprobs", request.top_logprobs, 0, 20)
        options = msgspec.structs.replace(options, logprobs=request.top_logprobs or 0)
    elif request.top_logprobs:
        raise _invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")
    if request.logit_bias:
        options = msgspec.structs.replace(options, logit_bias=_logit_bias(request.logit_bias))
    _bounded("n", request.n, 1, MAX_CHOICES)
    stream_options = request.stream_options
    if stream_options is not None and not request.stream:
        raise _invalid("stream_options", "`stream_options` needs `stream` to be true.")
    return Call(
        messages=_messages(request.messages, settings),
        options=options,
        n=request.n or 1,
        stream=bool(request.stream),
        include_usage=stream_options is not None and bool(stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        session_id=_session_id(request.session_id, session_header),
        priority=request.priority or 0,
    )


def _messages(messages: list[ChatMessage], settings: Settings) -> list[Message]:
    if not messages:
        raise _invalid("messages", "`messages` is empty; expected at least one message.")
    turns = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        for name in _MESSAGE_EXTRAS:
            value = getattr(message, name)
            if value is not None and value != [] and value != "":
                raise _unsupported(f"{path}.{name}", f"`{path}.{name}` is not supported: leave it out.")
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            turns.append(Message(role, [TextPart(message.content)]))
            continue
        parts: list[TextPart | ImagePart] = []
        for j, part in enumerate(message.content):
            if isinstance(part, TextContent):
                parts.append(TextPart(part.text))
            else:
                image_url = part.image_url
                parts.append(_image(image_url.url, image_url.detail, f"{path}.content[{j}].image_url.url", bare=False))
        if not parts:
            raise _invalid(f"{path}.content", f"`{path}.content` is empty; expected text or parts.")
        turns.append(Message(role, parts))
    _check_num_images(sum(isinstance(part, ImagePart) for turn in turns for part in turn.content), "messages", settings)
    return turns


def _image(url: str, detail: Detail | None, path: str, *, bare: bool) -> ImagePart:
    """A picture that came as text: a data URL or, where `bare` allows it, base64 alone. Workers decode it."""
    url = url.strip()
    if not url:
        raise ClientError(f"`{path}` holds no picture: it is empty.", code="image_empty", param=path)
    scheme, separator, _ = url[:64].partition(":")
    if separator and scheme.lower() != "data":
        raise ClientError(
            f"`{path}` is a {scheme.lower()[:20]}: URL, and this server fetches nothing: send the picture itself as a "
            "data URL (data:image/…;base64,…), or as a file to /v1/captions.",
            code="remote_url_not_supported",
            param=path,
        )
    if not separator and not bare:
        raise _invalid(path, f"`{path}` is no URL; expected a data URL (data:image/…;base64,…).")
    data_url = url if separator else f"data:application/octet-stream;base64,{url}"
    return ImagePart(data_url=data_url, detail=detail or "auto")


def _check_image_size(num_bytes: int, path: str, settings: Settings) -> None:
    """Refuse a picture of too many encoded bytes, before anything is done with it."""
    limit = settings.max_image_mb
    if num_bytes > limit * (1 << 20):
        raise ClientError(
            f"`{path}` is a picture of {num_bytes / (1 << 20):.1f} MiB; at most {limit:g} MiB are accepted.",
            status=413,
            code="image_too_large",
            param=path,
        )


def _check_num_images(num_images: int, path: str, settings: Settings) -> None:
    if num_images > settings.max_images:
        raise ClientError(
            f"`{path}` holds {num_images} pictures; at most {settings.max_images} are accepted in one request.",
            code="too_many_images",
            param=path,
        )


# ---- captions -------------------------------------------------------------------------------------------------------


def caption_call(
    fields: CaptionRequest, files: list[tuple[str, bytes]], settings: Settings, session_header: str | None = None
) -> Call:
    """The call that a caption request asks for.

    Args:
        fields: From JSON, a form, or the query.
        files: Uploaded pictures with the field names that they came under; none with JSON.
        settings: Limits.
        session_header: `x-session-id`.
    """
    _check_model(fields.model, settings)
    detail = fields.detail or "auto"
    if fields.image is not None and fields.images is not None:
        raise _invalid("images", "`image` and `images` were both given; expected one of them.")
    images: list[TextPart | ImagePart] = []
    for path, data in files:
        if not data:
            raise ClientError(f"`{path}` holds no picture: it is empty.", code="image_empty", param=path)
        _check_image_size(len(data), path, settings)
        images.append(ImagePart(data=data, detail=detail))
    if fields.image is not None:
        images.append(_image(fields.image, detail, "image", bare=True))
    for i, url in enumerate(fields.images or []):
        images.append(_image(url, detail, f"images[{i}]", bare=True))
    if not images:
        raise ClientError(
            "There is no picture in the request: send it as a form file, as the body with an image/* content type, or "
            "as JSON in `image`.",
            code="image_missing",
            param="image",
        )
    _check_num_images(len(images), "images", settings)
    prompt = DEFAULT_PROMPT if fields.prompt is None else fields.prompt
    return Call(
        messages=[Message("user", [*images, TextPart(prompt)])],
        options=_options(fields),
        stream=bool(fields.stream),
        as_text=fields.format == "text",
        session_id=_session_id(fields.session_id, session_header),
        priority=fields.priority or 0,
    )


def caption_from_json(body: bytes | bytearray) -> CaptionRequest:
    """Decode a JSON caption request."""
    return _decode(_caption_decoder, body)


def caption_from_text(pairs: list[tuple[str, str]]) -> CaptionRequest:
    """Convert form fields or query parameters, which are all text; `stop` and `stop_token_ids` may repeat.

    Raises:
        ClientError: An unknown field, one given twice, or a value that cannot be.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in {"image", "images"}:
            raise _invalid(name, f"`{name}` is text; expected a file (curl -F {name}=@picture.jpg), or a JSON body.")
        if name not in _CAPTION_FIELDS:
            raise _unknown(name, "", _CAPTION_FIELDS)
        if name in {"stop", "stop_token_ids"}:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise _invalid(name, f"`{name}` was given twice.")
        else:
            values[name] = text
    try:
        return msgspec.convert(values, CaptionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise _of_validation(error, values) from None


_CAPTION_FIELDS: Final = tuple(
    field.name for field in msgspec.structs.fields(CaptionRequest) if field.name not in {"image", "images"}
)


# ---- rules that both share ------------------------------------------------------------------------------------------


def _check_model(model: str | None, settings: Settings) -> None:
    """A missing model means the one that is served; OpenAI's own rule would make every curl line longer."""
    if model is not None and model not in settings.model_names:
        raise ClientError(
            f"The model {model[:200]!r} is not served here; expected {' or '.join(settings.model_names)}.",
            status=404,
            code="model_not_found",
            param="model",
        )


def _options(request: Sampling) -> GenerationOptions:
    if request.max_tokens is not None and request.max_completion_tokens not in {None, request.max_tokens}:
        raise _invalid(
            "max_completion_tokens", "`max_tokens` and `max_completion_tokens` differ; expected one of them."
        )
    token_limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    limit_name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    _bounded(limit_name, token_limit, 1, _INT32 - 1)
    _bounded("min_tokens", request.min_tokens, 0, _INT32 - 1)
    if token_limit is not None and (request.min_tokens or 0) > token_limit:
        raise _invalid("min_tokens", f"`min_tokens` is {request.min_tokens}, more than `{limit_name}` {token_limit}.")
    _bounded("temperature", request.temperature, 0, 2)
    _bounded("top_p", request.top_p, 0, 1, above_low=True)
    _bounded("top_k", request.top_k, -1, _INT32 - 1)
    _bounded("min_p", request.min_p, 0, 1)
    _bounded("presence_penalty", request.presence_penalty, -2, 2)
    _bounded("frequency_penalty", request.frequency_penalty, -2, 2)
    _bounded("repetition_penalty", request.repetition_penalty, 0, 10, above_low=True)
    _bounded("seed", request.seed, -_INT64, _INT64 - 1)
    _bounded("priority", request.priority, -_INT32, _INT32 - 1)
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
        raise _invalid("stop", f"`stop` holds {len(strings)} strings; at most 16 are accepted.")
    for i, text in enumerate(strings):
        path = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not text or len(text) > 1000:
            raise _invalid(path, f"`{path}` has {len(text)} characters; expected 1 to 1000.")
    return list(strings)


def _token_ids(ids: list[int]) -> list[int]:
    if len(ids) > 256:
        raise _invalid("stop_token_ids", f"`stop_token_ids` holds {len(ids)} ids; at most 256 are accepted.")
    for i, token_id in enumerate(ids):
        _bounded(f"stop_token_ids[{i}]", token_id, 0, _INT32 - 1)
    return ids


def _logit_bias(bias: dict[int, float]) -> dict[int, float]:
    if len(bias) > 1024:
        raise _invalid("logit_bias", f"`logit_bias` holds {len(bias)} tokens; at most 1024 are accepted.")
    for token_id, value in bias.items():
        path = f"logit_bias[{str(token_id)[:20]}]"
        if not 0 <= token_id < _INT32:
            raise _invalid(path, f"`{path}` is no token id.")
        _bounded(path, value, -100, 100)
    return bias


def _session_id(given: str | None, header: str | None) -> str:
    """The body's word counts more than the header's."""
    session_id = given if given is not None else header
    if not session_id:
        return ""
    if not _SESSION_ID.fullmatch(session_id):
        name = "session_id" if given is not None else "x-session-id"
        raise _invalid(name, f"`{name}` is no session id; expected 1 to 128 printable ASCII characters without spaces.")
    return session_id


def _bounded(name: str, value: float | None, low: int, high: int, *, above_low: bool = False) -> None:
    if value is None or (low <= value <= high and not (above_low and value == low)):
        return
    relation = f"above {low} and at most {high}" if above_low else f"{low} to {high}"
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
    raise _invalid(name, f"`{name}` is {shown}; expected {relation}.")


# ---- refusals -------------------------------------------------------------------------------------------------------


def _invalid(param: str, message: str) -> ClientError:
    return ClientError(message, code="invalid_value", param=param)


def _unsupported(param: str, message: str) -> ClientError:
    return ClientError(message, code="unsupported_parameter", param=param)


def _unknown(name: str, inside: str, known: tuple[str, ...]) -> ClientError:
    path = f"{inside}.{name}" if inside else name
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return ClientError(f"The field `{path[:200]}` is unknown.{hint}", code="unknown_parameter", param=path[:200])


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Equality that tells 1 from true."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in harmless)


def _shown(value: Any) -> str:
    return json.dumps(value)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _of_validation(error, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = f": {error}" if isinstance(error, msgspec.DecodeError) and body else ""
        empty = "" if body else " (the body is empty)"
        raise ClientError(f"The body is no valid JSON{empty}{detail}.", code="invalid_json") from None
    except RecursionError:
        raise ClientError("The body's JSON is nested too deeply.", code="invalid_json") from None


_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_WORD: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_WORDS_AT: Final = {
    "role": "system, developer, user or assistant",
    "type": "text or image_url",
    "detail": "auto, low or high",
    "format": "json or text",
}
_WRONG_TYPE: Final = re.compile(r"Expected `(.*?)`(.*)", re.DOTALL)
_JSON_WORDS: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def _of_validation(error: msgspec.ValidationError, source: object) -> ClientError:
    """msgspec's complaint in this interface's words: which field, what was expected, what came."""
    text, _, where = str(error).rpartition(" - at `")
    if not text:
        text, where = str(error), ""
    path = re.sub(r"^(key` in `)?\$\.?", "", where.rstrip("`")).replace("[...]", "[]")
    unknown = _UNKNOWN_FIELD.match(text)
    if unknown:
        known = tuple(field.name for field in msgspec.structs.fields(_struct_at(path, source)))
        return _unknown(unknown[1], path, known)
    words = _WORDS_AT.get(path.rpartition(".")[2])
    wrong = _WRONG_WORD.match(text)
    if words and wrong:
        return _invalid(path, f"`{path[:200]}` is {wrong[1][:100]}; expected {words}.")
    text = _WRONG_TYPE.sub(lambda m: f"Expected `{_json_words(m[1])}`{m[2]}", text)
    text = re.sub(r"got `(\w+)`", lambda m: f"got `{_JSON_WORDS.get(m[1], m[1])}`", text)
    if not path:
        return ClientError(f"The body is not as expected: {_lower_first(text)}.", code="invalid_type")
    return ClientError(f"`{path[:200]}`: {_lower_first(text)[:400]}.", code="invalid_type", param=path[:200])


def _json_words(types: str) -> str:
    return " | ".join(_JSON_WORDS.get(word, word) for word in types.split(" | "))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _struct_at(path: str, source: object) -> type[msgspec.Struct]:
    """The model whose object lies at a path, for "did you mean"."""
    if not path:
        return CaptionRequest if isinstance(source, dict) else ChatRequest
    if path.endswith(".image_url"):
        return ImageUrl
    if path.endswith("stream_options"):
        return StreamOptions
    return ChatMessage if path.count("[") == 1 else ImageContent
