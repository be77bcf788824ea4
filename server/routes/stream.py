"""`GET /v1/stream`: live sessions over WebSocket, subprotocol `vlm.stream.v1`; and the tickets that web pages need."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from preprocess.errors import ClientError
from server.faults import error_response
from server.routes.upgrade import upgrade_required
from server.stream.connection import PROTOCOL, Connection
from server.stream.hub import Hub
from server.stream.session import Session
from server.stream.tickets import LIFETIME_S, Tickets


class Ticket(msgspec.Struct, frozen=True):
    """A ticket for one WebSocket: offer it as the subprotocol ``vlm.ticket.<ticket>``."""

    ticket: str
    expires_in_s: float = LIFETIME_S


def router(hub: Hub, tickets: Tickets) -> APIRouter:
    """The routes, bound to the sessions and tickets of an application."""
    routes = APIRouter()

    async def stream(websocket: WebSocket) -> None:
        if PROTOCOL not in websocket.scope.get("subprotocols", []):
            refusal = ClientError(
                f"The subprotocol {PROTOCOL!r} was not offered; this is the only one spoken here "
                f"(Sec-WebSocket-Protocol: {PROTOCOL}).",
                code="unsupported_subprotocol",
            )
            await websocket.send_denial_response(error_response(refusal))
            return
        await websocket.accept(subprotocol=PROTOCOL)
        await Connection(websocket, hub, Session).run()

    async def not_upgraded(request: Request) -> Response:
        return upgrade_required(request.url.path, f"subprotocol {PROTOCOL}")

    async def create_ticket(request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(msgspec.json.encode(Ticket(tickets.issue())), headers=headers, media_type="application/json")

    routes.add_api_websocket_route("/v1/stream", stream)
    routes.add_route("/v1/stream", not_upgraded, methods=["GET"])
    routes.add_route("/v1/stream/tickets", create_ticket, methods=["POST"])
    return routes
