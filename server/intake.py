"""The rules that turn a decoded request into a `Call` for the dispatcher, or refuse it by name.

Bodies of many megabytes come through here on the event loop, so decoding is msgspec's, pictures stay the base64 text
that they arrived as, and nothing looks at a picture beyond the first characters of its URL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from preprocess.errors import ClientError
from preprocess.options import bounded
from preprocess.video_formats import is_video
from preprocess.wire import Detail, GenerationOptions, ImagePart, Message, Question, Segmenting, TextPart, VideoPart
from server.complaints import decode, invalid, of_validation, unknown, unsupported
from server.image_store import IMAGE_ID
from server.presets import ask_preset, find_preset, with_preset
from server.request_models import (
    CAPTION_FIELDS,
    DEFAULT_CLIP_PROMPT,
    DEFAULT_PROMPT,
    HARMLESS,
    MESSAGE_EXTRAS,
    TIMED_FORMATS,
    CaptionFormat,
    CaptionRequest,
    ChatMessage,
    ChatRequest,
    ImageContent,
    TextContent,
)
from server.sampling_rules import generation_options
from server.settings import Settings
from server.shape_models import SHAPE_FIELDS
from server.shape_rules import shape_from_text
from server.tool_rules import calls_of, tools_of

MAX_CHOICES: Final = 16
MAX_FPS: Final = 240
_SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


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
    format: CaptionFormat = "json"
    segmenting: Segmenting | None = None
    tool_names: frozenset[str] = frozenset()
    """Functions that the model may call."""
    max_calls: int | None = None
    """How often; None: as it likes."""
    questions: list[Question] = []
    """Of a request for decisions: what is weighed instead of an answer being written."""
    media_fields: tuple[str, ...] = ()
    """Of a caption: the request field that each picture or clip came in."""


_chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
_caption_decoder: Final = msgspec.json.Decoder(CaptionRequest)


# ---- chat -----------------------------------------------------------------------------------------------------------


def chat_call(body: bytes | bytearray, settings: Settings, session_header: str | None = None) -> Call:
    """The call that a chat completion body asks for.

    Raises:
        ClientError: 400 naming the field, or 404 for another model.
    """
    request = decode(_chat_decoder, body)
    _check_model(request.model, settings)
    for name, harmless in HARMLESS.items():
        value = getattr(request, name)
        if value is not None and not _is_one_of(value, harmless):
            hint = f" except as {_shown(harmless[0])}" if harmless else ""
            raise unsupported(name, f"`{name}` is not supported{hint}: leave it out.")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    preset = None if request.preset is None else find_preset(request.preset, settings.presets)
    if preset is not None:
        request = with_preset(request, preset)
    options = generation_options(request, logprobs=logprobs, logit_bias=request.logit_bias)
    tools, call_grammar, names = tools_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if call_grammar is not None:
        if options.grammar is not None:
            raise invalid("tool_choice", "A call was required, and a shape for the answer too; expected one of them.")
        options = msgspec.structs.replace(options, grammar=call_grammar)
    options = msgspec.structs.replace(options, tools=tools)
    bounded("n", request.n, 1, MAX_CHOICES)
    stream_options = request.stream_options
    if stream_options is not None and not request.stream:
        raise invalid("stream_options", "`stream_options` needs `stream` to be true.")
    messages = _messages(request.messages, settings)
    return Call(
        messages=messages if preset is None else ask_preset(messages, preset),
        options=options,
        n=request.n or 1,
        stream=bool(request.stream),
        include_usage=stream_options is not None and bool(stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        session_id=_session_id(request.session_id, session_header),
        priority=request.priority or 0,
        tool_names=names,
        max_calls=1 if request.parallel_tool_calls is False else None,
    )


def _messages(messages: list[ChatMessage], settings: Settings) -> list[Message]:
    if not messages:
        raise invalid("messages", "`messages` is empty; expected at least one message.")
    turns = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        for name in MESSAGE_EXTRAS:
            value = getattr(message, name)
            if value is not None and value != [] and value != "":
                raise unsupported(f"{path}.{name}", f"`{path}.{name}` is not supported: leave it out.")
        role = "system" if message.role == "developer" else message.role
        calls = calls_of(message.tool_calls or [], f"{path}.tool_calls")
        if calls and role != "assistant":
            raise invalid(f"{path}.tool_calls", f"`{path}.tool_calls` belongs to the assistant, not to the {role}.")
        call_id = message.tool_call_id or ""
        if (role == "tool") != bool(call_id):
            raise invalid(f"{path}.tool_call_id", f"`{path}.tool_call_id`: a tool's message needs it, no other has it.")
        if message.content is None or isinstance(message.content, str):
            if message.content is None and not calls:
                raise invalid(f"{path}.content", f"`{path}.content` is missing; expected text or parts.")
            content: list[TextPart | ImagePart | VideoPart] = (
                [] if message.content is None else [TextPart(message.content)]
            )
            turns.append(Message(role, content, calls, call_id))
            continue
        parts: list[TextPart | ImagePart | VideoPart] = []
        for j, part in enumerate(message.content):
            place = f"{path}.content[{j}]"
            if isinstance(part, TextContent):
                parts.append(TextPart(part.text))
            elif isinstance(part, ImageContent):
                parts.append(_image(part.image_url.url, part.image_url.detail, f"{place}.image_url.url", bare=False))
            else:
                video = part.video_url
                looked_at = _looked_at(video.fps, video.max_frames, settings, f"{place}.video_url.")
                data_url = _data_url(video.url, f"{place}.video_url.url", "clip", bare=False)
                parts.append(msgspec.structs.replace(looked_at, data_url=data_url))
        if not parts and not calls:
            raise invalid(f"{path}.content", f"`{path}.content` is empty; expected text or parts.")
        turns.append(Message(role, parts, calls, call_id))
    _check_num_media([part for turn in turns for part in turn.content], "messages", settings)
    return turns


def _image(url: str, detail: Detail | None, path: str, *, bare: bool) -> ImagePart:
    """A picture that came as text."""
    return ImagePart(data_url=_data_url(url, path, "picture", bare=bare), detail=detail or "auto")


def _data_url(url: str, path: str, what: Literal["picture", "clip"], *, bare: bool) -> str:
    """A data URL or, where `bare` allows it, base64 alone. Workers decode it."""
    url = url.strip()
    example, kind = ("data:image/…;base64,…", "image") if what == "picture" else ("data:video/…;base64,…", "video")
    if not url:
        raise ClientError(f"`{path}` holds no {what}: it is empty.", code=f"{kind}_empty", param=path)
    if what == "picture" and IMAGE_ID.fullmatch(url):  # an upload: `ImageStore.resolve` puts it in its place
        return url
    scheme, separator, _ = url[:64].partition(":")
    if separator and scheme.lower() != "data":
        raise ClientError(
            f"`{path}` is a {scheme.lower()[:20]}: URL, and this server fetches nothing: send the {what} itself as a "
            f"data URL ({example}), or as a file to /v1/captions.",
            code="remote_url_not_supported",
            param=path,
        )
    if not separator and not bare:
        upload = ", or an id of /v1/images" if what == "picture" else ""
        raise invalid(path, f"`{path}` is no URL; expected a data URL ({example}){upload}.")
    return url if separator else f"data:application/octet-stream;base64,{url}"


def _looked_at(fps: float | None, max_frames: int | None, settings: Settings, path: str = "") -> VideoPart:
    """A clip without its data: how much of it is looked at."""
    bounded(f"{path}fps", fps, 0, MAX_FPS, above_low=True)
    bounded(f"{path}max_frames", max_frames, 1, settings.max_video_frames)
    return VideoPart(fps=fps or 0.0, max_frames=max_frames or 0)


def check_size(num_bytes: int, path: str, settings: Settings, *, is_clip: bool = False) -> None:
    """Refuse a picture or clip of too many encoded bytes, before anything is done with it."""
    limit, what, kind = (settings.max_image_mb, "picture", "image")
    if is_clip:
        limit, what, kind = (settings.max_video_mb, "clip", "video")
    if num_bytes > limit * (1 << 20):
        raise ClientError(
            f"`{path}` is a {what} of {num_bytes / (1 << 20):.1f} MiB; at most {limit:g} MiB are accepted.",
            status=413,
            code=f"{kind}_too_large",
            param=path,
        )


def _check_num_media(parts: Sequence[TextPart | ImagePart | VideoPart], path: str, settings: Settings) -> None:
    num_clips = sum(isinstance(part, VideoPart) for part in parts)
    num_media = sum(isinstance(part, ImagePart) for part in parts) + num_clips
    if num_media > settings.max_images:
        raise ClientError(
            f"`{path}` holds {num_media} {'pictures and clips' if num_clips else 'pictures'}; at most "
            f"{settings.max_images} are accepted in one request.",
            code="too_many_images",
            param=path,
        )


def messages_of(value: object, settings: Settings) -> list[Message]:
    """Messages that came as Python values (dictionaries) and not as JSON; the same rules hold.

    Raises:
        ClientError: Naming the place.
    """
    try:
        return _messages(msgspec.convert(value, list[ChatMessage]), settings)
    except msgspec.ValidationError as error:
        raise of_validation(error, ChatMessage, root="messages") from None


# ---- captions -------------------------------------------------------------------------------------------------------


def caption_call(
    fields: CaptionRequest, files: list[tuple[str, bytes]], settings: Settings, session_header: str | None = None
) -> Call:
    """The call that a caption request asks for.

    Args:
        fields: From JSON, a form, or the query.
        files: Uploaded pictures and clips with the field names that they came under; none with JSON.
        settings: Limits.
        session_header: `x-session-id`.
    """
    _check_model(fields.model, settings)
    preset = None if fields.preset is None else find_preset(fields.preset, settings.presets)
    if preset is not None:
        fields = with_preset(fields, preset)
    detail = fields.detail or "auto"
    looked_at = _looked_at(fields.fps, fields.max_frames, settings)
    if fields.image is not None and fields.images is not None:
        raise invalid("images", "`image` and `images` were both given; expected one of them.")
    media: list[ImagePart | VideoPart] = []
    media_fields: list[str] = []
    for i, (name, data) in enumerate(files):
        path = name if name not in media_fields else f"{name}[{i}]"
        is_clip = name == "video" or is_video(data[:64])
        if not data:
            kind = ("clip", "video") if is_clip else ("picture", "image")
            raise ClientError(f"`{path}` holds no {kind[0]}: it is empty.", code=f"{kind[1]}_empty", param=path)
        check_size(len(data), path, settings, is_clip=is_clip)
        media.append(msgspec.structs.replace(looked_at, data=data) if is_clip else ImagePart(data=data, detail=detail))
        media_fields.append(path)
    if fields.image is not None:
        media.append(_image(fields.image, detail, "image", bare=True))
        media_fields.append("image")
    for i, url in enumerate(fields.images or []):
        media.append(_image(url, detail, f"images[{i}]", bare=True))
        media_fields.append(f"images[{i}]")
    if fields.video is not None:
        data_url = _data_url(fields.video, "video", "clip", bare=True)
        media.append(msgspec.structs.replace(looked_at, data_url=data_url))
        media_fields.append("video")
    if not media:
        raise ClientError(
            "There is no picture in the request: send it as a form file, as the body with an image/* content type, or "
            "as JSON in `image`; a clip likewise, with video/* and `video`.",
            code="image_missing",
            param="image",
        )
    _check_num_media(media, "images", settings)
    num_clips = sum(isinstance(part, VideoPart) for part in media)
    _check_clip_fields(fields, num_clips, len(media))
    if preset is not None:
        prompt = preset.prompt_for(fields.prompt)
    else:
        prompt = (DEFAULT_CLIP_PROMPT if num_clips else DEFAULT_PROMPT) if fields.prompt is None else fields.prompt
    return Call(
        messages=[Message("user", [*media, TextPart(prompt)])],
        options=generation_options(fields),
        stream=bool(fields.stream),
        format=fields.format or "json",
        segmenting=Segmenting(fields.segment_s or 0.0) if fields.format in TIMED_FORMATS else None,
        media_fields=tuple(media_fields),
        session_id=_session_id(fields.session_id, session_header),
        priority=fields.priority or 0,
    )


def _check_clip_fields(fields: CaptionRequest, num_clips: int, num_media: int) -> None:
    """Fields that mean nothing for what was sent are refused, not ignored."""
    for name in ("fps", "max_frames"):
        if getattr(fields, name) is not None and not num_clips:
            raise invalid(name, f"`{name}` is for clips, and there is none in the request.")
    if fields.detail is not None and num_clips == num_media:
        raise invalid("detail", "`detail` is for pictures, and there is none in the request.")
    if fields.format in TIMED_FORMATS:
        if (num_clips, num_media) != (1, 1):
            raise invalid("format", f"`format` {fields.format} is for one clip; the request holds something else.")
        bounded("segment_s", fields.segment_s, 0, 86_400, above_low=True)
    elif fields.segment_s is not None:
        raise invalid("segment_s", f"`segment_s` is for `format` {' or '.join(TIMED_FORMATS)}.")


def caption_from_json(body: bytes | bytearray) -> CaptionRequest:
    """Decode a JSON caption request."""
    return decode(_caption_decoder, body)


def caption_from_text(pairs: list[tuple[str, str]]) -> CaptionRequest:
    """Convert form fields or query parameters, which are all text; `stop` and `stop_token_ids` may repeat.

    Raises:
        ClientError: An unknown field, one given twice, or a value that cannot be.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in {"image", "images", "video"}:
            example = "clip.mp4" if name == "video" else "picture.jpg"
            raise invalid(name, f"`{name}` is text; expected a file (curl -F {name}=@{example}), or a JSON body.")
        if name not in CAPTION_FIELDS:
            raise unknown(name, CAPTION_FIELDS)
        if name in {"stop", "stop_token_ids"}:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise invalid(name, f"`{name}` was given twice.")
        elif name in SHAPE_FIELDS:
            values[name] = shape_from_text(name, text)
        else:
            values[name] = text
    try:
        return msgspec.convert(values, CaptionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise of_validation(error, CaptionRequest) from None


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


def _session_id(given: str | None, header: str | None) -> str:
    """The body's word counts more than the header's."""
    session_id = given if given is not None else header
    if not session_id:
        return ""
    if not _SESSION_ID.fullmatch(session_id):
        name = "session_id" if given is not None else "x-session-id"
        raise invalid(name, f"`{name}` is no session id; expected 1 to 128 printable ASCII characters without spaces.")
    return session_id


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Equality that tells 1 from true."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in harmless)


def _shown(value: Any) -> str:
    return json.dumps(value)
