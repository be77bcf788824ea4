"""Real WebSockets to an application in a thread, over the scripted service of the server's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from serving import PATIENCE_S
from streaming import check_event
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from server.app import create_app
from server.http_connection import HttpConnection
from server.settings import Settings
from server.stream.websocket import WebSocketProtocol

JPEG = b"\xff\xd8 a picture"


class Client:
    """A client that keeps everything it was told."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.checked = socket.subprotocol == "vlm.stream.v1"

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def update(self, **session: Any) -> dict[str, Any]:
        await self.say("session.update", session=session)
        return (await self.until("session.updated"))["session"]  # type: ignore[no-any-return]

    async def frame(self, data: bytes = JPEG, **header: Any) -> None:
        if header:
            encoded = json.dumps(header).encode()
            data = struct.pack(">H", len(encoded)) + encoded + data
        await self.socket.send(data)

    async def next(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), timeout_s))
        if self.checked:
            check_event(event)
        self.events.append(event)
        return event

    async def until(self, kind: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        while (event := await self.next(timeout_s))["type"] != kind:
            pass
        return event

    async def closed(self, timeout_s: float = PATIENCE_S) -> int | None:
        """The close code, after reading what was still sent."""

        async def read_all() -> None:
            with contextlib.suppress(ConnectionClosed):
                async for message in self.socket:
                    self.events.append(json.loads(message))
                    if self.checked:
                        check_event(self.events[-1])

        await asyncio.wait_for(read_all(), timeout_s)
        return self.socket.close_code

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.socket.close()

    def cut(self) -> None:
        """As when a cable is pulled out."""
        self.socket.transport.abort()


class Server:
    """An application served by uvicorn as `server.process` does it."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        self.app = app
        self.hub = app.state.streams
        config = uvicorn.Config(
            app,
            port=0,
            log_level="critical",
            http=HttpConnection,
            ws=WebSocketProtocol,
            ws_max_size=settings.stream_message_bytes,
            ws_per_message_deflate=False,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self.server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(serve())

    def call(self, work: Callable[[], Any]) -> None:
        """Run something on the server's loop."""
        self.loop.call_soon_threadsafe(work)

    async def connect(self, path: str = "/v1/stream", **options: Any) -> Client:
        options.setdefault("subprotocols", ["vlm.stream.v1"])
        options.setdefault("max_size", None)
        options.setdefault("uri", f"ws://127.0.0.1:{self.port}{path}")
        return Client(await connect(**options))

    def stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(PATIENCE_S)


@pytest.fixture
def serve(service: Any) -> Iterator[Callable[..., Server]]:
    """Serves an application with the given options until the test ends."""
    running: list[Server] = []

    def start(**options: object) -> Server:
        settings = Settings.load({"served_model_name": "tiny,alias", "max_images": 8, **options})
        server = Server(create_app(settings, service), settings)
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve()


@pytest.fixture
def run() -> Callable[[Awaitable[None]], None]:
    """Runs a test's coroutine under a limit of time."""

    def run_it(story: Awaitable[None], timeout_s: float = 150) -> None:
        async def limited() -> None:
            await asyncio.wait_for(story, timeout_s)

        asyncio.run(limited())

    return run_it
