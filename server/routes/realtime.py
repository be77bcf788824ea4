"""`GET /v1/realtime`: the text and picture part of the OpenAI Realtime API over WebSocket, for its stock clients."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from preprocess.errors import ClientError
from server.faults import error_response
from server.routes.upgrade import upgrade_required
from server.stream.connection import Connection
from server.stream.hub import Hub
from server.stream.realtime import RealtimeSession

SUBPROTOCOL = "realtime"


def router(hub: Hub) -> APIRouter:
    """The route, bound to the sessions of an application."""
    routes = APIRouter()

    async def realtime(websocket: WebSocket) -> None:
        model = websocket.query_params.get("model")
        names = hub.context.settings.model_names
        if model is not None and model not in names:
            refusal = ClientError(
                f"The model {model[:200]!r} is not served here; expected {' or '.join(names)}.",
                status=404,
                code="model_not_found",
                param="model",
            )
            await websocket.send_denial_response(error_response(refusal))
            return
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        await Connection(websocket, hub, RealtimeSession).run()

    async def not_upgraded(request: Request) -> Response:
        return upgrade_required(request.url.path, "the Realtime API")

    routes.add_api_websocket_route("/v1/realtime", realtime)
    routes.add_route("/v1/realtime", not_upgraded, methods=["GET"])
    return routes
