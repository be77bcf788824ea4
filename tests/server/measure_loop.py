"""Measures what the server's event loop does for streams and for a picture's request, in processor time of its thread.

    python tests/server/measure_loop.py [--streams 32] [--steps 300] [--picture-kib 200]

The application is the real one, over connections of the machine's own; workers, engine and detokenizer are scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import socket
import statistics
import time
from asyncio import events
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn

from preprocess.wire import (
    Admitted,
    ChildState,
    Delta,
    Deltas,
    DetokenizerReset,
    EngineInput,
    EngineRequest,
    Prepared,
    Reset,
    ResetDone,
    SamplingParams,
    TextOptions,
)
from preprocess.wire.framing import job_of
from server.app import create_app
from server.dispatcher import Dispatcher
from server.http_connection import MAX_HEAD_BYTES, HttpConnection
from server.settings import Settings


class Loop:
    """A server on this thread's event loop. `sent` holds what other processes would get."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[bytes, ...]]] = []
        self.dispatcher = Dispatcher(
            lambda name, *frames: self.sent.append((name, frames)),
            num_workers=2,
            arena_size=64 << 20,
            pixel_bytes_per_image=4 << 20,
            max_waiting=256,
            max_waiting_bytes=512 << 20,
        )
        self.port = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls) -> AsyncIterator[Loop]:
        """Until it is left."""
        loop = cls()
        loop._bring_up()
        app = create_app(Settings(), loop.dispatcher)
        config = uvicorn.Config(
            app, http=HttpConnection, h11_max_incomplete_event_size=MAX_HEAD_BYTES, log_level="critical", lifespan="off"
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            loop.port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            yield loop
            server.should_exit = server.force_exit = True
            await serving

    def tell(self, *messages: msgspec.Struct) -> None:
        """Words of other processes."""
        for message in messages:
            self.dispatcher.receive(msgspec.msgpack.encode(message))

    def _bring_up(self) -> None:
        for role in ("engine", "detokenizer"):
            self.tell(ChildState(role, 0, up=True))
        self.tell(*(ChildState("preprocess", index, up=True) for index in range(2)))
        reset = msgspec.msgpack.decode(self.sent.pop()[1][0], type=EngineInput)
        assert isinstance(reset, Reset)
        self.tell(ResetDone(reset.epoch), DetokenizerReset(reset.epoch))

    async def ask(self, request: bytes) -> socket.socket:
        """A client that sends a request, in a thread; returns once a worker has been given its job."""
        client = socket.create_connection(("127.0.0.1", self.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)  # nobody reads while is measured
        await asyncio.to_thread(client.sendall, request)
        while not self.sent:
            await asyncio.sleep(0.001)
        return client

    async def admit(self) -> str:
        """The engine takes the request of the worker's job; its id there."""
        job = job_of(self.sent.pop()[1])
        request_id = job.request_id.partition("/")[0]
        request = EngineRequest(request_id, bytes(8 * 5), [], SamplingParams(1024), TextOptions(), 0.0)
        self.tell(Prepared(job.request_id, request, [], 0, 1.0, 2.0))
        while not self.sent:
            await asyncio.sleep(0.001)
        self.sent.clear()
        self.tell(Admitted(f"{request_id}.0"))
        await asyncio.sleep(0.02)
        return f"{request_id}.0"


def request_of(content: object, **fields: object) -> bytes:
    """A chat's, streamed."""
    body = msgspec.json.encode({"messages": [{"role": "user", "content": content}], "stream": True, **fields})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def picture_of(num_bytes: int) -> list[dict[str, Any]]:
    """A question about a picture of about so many characters of base64."""
    url = "data:image/jpeg;base64," + "/9j4" * (num_bytes // 4)
    return [{"type": "text", "text": "What is in it?"}, {"type": "image_url", "image_url": {"url": url}}]


@contextlib.contextmanager
def callbacks() -> Iterator[list[float]]:
    """Seconds of processor time of each callback that any event loop of this process runs meanwhile."""
    found: list[float] = []
    run = events.Handle._run

    def timed(self: events.Handle) -> None:
        started_s = time.thread_time()
        run(self)
        found.append(time.thread_time() - started_s)

    events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        events.Handle._run = run  # type: ignore[method-assign]


async def of_picture(num_bytes: int) -> list[float]:
    """Seconds of each callback from a request's first byte to its job's way to a worker."""
    async with Loop.serving() as loop:
        gc.collect()
        gc.disable()
        try:
            with callbacks() as found:
                client = await loop.ask(request_of(picture_of(num_bytes)))
        finally:
            gc.enable()
        client.close()
        return found


async def of_steps(streams: int, steps: int) -> list[float]:
    """Seconds that each step's events take until all streams have written theirs."""
    async with Loop.serving() as loop:
        clients, ids = [], []
        for _ in range(streams):
            clients.append(await loop.ask(request_of("x", return_token_ids=True)))
            ids.append(await loop.admit())
        gc.collect()
        gc.freeze()
        words = ("lighthouse", " the", " people", " who", " live", " in", " it")
        found: list[float] = []
        for step in range(steps):
            deltas = [Delta(request_id, words[(step + i) % 7], [1000 + step]) for i, request_id in enumerate(ids)]
            message = msgspec.msgpack.encode(Deltas(deltas))
            started_s = time.thread_time()
            loop.dispatcher.receive(message)
            for _ in range(4):  # turns in which tasks would write
                await asyncio.sleep(0)
            found.append(time.thread_time() - started_s)
        for client in clients:
            client.close()
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture-kib", type=int, default=200)
    given = parser.parse_args(arguments)
    steps = [each * 1e3 for each in asyncio.run(of_steps(given.streams, given.steps))]
    deciles = statistics.quantiles(steps, n=10)
    print(
        f"a step's events of {given.streams} streams: {deciles[4]:.2f} ms (p10 {deciles[0]:.2f}, p90 {deciles[8]:.2f})"
    )
    found = [asyncio.run(of_picture(given.picture_kib << 10)) for _ in range(10)]
    sums, largest = ([statistics.median(map(of, found)) * 1e3] for of in (sum, max))
    print(f"a request of {given.picture_kib} KiB: {sums[0]:.2f} ms, the largest of its callbacks {largest[0]:.2f}")


if __name__ == "__main__":
    main()
