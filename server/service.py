"""What a route sees of the rest of Beholder: one call that takes a chat, and the generation that it starts.

`server.dispatcher` implements it over processes, `server.offline` inside one process, tests with a script.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from preprocess.wire import (
    Branch,
    ChildState,
    ClipInfo,
    Delta,
    EngineStats,
    GenerationOptions,
    ImageInfo,
    ImagePart,
    Looked,
    Message,
    Previewed,
    Question,
    Segmenting,
    VideoPart,
)

Take = Callable[[int, Delta], bool]
"""Does what its owner would do with a choice's next delta, if it can do so at once; whether it has."""


class Generation(Protocol):
    """A chat that was prepared and admitted. Iterating gives the deltas of all its choices as (index, delta)."""

    @property
    def images(self) -> Sequence[ImageInfo]:
        """The request's pictures, in order."""

    @property
    def clips(self) -> Sequence[ClipInfo]:
        """The request's clips, in order."""

    @property
    def media_spans(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each picture and frame, in order: the (start, length) runs of the prompt that are its vision tokens."""

    @property
    def segments(self) -> Sequence[tuple[float, float]]:
        """With `segmenting`: start and end in seconds of the part of the clip that each choice is about."""

    @property
    def branches(self) -> Sequence[Branch]:
        """Of a request with questions: what each of its choices scores."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length, vision tokens included."""

    @property
    def decode_ms(self) -> float:
        """Time that decoding the pictures took."""

    @property
    def preprocess_ms(self) -> float:
        """The whole time in the preprocess worker, `decode_ms` included."""

    def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas until every choice has finished.

        Raises:
            BeholderError: From the iterator, when the generation cannot go on (the engine died).
        """

    def give_to(self, take: Take | None) -> None:
        """From now on deltas that come while the iterator is waited for may be given to `take`, before a task would
        wake. Those that it takes do not come out of the iterator; what it raises does. None: no more.
        """

    def cancel(self) -> None:
        """Stop all choices within one engine step. Idempotent, and harmless after the end."""


class Service(Protocol):
    """Takes chats. One per server process."""

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served: every child is up and no drain has begun."""

    @property
    def draining(self) -> bool:
        """Whether the server takes no new requests because it is about to end."""

    @property
    def stats(self) -> EngineStats | None:
        """The engine's last report, or None before the first."""

    @property
    def num_preparing(self) -> int:
        """Requests that are with, or wait for, a preprocess worker."""

    @property
    def arena_bytes_used(self) -> int:
        """Bytes of the shared-memory arena under lease."""

    def state(self) -> Mapping[str, ChildState]:
        """Last known state of every child process, by a name such as ``preprocess-0``."""

    def deaths(self) -> Mapping[str, int]:
        """Deaths seen so far, by role."""

    async def submit(
        self,
        messages: list[Message],
        options: GenerationOptions,
        *,
        n: int = 1,
        session_id: str = "",
        priority: int = 0,
        arrival_s: float | None = None,
        segmenting: Segmenting | None = None,
        questions: Sequence[Question] = (),
    ) -> Generation:
        """Prepare a chat and queue it with the engine; returns once it is admitted. With `questions`, the generation
        has one choice for each of its `branches`, of one token.

        Cancelling the call ends the work for it. `arrival_s`: `time.monotonic()` when the request reached the server.

        Raises:
            ClientError: The request cannot be served as sent.
            ServiceError: It cannot be served now.
        """

    async def look(self, data: bytes, reference: bytes = b"") -> Looked:
        """How much a frame differs from an earlier one, whose thumbnail `reference` is (see `preprocess.change`).

        Cancelling the call ends the work for it.

        Raises:
            ClientError: It is no picture that can be decoded, or too many wait (429).
            ServiceError: It cannot be served now.
        """

    async def preview(self, part: ImagePart | VideoPart) -> Previewed:
        """What the model would see of a picture or clip.

        Cancelling the call ends the work for it.

        Raises:
            ClientError: It is none that can be decoded, or too many wait (429).
            ServiceError: It cannot be served now.
        """
