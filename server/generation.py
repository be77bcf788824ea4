"""The answer to one submitted request, as routes and sessions take it from the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from preprocess.wire import Branch, ClipInfo, Delta, ImageInfo, Prepared
from server.faults import rejection
from server.service import Take


class Generation:
    """The answer to one submitted request: what preprocessing found, then deltas of all choices.

    Iterate once: ``async for choice_index, delta in generation``. Ends when every choice has finished; raises
    `ServiceError` when a process died under it. Leaving early needs `cancel`.
    """

    def __init__(self, request_id: str, prepared: Prepared, num_choices: int, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.images: list[ImageInfo] = prepared.images
        self.clips: list[ClipInfo] = prepared.clips
        self.media_spans: list[list[tuple[int, int]]] = [item.spans for item in prepared.request.media]
        self.segments: list[tuple[float, float]] = prepared.segments
        self.branches: list[Branch] = prepared.branches
        self.num_prompt_tokens = prepared.request.num_prompt_tokens
        self.decode_ms = prepared.decode_ms
        self.preprocess_ms = prepared.preprocess_ms
        self.num_choices = num_choices
        self._cancel = cancel
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()
        self._open = num_choices
        self._take: Take | None = None
        self._is_awaited = False
        """Whoever iterates has done with all that came before, or is about to find it in the queue."""

    def give_to(self, take: Take | None) -> None:
        """See `server.service.Generation`."""
        self._take = take

    def put(self, choice: int, delta: Delta) -> None:
        """Called by the dispatcher only."""
        if self._take is not None and self._is_awaited and self._queue.empty():
            try:
                if self._take(choice, delta):
                    return
            except Exception as error:  # of one stream: those of the others go on
                self.fail(error)
                return
        self._queue.put_nowait((choice, delta))

    def fail(self, error: Exception) -> None:
        """It cannot go on; called by the dispatcher only."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        while self._open:
            self._is_awaited = True
            try:
                item = await self._queue.get()
            finally:
                self._is_awaited = False
            if isinstance(item, Exception):
                self._open = 0
                raise item
            if item[1].finish_reason is not None:
                self._open -= 1
            if item[1].error is not None:
                raise rejection(item[1].error)
            yield item

    def cancel(self) -> None:
        """The client is gone: stop the work within one step. Harmless when finished or repeated."""
        self._cancel()
