"""`POST /v1/images`: upload a picture once, name it by its id in as many requests as you like."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import ClientError
from preprocess.formats import detect
from server.image_store import StoredImage
from server.intake import check_size
from server.routes.connection import body_chunks, read_body
from server.routes.context import Context
from server.routes.form import read_form

_RAW_TYPES: Final = ("image/", "application/octet-stream")


class UploadedImage(msgspec.Struct, frozen=True):
    """What is told of a stored picture. Times are Unix times in seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    object: Literal["image"] = "image"


class DeletedImage(msgspec.Struct, frozen=True):
    """The body of `DELETE /v1/images/{id}`."""

    id: str
    deleted: bool
    object: Literal["image"] = "image"


def router(context: Context) -> APIRouter:
    """The routes, bound to a context."""
    routes = APIRouter()
    store = context.images

    def told(image: StoredImage, status_code: int = 200) -> Response:
        body = UploadedImage(image.id, len(image.data), int(image.created_s), int(image.used_s + store.ttl_s))
        return Response(msgspec.json.encode(body), status_code, media_type="application/json")

    async def upload(request: Request) -> Response:
        if not store.max_bytes:
            raise ClientError("This server keeps no uploads (--image-store-mb 0).", status=404, code="uploads_off")
        data = await _read(request, context)
        check_size(len(data), "file", context.settings)
        detect(data)
        image_id = await asyncio.to_thread(store.id_of, data)
        return told(store.put(image_id, data), 201)

    async def show(request: Request) -> Response:
        return told(store.get(request.path_params["image_id"]))

    async def delete(request: Request) -> Response:
        image_id = request.path_params["image_id"]
        store.get(image_id)
        body = DeletedImage(image_id, store.delete(image_id))
        return Response(msgspec.json.encode(body), media_type="application/json")

    for path, endpoint, methods in (
        ("/v1/images", upload, ["POST"]),
        ("/v1/images/{image_id}", show, ["GET", "HEAD"]),
        ("/v1/images/{image_id}", delete, ["DELETE"]),
    ):
        routes.add_route(path, endpoint, methods=methods)
    return routes


async def _read(request: Request, context: Context) -> bytes:
    """The picture's bytes, from a form's one file or the raw body.

    Raises:
        ClientError: It is neither.
    """
    content_type = request.headers.get("content-type", "").strip()
    media_type = content_type.partition(";")[0].strip().lower()
    limit = context.settings.max_body_bytes
    if media_type == "multipart/form-data":
        chunks = body_chunks(request, limit, context.bodies)
        async with contextlib.aclosing(chunks):
            form = await read_form(content_type, chunks, max_files=1)
        if form.fields:
            name = form.fields[0][0]
            raise ClientError(f"The field `{name[:200]}` is unknown.", code="unknown_parameter", param=name[:200])
        data = form.files[0][1] if form.files else b""
    elif media_type.startswith(_RAW_TYPES):
        data = await read_body(request, limit, context.bodies)
    else:
        raise ClientError(
            f"The content type {media_type[:100]!r} is not understood here; expected multipart/form-data (curl -F "
            "file=@picture.jpg) or image/* (curl -H 'Content-Type: image/jpeg' --data-binary @picture.jpg).",
            status=415,
            code="unsupported_media_type",
        )
    if not data:
        raise ClientError("There is no picture in the request.", code="image_missing", param="file")
    return data
