"""What stands in the place of the web UI where it was turned off: a 404 that says so."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import ClientError
from server.faults import error_response


def router() -> APIRouter:
    """The routes of the page."""
    routes = APIRouter()

    async def refuse(request: Request) -> Response:
        return error_response(
            ClientError(
                "This server was started without its web UI (--no-ui, or BEHOLDER_UI=off); the API is below /v1.",
                status=404,
                code="ui_off",
            )
        )

    for path in ("/", "/ui", "/ui/{rest:path}"):
        routes.add_route(path, refuse, methods=["GET", "HEAD"])
    return routes
