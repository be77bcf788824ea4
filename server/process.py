"""Process: the server. Runs the HTTP application on the launcher's listening socket, and the dispatcher's inbox.

No torch, no decoding, no tokenising here: everything that can take long is another process's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
import zmq

from preprocess.child import BEAT_EVERY_S, Child, push_socket
from preprocess.errors import BeholderError
from preprocess.prepare import max_pixel_bytes_per_image, pixel_bytes_per_clip
from server.app import create_app
from server.dispatcher import Dispatcher
from server.garbage import Garbage
from server.http_connection import MAX_HEAD_BYTES, HttpConnection
from server.routes import no_ui
from server.settings import Settings
from server.stream.websocket import WebSocketProtocol, log_no_faults_of_clients

MAX_WAITING_BYTES = 512 << 20
"""Encoded pictures that may wait for a worker, all requests together."""
COPIED_BYTES = 256 << 10
"""Pictures up to this size are copied into their message, for which they take no longer. What is not copied is given
back later by a thread of pyzmq's, which would take Python's lock from those who write to streams."""
CANCEL_AFTER_GRACE_S = 2
"""What streams get to send their error after the grace time has ended them."""


def main() -> None:
    """Serve until drained or ended by the launcher."""
    child = Child.from_stdin()
    settings = child.config(Settings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        dispatcher = _dispatcher(child, settings)
    except BeholderError as error:
        child.fail(error.message)
    except Exception as error:
        child.fail_unforeseen(error)
    asyncio.run(_serve(child, settings, dispatcher))


def _dispatcher(child: Child, settings: Settings) -> Dispatcher:
    links: dict[str, zmq.Socket[bytes]] = {}

    def send(name: str, *frames: bytes) -> None:
        if name not in links:
            links[name] = push_socket(child.context, child.boot.socket_folder, name)
            links[name].copy_threshold = COPIED_BYTES
        links[name].send_multipart(frames, copy=False)

    return Dispatcher(
        send,
        num_workers=settings.num_workers,
        arena_size=child.boot.arena_size,
        pixel_bytes_per_image=max_pixel_bytes_per_image(settings.preprocess_config()),
        pixel_bytes_per_clip=pixel_bytes_per_clip(settings.preprocess_config()),
        max_waiting=settings.max_waiting,
        max_waiting_bytes=MAX_WAITING_BYTES,
    )


class _HttpServer(uvicorn.Server):
    """Uvicorn under a launcher: says when it listens; ends when the launcher drains it, not by signals."""

    def __init__(self, config: uvicorn.Config, child: Child) -> None:
        super().__init__(config)
        self._child = child

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._child.ready()


async def _serve(child: Child, settings: Settings, dispatcher: Dispatcher) -> None:
    loop = asyncio.get_running_loop()
    app = create_app(settings, dispatcher)
    if settings.ui:
        from ui.app import mount  # the only step of server towards ui: this process puts the two together

        mount(app, child.boot.socket_folder)
    else:
        app.include_router(no_ui.router())
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_level="error",  # its warnings are clients' faults, as many as they like to make
        access_log=False,
        server_header=False,
        ws=WebSocketProtocol,
        ws_max_size=settings.stream_message_bytes,
        ws_per_message_deflate=False,  # pictures do not get smaller
        timeout_graceful_shutdown=max(1, round(settings.grace_s)) + CANCEL_AFTER_GRACE_S,
        timeout_keep_alive=75,
        ssl_certfile=settings.tls_certificate or None,
        ssl_keyfile=settings.tls_key or None,
    )
    server = _HttpServer(config, child)
    log_no_faults_of_clients()

    def drain(grace_s: float) -> None:
        server.should_exit = True
        app.state.streams.drain(grace_s)
        loop.call_later(grace_s, dispatcher.fail_all)

    def beat() -> None:
        child.beat()
        loop.call_later(BEAT_EVERY_S, beat)

    beat()
    dispatcher.on_drain = drain
    dispatcher.on_step = Garbage().look
    dispatcher.children.on_use = child.uses
    inbox = child.bind("server")

    def receive() -> None:  # the descriptor tells of a change only once: take all there is
        while True:
            try:
                message = inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            dispatcher.receive(message)

    loop.add_reader(inbox, receive)
    loop.call_soon(receive)
    await server.serve(sockets=[socket.socket(fileno=child.boot.listen_fd)])


if __name__ == "__main__":
    main()
