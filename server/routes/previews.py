"""`POST /v1/previews`: what the model would see of a picture or clip: turned, resized, cut, and at what cost in tokens.

No model runs for it. The pixels in the answer are those that the vision encoder would get.
"""

from __future__ import annotations

import base64
import contextlib
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import BeholderError, ClientError
from preprocess.wire import ClipInfo, Detail, ImageInfo, ImagePart, Previewed, SeenTile, TextPart, VideoPart
from server.complaints import decode, of_validation, unknown
from server.intake import Call, caption_call
from server.json_body import read_json
from server.request_models import CaptionRequest
from server.routes.answering import Arrival
from server.routes.captions import own_field
from server.routes.connection import body_chunks, read_body, while_connected
from server.routes.context import Context
from server.routes.form import Form, read_form

_RAW_TYPES: Final = ("image/", "video/", "application/octet-stream")


class PreviewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a JSON request; a form or the query has the same fields but for the media themselves."""

    model: str | None = None
    image: str | None = None
    video: str | None = None
    detail: Detail | None = None
    fps: float | None = None
    max_frames: int | None = None


_FIELDS: Final = tuple(
    field.name for field in msgspec.structs.fields(PreviewRequest) if field.name not in {"image", "video"}
)
_decoder: Final = msgspec.json.Decoder(PreviewRequest)


class Tile(msgspec.Struct, frozen=True):
    """What the vision encoder gets at once. `row`, `column` from 1; 0 and 0: the whole picture. `url`: a data URL."""

    width: int
    height: int
    url: str
    row: int
    column: int


class Frame(msgspec.Struct, frozen=True):
    """A frame of a clip that is looked at."""

    width: int
    height: int
    url: str
    time_s: float


class ImagePreview(msgspec.Struct, frozen=True, kw_only=True):
    """Of a picture: a grid of `rows` × `columns` tiles and then the whole, or the whole alone."""

    object: Literal["preview"] = "preview"
    model: str
    image: ImageInfo
    rows: int
    columns: int
    tiles: list[Tile]


class ClipPreview(msgspec.Struct, frozen=True, kw_only=True):
    """Of a clip."""

    object: Literal["preview"] = "preview"
    model: str
    clip: ClipInfo
    frames: list[Frame]


def router(context: Context) -> APIRouter:
    """The route, bound to a context."""
    routes = APIRouter()

    async def create_preview(request: Request) -> Response:
        arrival = Arrival(context)
        async with arrival.time_limit():
            call = await _read_call(request, context)
            try:
                part = _only_part(call, context)
                shown = await while_connected(request.receive, context.service.preview(part))
            except BeholderError as error:
                error.param = own_field(error.param, call) or call.media_fields[0]
                raise
        body = _body(shown, context.settings.model_name)
        return Response(msgspec.json.encode(body), media_type="application/json")

    routes.add_route("/v1/previews", create_preview, methods=["POST"])
    return routes


async def _read_call(request: Request, context: Context) -> Call:
    """The caption call with the same media, so that the same rules hold.

    Raises:
        ClientError: The request has another shape, or its fields are not right.
    """
    settings = context.settings
    content_type = request.headers.get("content-type", "").strip()
    media_type = content_type.partition(";")[0].strip().lower()
    query = request.query_params.multi_items()
    form = Form()
    if media_type == "application/json":
        body = await read_json(request, settings.max_body_bytes, context.bodies)
        if query:
            raise ClientError(
                f"`{query[0][0][:200]}` belongs into the JSON body.", code="invalid_value", param=query[0][0][:200]
            )
        return await body.read(lambda raw: _caption(decode(_decoder, raw), form, context), lambda call: call.messages)
    if media_type == "multipart/form-data":
        chunks = body_chunks(request, settings.max_body_bytes, context.bodies)
        async with contextlib.aclosing(chunks):
            form = await read_form(content_type, chunks, max_files=1)
    elif media_type.startswith(_RAW_TYPES):
        data = await read_body(request, settings.max_body_bytes, context.bodies)
        form.files.append(("video" if media_type.startswith("video/") else "body", data))
    else:
        raise ClientError(
            f"The content type {media_type[:100]!r} is not understood here; expected multipart/form-data (curl -F "
            "file=@picture.jpg), image/*, video/* or application/json.",
            status=415,
            code="unsupported_media_type",
        )
    return _caption(_from_text(form.fields + query), form, context)


def _from_text(pairs: list[tuple[str, str]]) -> PreviewRequest:
    values: dict[str, str] = {}
    for name, text in pairs:
        if name not in _FIELDS:
            raise unknown(name, _FIELDS)
        if name in values:
            raise ClientError(f"`{name}` was given twice.", code="invalid_value", param=name)
        values[name] = text
    try:
        return msgspec.convert(values, PreviewRequest, strict=False)
    except msgspec.ValidationError as error:
        raise of_validation(error, PreviewRequest) from None


def _caption(asked: PreviewRequest, form: Form, context: Context) -> Call:
    return caption_call(CaptionRequest(**msgspec.structs.asdict(asked)), form.files, context.settings)


def _only_part(call: Call, context: Context) -> ImagePart | VideoPart:
    """The picture or clip of a call; an upload's id has been replaced by the picture."""
    (message,) = context.images.resolve(call.messages)
    parts = [part for part in message.content if not isinstance(part, TextPart)]
    if len(parts) > 1:
        raise ClientError(
            f"The request holds {len(parts)} pictures and clips; a preview is of one.",
            code="too_many_images",
            param=call.media_fields[1],
        )
    return parts[0]


def _body(shown: Previewed, model: str) -> ImagePreview | ClipPreview:
    if shown.clip is not None:
        frames = [Frame(tile.width, tile.height, _url(tile), tile.time_s or 0.0) for tile in shown.tiles]
        return ClipPreview(model=model, clip=shown.clip, frames=frames)
    assert shown.image is not None
    tiles = [Tile(tile.width, tile.height, _url(tile), tile.row, tile.column) for tile in shown.tiles]
    return ImagePreview(model=model, image=shown.image, rows=shown.rows, columns=shown.columns, tiles=tiles)


def _url(tile: SeenTile) -> str:
    return f"data:image/webp;base64,{base64.b64encode(tile.encoded).decode()}"
