"""Pictures that are sent at fixed times, from a process of their own: drawing, encoding and sending one takes a
millisecond and more, in which a client that also reads streams would read none and count its own delay as the server's.

    PictureSender.send ──▶ bodies are encoded ─▶ one every so often, answered or not ─▶ when they began, TTFT of each
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any, Final, Self

from server.bench.chat import Chat
from server.bench.pictures import data_url, picture

LONGEST_WAIT_S: Final = 60.0
"""For the answers, once the last picture has been sent."""

LOOKING_S: Final = 0.1
"""How often the process looks whether its sender was left."""

_pictures: list[str] = []
"""Of the process that sends, as `data:` URLs."""
_is_left: Event | None = None
"""Of that process, too."""


@dataclass(frozen=True)
class Sending:
    """Which pictures are sent, to whom and how often.

    Attributes:
        url: Of the server, with or without ``/v1``.
        model: Its name there.
        api_key: What it wants to see.
        first: Number of the first picture.
        count: How many.
        every_s: From one to the next.
        max_tokens: Of an answer.
    """

    url: str
    model: str
    api_key: str
    first: int
    count: int
    every_s: float
    max_tokens: int


@dataclass(frozen=True)
class Sent:
    """What became of them: `begun_s` and `ended_s` by `time.perf_counter`, which is one clock for all processes; from
    sending to the first event in ms, of each that was answered; and how many were not.
    """

    begun_s: float
    ended_s: float
    ttft_ms: list[float]
    failed: int


class PictureSender:
    """Starts its process when it is first used; leave it to end that, whatever it is doing.

    Args:
        size: Width and height of the pictures, in pixels.
        count: How many there are, each another.
    """

    def __init__(self, size: tuple[int, int], count: int) -> None:
        context = get_context("spawn")
        self._is_left = context.Event()
        self._pool = ProcessPoolExecutor(1, context, _begin, (size, count, self._is_left))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_left.set()
        self._pool.shutdown(cancel_futures=True)

    async def draw(self) -> None:
        """Return when all pictures are drawn.

        Raises:
            BrokenProcessPool: The process ended, or could not draw.
        """
        await asyncio.get_running_loop().run_in_executor(self._pool, len, ())

    async def send(self, sending: Sending) -> Sent:
        """Send pictures and wait for their answers.

        Raises:
            RuntimeError: The server's address is none.
            BrokenProcessPool: The process ended, or could not draw.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, _send, sending)


def _begin(size: tuple[int, int], count: int, is_left: Event) -> None:
    global _is_left
    _is_left = is_left
    _pictures[:] = [data_url(picture(seed, *size)) for seed in range(count)]


def _send(sending: Sending) -> Sent:
    return asyncio.run(_send_until_left(sending))


async def _send_until_left(sending: Sending) -> Sent:
    task = asyncio.create_task(_send_all(sending))
    while not task.done():
        await asyncio.wait([task], timeout=LOOKING_S)
        if _is_left is not None and _is_left.is_set():
            task.cancel()
    return await task


async def _send_all(sending: Sending) -> Sent:
    async with Chat.with_server(sending.url, model=sending.model, api_key=sending.api_key) as chat:
        numbers = range(sending.first, sending.first + sending.count)
        bodies = [chat.body([_question(number)], sending.max_tokens) for number in numbers]
        begun_s = due_s = time.perf_counter()
        asked: list[asyncio.Task[float | None]] = []
        for body in bodies:
            asked.append(asyncio.create_task(_ttft_ms(chat, body)))
            due_s += sending.every_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        ended_s = time.perf_counter()
        done, late = await asyncio.wait(asked, timeout=LONGEST_WAIT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    ttft_ms = [found for task in asked if task in done and (found := task.result()) is not None]
    return Sent(begun_s, ended_s, ttft_ms, sending.count - len(ttft_ms))


def _question(number: int) -> Mapping[str, Any]:
    part = {"type": "image_url", "image_url": {"url": _pictures[number]}}
    content = [{"type": "text", "text": f"Picture {number}."}, part, {"type": "text", "text": "What is in it?"}]
    return {"role": "user", "content": content}


async def _ttft_ms(chat: Chat, body: bytes) -> float | None:
    """None where nothing came."""
    started_s, first_s = time.perf_counter(), 0.0
    try:
        async for now_s in chat.answer(body):
            first_s = first_s or now_s
    except (ConnectionError, RuntimeError) as error:
        print(f"a picture failed: {str(error) or type(error).__name__}", file=sys.stderr)
    return (first_s - started_s) * 1e3 if first_s else None
