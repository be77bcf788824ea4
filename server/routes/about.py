"""`GET /v1/server` and `GET /v1/card`: what this server is, what it is set to, and what its model says of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import ClientError
from server.routes.context import Context
from server.settings import OPTIONS, Settings

MAX_CARD_BYTES: Final = 256 << 10
_PRIVATE: Final = frozenset({"port"})
_SHOWN_WORDS: Final = ("device", "dtype", "prefix_cache", "exact_decode")
"""Options that are no numbers and that clients have a use for. Keys and folders are nobody's business."""


class ShownOption(msgspec.Struct, frozen=True):
    """An option of `beholder serve` as it is set."""

    name: str
    value: int | float | str | bool
    unit: str
    help: str


class About(msgspec.Struct, frozen=True):
    """The body of `GET /v1/server`. `created`: Unix time of the start."""

    version: str
    created: int
    models: list[str]
    options: list[ShownOption]
    object: Literal["server"] = "server"


def router(context: Context) -> APIRouter:
    """The routes, bound to a context."""
    routes = APIRouter()
    about = About(
        context.version, context.created_s, list(context.settings.model_names), shown_options(context.settings)
    )

    async def show_server(request: Request) -> Response:
        return Response(msgspec.json.encode(about), media_type="application/json")

    async def show_card(request: Request) -> Response:
        card = await asyncio.to_thread(_read_card, Path(context.settings.model))
        return Response(card, media_type="text/markdown")

    for path, endpoint in (("/v1/server", show_server), ("/v1/card", show_card)):
        routes.add_route(path, endpoint, methods=["GET", "HEAD"])
    return routes


def shown_options(settings: Settings) -> list[ShownOption]:
    """The options that anybody may know: numbers, and the words of `_SHOWN_WORDS`."""
    return [
        ShownOption(name, getattr(settings, name), field.option.unit, field.option.help)
        for name, field in OPTIONS.items()
        if name in _SHOWN_WORDS or (field.kind in (int, float) and name not in _PRIVATE)
    ]


def _read_card(folder: Path) -> bytes:
    """The README.md of the model folder.

    Raises:
        ClientError: 404; it has none.
    """
    try:
        with (folder / "README.md").open("rb") as file:
            return file.read(MAX_CARD_BYTES)
    except OSError:
        raise ClientError("The model's folder has no README.md.", status=404, code="card_not_found") from None
