"""`GET /v1/presets`: prompts, sampling and shapes that requests can name in `preset`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.presets import Preset, find_preset, load_presets
from server.routes.context import Context


class ListedPreset(msgspec.Struct, frozen=True, omit_defaults=True):
    """One preset."""

    id: str
    title: str
    description: str
    prompt: str
    sampling: dict[str, Any]
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class PresetList(msgspec.Struct, frozen=True):
    """The body of `GET /v1/presets`."""

    data: list[ListedPreset]
    object: Literal["list"] = "list"


def router(context: Context) -> APIRouter:
    """The routes, bound to a context."""
    routes = APIRouter()
    folder = context.settings.presets

    async def list_presets(request: Request) -> Response:
        return _json(PresetList([_listed(name, preset) for name, preset in load_presets(folder).items()]))

    async def get_preset(request: Request) -> Response:
        name = request.path_params["name"]
        return _json(_listed(name, find_preset(name, folder)))

    for path, endpoint in (("/v1/presets", list_presets), ("/v1/presets/{name}", get_preset)):
        routes.add_route(path, endpoint, methods=["GET", "HEAD"])
    return routes


def _listed(name: str, preset: Preset) -> ListedPreset:
    return ListedPreset(
        name,
        preset.title,
        preset.description,
        preset.prompt,
        preset.sampling,
        preset.response_format,
        preset.structured_outputs,
    )


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
