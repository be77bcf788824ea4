"""The client's end of a request: reading its body under a cap, and noticing when it has gone away.

A client that leaves ends the work for it within one engine step, whether it waits for a stream or for one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from preprocess.errors import ClientError, ServiceError

THREAD_BYTES: Final = 1 << 20
"""From so many bytes on, `bytes.join` releases Python's lock. Fewer take a fifth of a millisecond at most, and a thread
takes longer than that to begin."""

T = TypeVar("T")


class BodyBudget:
    """Memory for bodies that are still on their way in, all requests together: a cap for each does not bound them.

    `used` is what the unfinished ones hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def take(self, num_bytes: int, held: int) -> None:
        """So many bytes more for a body that holds `held`.

        Raises:
            ClientError: 429, unless it is the only one.
        """
        if self.used > held and self.used + num_bytes > self.max_bytes:
            raise ClientError(
                "The server is busy: other requests that are being sent fill its memory; try again in a moment.",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        self.used += num_bytes


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


async def body_chunks(request: Request, max_bytes: int, budget: BodyBudget) -> AsyncGenerator[bytes, None]:
    """The body as it arrives.

    Raises:
        ClientError: 413 as soon as it is known to be larger than `max_bytes`; what comes after is never held. 429 when
            all bodies together are too large.
        ClientGone: The client left before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(int(declared[:20]), max_bytes)
    num_bytes = held = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(None, max_bytes)
            budget.take(len(chunk), held)
            held += len(chunk)
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        budget.used -= held


async def read_body(request: Request, max_bytes: int, budget: BodyBudget) -> bytes:
    """The whole body. Raises as `body_chunks` does."""
    async with contextlib.aclosing(body_chunks(request, max_bytes, budget)) as chunks:
        return await joined([chunk async for chunk in chunks])


async def joined(pieces: list[bytes]) -> bytes:
    """Many bytes as one object; where that takes long, in a thread, without Python's lock."""
    if sum(map(len, pieces)) < THREAD_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


def _too_large(num_bytes: int | None, max_bytes: int) -> ClientError:
    came = f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes is not None else "more"
    return ClientError(
        f"The request body is too large: {came}, and at most {max_bytes / (1 << 20):g} MiB are accepted.",
        status=413,
        code="body_too_large",
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    The request body must have been read: from then on `receive` has only one thing left to say.

    Raises:
        ClientGone: The client left first; `work` has ended when this is raised.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def time_limit(deadline_s: float, limit_s: float) -> AsyncIterator[None]:
    """Ends what runs inside at `deadline_s` of the loop's clock.

    Raises:
        ServiceError: 504, naming the limit.
    """
    timeout = asyncio.timeout_at(deadline_s)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ServiceError(
            f"The request took longer than {limit_s:g} s, the most that this server allows (--request-timeout-s).",
            status=504,
            code="request_timeout",
        ) from None


class Heartbeat:
    """Calls `beat` whenever nothing was sent for `interval_s`, so that proxies keep a quiet stream open."""

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._last_s = 0.0

    def sent(self) -> None:
        """Something was sent just now."""
        self._last_s = time.monotonic()

    async def run(self) -> None:
        """Beats until cancelled."""
        self.sent()
        while True:
            quiet_s = time.monotonic() - self._last_s
            if quiet_s >= self._interval_s:
                await self._beat()
                self.sent()
            else:
                await asyncio.sleep(self._interval_s - quiet_s)
