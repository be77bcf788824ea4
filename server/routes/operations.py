"""What people and machines ask about the server itself: models, health, readiness, metrics, version."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import ClientError
from server.routes.context import Context

_GET = ["GET", "HEAD"]


class Model(msgspec.Struct, frozen=True):
    """A model as OpenAI lists it."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "beholder"


class ModelList(msgspec.Struct, frozen=True):
    """The body of `GET /v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"


class Readiness(msgspec.Struct, frozen=True):
    """The body of `GET /ready`. `children`: ``"up"`` or why not, by process."""

    status: Literal["ready", "starting", "draining"]
    children: dict[str, str]


def router(context: Context) -> APIRouter:
    """The routes, bound to a context."""
    routes = APIRouter()

    async def list_models(request: Request) -> Response:
        return _json(ModelList([Model(name, context.created_s) for name in context.settings.model_names]))

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in context.settings.model_names:
            raise ClientError(
                f"The model {name[:200]!r} is not served here; expected {' or '.join(context.settings.model_names)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return _json(Model(name, context.created_s))

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        service = context.service
        children = {name: "up" if child.up else child.reason or "starting" for name, child in service.state().items()}
        if service.draining:
            return _json(Readiness("draining", children), status_code=503)
        if not service.ready:
            return _json(Readiness("starting", children), status_code=503)
        return _json(Readiness("ready", children))

    async def metrics(request: Request) -> Response:
        return Response(context.metrics.exposition(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def version(request: Request) -> Response:
        return _json({"version": context.version})

    for path, endpoint in (
        ("/v1/models", list_models),
        ("/v1/models/{name:path}", get_model),
        ("/health", health),
        ("/ready", ready),
        ("/metrics", metrics),
        ("/version", version),
    ):
        routes.add_route(path, endpoint, methods=_GET)
    return routes


def _json(body: object, status_code: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(body), status_code, headers, media_type="application/json")
