"""The HTTP/1.1 client of all benchmarks: little of its own time, since that is measured too.

A client that falls behind reads several events at once, and then tells its own pace as the server's: httpx takes 83 µs
of a core an event, and a GPU's server sends 7,000 a second (docs/performance.md). So bytes are stamped and decoded
where they are read, by `asyncio.BufferedProtocol`, a reader wakes once a read, and there is one timer a response: 18
µs. What a reader does with a read takes longer than reading, so readers wake a few at a time, and between them all that
has come is read and stamped. Connections are kept for the next request.

The server is reached directly: no proxy, no redirects.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from server.bench.http_response import ResponseParser

TIMEOUT_S: Final = 600.0
"""How long a server may say nothing."""
SHOWN_BYTES: Final = 500
"""Of the body of a refusal."""
WOKEN_A_TURN: Final = 2
"""Readers that wake before the sockets are looked at again, where few wait: a quarter of many do, since looking takes
its time, too."""
_BUFFER_BYTES: Final = 1 << 16


class _UnheardError(ConnectionError):
    """The connection ended before a byte of the response."""


class HttpClient:
    """Asks one server, over as many connections as are wanted at once.

    Args:
        url: Paths are appended to it.
        headers: Sent with every request.

    Raises:
        RuntimeError: The URL is none of a server, or a header cannot be sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError:  # of the port, of brackets
            port, host = None, ""
        if not host or parts.scheme not in ("http", "https") or not _is_printable(url) or set(url) & set(" @?#"):
            raise RuntimeError(f"{url!r} is no address of a server; expected http://HOST:PORT or https://HOST:PORT")
        for name, value in (headers or {}).items():
            if not _is_printable(value):
                raise RuntimeError(f"{name} is no text that HTTP can send: expected printable ASCII")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/")
        lines = {"Host": parts.netloc, "Accept-Encoding": "identity", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._waking = _Waking()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def get(self, path: str) -> bytes:
        """The body of a resource.

        Raises:
            RuntimeError: The server refused.
            ConnectionError: It was not reached, or not to the end.
        """
        async with self._ask("GET", path, "", b"") as response:
            return await response.body()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Response]:
        """The response to JSON, as it comes. Whoever leaves early closes the connection.

        Raises:
            RuntimeError: The server refused.
            ConnectionError: It was not reached, or not to the end.
        """
        lines = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        async with self._ask("POST", path, lines, body) as response:
            yield response

    @asynccontextmanager
    async def _ask(self, method: str, path: str, lines: str, body: bytes) -> AsyncIterator[Response]:
        path = f"{self._path}/{path.removeprefix('/')}"
        request = f"{method} {path} HTTP/1.1\r\n{self._head}{lines}\r\n".encode("ascii") + body
        connection, response = await self._begun(request)
        try:
            if response.status != 200:
                told = (await response.body())[:SHOWN_BYTES].decode(errors="replace")
                raise RuntimeError(f"{path} answered {response.status}: {told}")
            yield response
        finally:
            if response.keeps_open:
                self._idle.append(connection)
            else:
                connection.abort()

    async def _begun(self, request: bytes) -> tuple[_Connection, Response]:
        """A response whose head has come."""
        while True:
            is_kept = bool(self._idle)
            connection = self._idle.pop() if is_kept else await self._connected()
            try:
                response = connection.ask(request, Response(self._waking))
                await response.head()
                return connection, response
            except _UnheardError:
                connection.abort()
                if not is_kept:  # else the server had given it up meanwhile
                    raise
            except BaseException:
                connection.abort()
                raise

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except (OSError, UnicodeError) as error:  # of names, of TLS, of time
            told = str(error) or "no connection in time"
            raise ConnectionError(f"{self._address} cannot be reached: {told}") from error
        return connection


class Response:
    """One response: iterating tells `time.perf_counter` of each read, and what it added to the body.

    Args:
        waking: Of all readers of a client.

    Raises, in iterating:
        ConnectionError: It did not come to its end.
    """

    def __init__(self, waking: _Waking) -> None:
        self._loop = asyncio.get_running_loop()
        self._waking = waking
        self._parser = ResponseParser()
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: ConnectionError | None = None
        self._heard_s = time.perf_counter()
        self._is_heard = False
        self._clock = self._loop.call_later(TIMEOUT_S, self._look)

    @property
    def status(self) -> int:
        """0 until the head has come."""
        return self._parser.status

    @property
    def keeps_open(self) -> bool:
        """Whether it is complete, and its connection takes another request."""
        return self._parser.is_complete and self._parser.keeps_open and self._error is None

    async def head(self) -> None:
        """Wait for the status."""
        while not self._parser.status:
            await self._more()

    async def body(self) -> bytes:
        """All of it that has not been read."""
        return b"".join([data async for _, data in self])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[float, bytes]:
        while not self._pieces:
            if self._parser.is_complete:
                raise StopAsyncIteration
            await self._more()
        return self._pieces.popleft()

    def feed(self, now_s: float, data: bytes) -> None:
        """Bytes have come."""
        self._heard_s = now_s
        self._is_heard = True
        try:
            body = self._parser.feed(data)
        except ConnectionError as error:
            self.fail(error)
            return
        if body:
            self._pieces.append((now_s, body))
        if self._parser.is_complete:
            self._clock.cancel()
        self._wake()

    def end(self, cause: Exception | None) -> None:
        """The connection has ended."""
        told = f": {cause}" if cause else ""
        try:
            if not self._is_heard:
                raise _UnheardError(f"the server closed the connection without an answer{told}")
            self._parser.end()
        except ConnectionError as error:
            self.fail(error)
        self._clock.cancel()
        self._wake()

    def fail(self, error: ConnectionError) -> None:
        """Nothing more will come; the first reason counts."""
        self._clock.cancel()
        if not self._parser.is_complete:
            self._error = self._error or error
        self._wake()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waking.add(self._waiter)

    def _look(self) -> None:
        """One timer a response, not one a read."""
        left_s = self._heard_s + TIMEOUT_S - time.perf_counter()
        if left_s > 0:
            self._clock = self._loop.call_later(left_s, self._look)
        else:
            self.fail(ConnectionError(f"the server said nothing for {TIMEOUT_S:.0f} s"))


class _Waking:
    """Readers for whom something has come, in that order, a few in a turn of the event loop."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    def add(self, waiter: asyncio.Future[None]) -> None:
        """One that waits; it may stand in the line already."""
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        for waiter in [self._waiters.popleft() for _ in range(self._num_woken())]:
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            asyncio.get_running_loop().call_soon(self._wake)

    def _num_woken(self) -> int:
        return min(max(WOKEN_A_TURN, len(self._waiters) // 4), len(self._waiters))


class _Connection(asyncio.BufferedProtocol):
    """One response at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None  # None: before and after
        self._response: Response | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def ask(self, request: bytes, response: Response) -> Response:
        """Send a request; `response` is told what comes."""
        self._response = response
        if self._transport is None or self._transport.is_closing():
            response.end(None)
        else:
            self._transport.write(request)
        return response

    def abort(self) -> None:
        """Close, whatever is on its way."""
        if self._response is not None:
            self._response.fail(ConnectionError("given up"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of `asyncio`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Of `asyncio`: where it reads to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Of `asyncio`: so many bytes have come."""
        now_s = time.perf_counter()
        if self._response is not None:
            self._response.feed(now_s, bytes(self._buffer[:nbytes]))

    def connection_lost(self, error: Exception | None) -> None:
        """Of `asyncio`."""
        self._transport = None
        if self._response is not None:
            self._response.end(error)


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
