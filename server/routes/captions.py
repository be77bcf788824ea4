"""`POST /v1/captions`: a picture or clip in, a description out; made for curl and for batch programs.

The picture comes as form files, as the raw body, or as base64 in JSON; everything else as form fields, query parameters
or JSON members of the same names.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import BeholderError, ClientError
from preprocess.wire import ClipInfo, Delta, ImageInfo
from server.intake import Call, caption_call, caption_from_json, caption_from_text
from server.json_body import read_json
from server.request_models import CaptionRequest
from server.routes.answering import Answer, Arrival, Timings, collect, start
from server.routes.chat import CompletionUsage, completion_usage
from server.routes.connection import body_chunks, read_body
from server.routes.context import Context
from server.routes.form import Form, read_form
from server.routes.streaming import DONE, Stream, event_of
from server.routes.timed_captions import timed_captions

_PLACE: Final = re.compile(r"messages\[0\]\.content\[(\d+)\]")
_RAW_TYPES: Final = ("image/", "video/", "application/octet-stream")


class Caption(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and the last event of its stream. `image` and `clip` are there when there is exactly one."""

    id: str
    object: Literal["caption"] = "caption"
    created: int
    model: str
    text: str
    image: ImageInfo | msgspec.UnsetType = msgspec.UNSET
    images: list[ImageInfo]
    clip: ClipInfo | msgspec.UnsetType = msgspec.UNSET
    clips: list[ClipInfo] | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str
    usage: CompletionUsage
    timings: Timings


class CaptionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: the next piece of text."""

    id: str
    object: Literal["caption.chunk"] = "caption.chunk"
    created: int
    model: str
    text: str


def router(context: Context) -> APIRouter:
    """The route, bound to a context."""
    routes = APIRouter()

    async def create_caption(request: Request) -> Response:
        arrival = Arrival(context)
        async with arrival.time_limit():
            call = await _read_call(request, context)
        try:
            answer = await start(context, request, call, arrival)
        except BeholderError as error:
            error.param = own_field(error.param, call)
            raise
        caption_id = f"caption-{secrets.token_hex(12)}"
        if call.segmenting is not None:
            return await timed_captions(caption_id, request, call, answer)
        if call.stream:
            if call.format == "text":
                return Stream(answer, _Text(), "text/plain")
            return Stream(answer, _Events(caption_id, answer))
        return await _whole(caption_id, request, call, answer)

    routes.add_route("/v1/captions", create_caption, methods=["POST"])
    return routes


def own_field(param: str | None, call: Call) -> str | None:
    """The field of the caption request that a place in the chat made of it stands for."""
    place = _PLACE.fullmatch(param or "")
    if place is None:
        return param
    index = int(place[1])
    return call.media_fields[index] if index < len(call.media_fields) else "prompt"


async def _read_call(request: Request, context: Context) -> Call:
    """Read a request in any of its three shapes.

    Raises:
        ClientError: It is none of them, or its fields are not right.
    """
    settings = context.settings
    content_type = request.headers.get("content-type", "").strip()
    media_type = content_type.partition(";")[0].strip().lower()
    session_header = request.headers.get("x-session-id")
    query = request.query_params.multi_items()
    if media_type == "application/json":
        asked = await read_json(request, settings.max_body_bytes, context.bodies)

        def from_json(raw: bytes) -> Call:
            fields = _with_query(caption_from_json(raw), caption_from_text(query), query)
            return caption_call(fields, [], settings, session_header)

        return await asked.read(from_json, lambda call: call.messages)
    form = Form()
    if media_type == "multipart/form-data":
        chunks = body_chunks(request, settings.max_body_bytes, context.bodies)
        async with contextlib.aclosing(chunks):
            form = await read_form(content_type, chunks, max_files=settings.max_images)
    elif media_type.startswith(_RAW_TYPES):
        data = await read_body(request, settings.max_body_bytes, context.bodies)
        form.files.append(("video" if media_type.startswith("video/") else "body", data))
    else:
        raise ClientError(
            f"The content type {media_type[:100]!r} is not understood here; expected multipart/form-data (curl -F "
            "file=@picture.jpg), image/* or video/* (curl -H 'Content-Type: image/jpeg' --data-binary @picture.jpg) or "
            "application/json.",
            status=415,
            code="unsupported_media_type",
        )
    return caption_call(caption_from_text(form.fields + query), form.files, settings, session_header)


def _with_query(body: CaptionRequest, query: CaptionRequest, pairs: list[tuple[str, str]]) -> CaptionRequest:
    """A JSON request with the members that its URL adds."""
    for name, _ in pairs:
        if getattr(body, name) is not None:
            raise ClientError(f"`{name}` was given twice.", code="invalid_value", param=name)
    return msgspec.structs.replace(body, **{name: getattr(query, name) for name, _ in pairs})


async def _whole(caption_id: str, request: Request, call: Call, answer: Answer) -> Response:
    pieces: list[str] = []
    finish_reason = ""

    def on_delta(index: int, delta: Delta) -> None:
        nonlocal finish_reason
        pieces.append(delta.text)
        finish_reason = delta.finish_reason or finish_reason

    await collect(request, answer, on_delta)
    text = "".join(pieces)
    if call.format == "text":
        return Response(text + "\n", media_type="text/plain")
    return Response(
        msgspec.json.encode(_caption(caption_id, answer, text, finish_reason)), media_type="application/json"
    )


class _Events:
    """A caption as events; see `server.routes.streaming.Told`."""

    def __init__(self, caption_id: str, answer: Answer) -> None:
        self._id = caption_id
        self._answer = answer
        self._encode = msgspec.json.Encoder().encode
        self._texts: list[str] = []
        self._finish_reason = ""

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def add(self, index: int, delta: Delta) -> bytes:
        """The new text."""
        self._finish_reason = delta.finish_reason or self._finish_reason
        if not delta.text:
            return b""
        self._texts.append(delta.text)
        created, model = self._answer.arrival.unix_s, self._answer.context.settings.model_name
        return event_of(self._encode(CaptionChunk(id=self._id, created=created, model=model, text=delta.text)))

    def end(self) -> bytes:
        """The whole."""
        whole = _caption(self._id, self._answer, "".join(self._texts), self._finish_reason)
        return event_of(self._encode(whole)) + DONE


class _Text:
    """The text alone; see `server.routes.streaming.Told`."""

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def add(self, index: int, delta: Delta) -> bytes:
        """The new text."""
        return delta.text.encode("utf-8", "replace")

    def end(self) -> bytes:
        """A line's."""
        return b"\n"


def _caption(caption_id: str, answer: Answer, text: str, finish_reason: str) -> Caption:
    clips = list(answer.generation.clips)
    return Caption(
        id=caption_id,
        created=answer.arrival.unix_s,
        model=answer.context.settings.model_name,
        text=text,
        images=answer.images,
        image=answer.images[0] if len(answer.images) == 1 else msgspec.UNSET,
        clips=clips or msgspec.UNSET,
        clip=clips[0] if len(clips) == 1 else msgspec.UNSET,
        finish_reason=finish_reason,
        usage=completion_usage(answer),
        timings=answer.timings(),
    )
