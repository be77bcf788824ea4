"""A scripted service instead of workers and an engine, and the application over it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from serving import PATIENCE_S

from preprocess.errors import ClientError
from preprocess.wire import (
    ChildState,
    ClipInfo,
    Delta,
    DeltaLogprob,
    EngineStats,
    GenerationOptions,
    ImageInfo,
    ImagePart,
    Looked,
    Message,
    Segmenting,
    Usage,
    VideoPart,
)
from server.app import create_app
from server.http_connection import HttpConnection
from server.service import Take
from server.settings import Settings

WORDS = ("A ", "small ", "red ", "square ", "on ", "white.")


def usage(num_tokens: int) -> Usage:
    return Usage(20, num_tokens, 4, 16, 1, 2, 3, 4, accepted_prediction_tokens=3, rejected_prediction_tokens=2)


@dataclass
class ScriptedGeneration:
    """Says `words` in every choice, one a turn, then finishes as the script says. One that is held says no more than
    `held_after` of them before the service is released.
    """

    service: ScriptedService
    images: list[ImageInfo]
    options: GenerationOptions
    n: int
    clips: list[ClipInfo] = field(default_factory=list)
    segments: list[tuple[float, float]] = field(default_factory=list)
    media_spans: list[list[tuple[int, int]]] = field(default_factory=list)
    num_prompt_tokens: int = 20
    decode_ms: float = 1.5
    preprocess_ms: float = 2.5
    num_cancels: int = 0
    num_said: int = 0
    ended: bool = False
    held: bool = False
    take: Take | None = None
    num_taken: int = 0

    def give_to(self, take: Take | None) -> None:
        self.take = take

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        words = self.service.words[: self.options.max_tokens]
        for i, word in enumerate(words):
            for choice in range(self.n):
                await asyncio.sleep(self.service.delay_s)
                while self.held and i == self.service.held_after and not self.num_cancels:
                    if self.service.released.is_set():
                        break
                    await asyncio.sleep(0.002)
                if self.num_cancels:
                    return
                if self.service.failure is not None and i == self.service.fail_at:
                    raise self.service.failure
                self.num_said += 1
                last = i == len(words) - 1
                length = self.options.max_tokens is not None and self.options.max_tokens <= len(self.service.words)
                delta = Delta(
                    f"r.{choice}",
                    word,
                    [100 + i],
                    self._logprobs(word),
                    finish_reason=("length" if length else "stop") if last else None,
                    usage=usage(len(words)) if last else None,
                )
                if self.take is not None and self.take(choice, delta):
                    self.num_taken += 1
                else:
                    yield choice, delta
        self.ended = True

    def _logprobs(self, word: str) -> list[DeltaLogprob]:
        if self.options.logprobs is None:
            return []
        top = [(word, word.encode(), -0.25), ("x", b"x", -2.0)][: self.options.logprobs]
        return [DeltaLogprob(word, word.encode(), -0.25, top)]

    def cancel(self) -> None:
        if not self.ended:
            self.num_cancels += 1


@dataclass
class ScriptedService:
    """Honours the dispatcher's contract; a test sets what shall happen and reads what was asked."""

    ready: bool = True
    draining: bool = False
    stats: EngineStats | None = None
    num_preparing: int = 0
    arena_bytes_used: int = 0
    words: tuple[str, ...] = WORDS
    delay_s: float = 0.0
    held_after: int | None = None
    num_held: int = 1_000
    """Of the generations, from the first."""
    released: threading.Event = field(default_factory=threading.Event)
    submit_delay_s: float = 0.0
    look_delay_s: float = 0.0
    looks: list[tuple[bytes, bytes]] = field(default_factory=list)
    refusal: BaseException | None = None
    failure: BaseException | None = None
    fail_at: int = 2
    submitted: list[tuple[list[Message], GenerationOptions, dict[str, object]]] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)
    num_submits_cancelled: int = 0
    children: dict[str, ChildState] = field(
        default_factory=lambda: {
            "engine": ChildState("engine", 0, up=True),
            "preprocess-0": ChildState("preprocess", 0, up=False, reason="signal SIGKILL"),
        }
    )

    def state(self) -> dict[str, ChildState]:
        return self.children

    def deaths(self) -> dict[str, int]:
        return {"engine": 0, "preprocess": 1}

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
    ) -> ScriptedGeneration:
        asked = {"n": n, "session_id": session_id, "priority": priority}
        self.submitted.append((list(messages), options, asked | ({"segmenting": segmenting} if segmenting else {})))
        try:
            await asyncio.sleep(self.submit_delay_s)
        except asyncio.CancelledError:
            self.num_submits_cancelled += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        pictures = [part for message in messages for part in message.content if isinstance(part, ImagePart)]
        images = [
            ImageInfo(32, 24, hashlib.sha256(part.data or part.data_url.encode()).hexdigest(), 16) for part in pictures
        ]
        clips = [
            ClipInfo(64, 48, 10.0, [0.0, 5.0], hashlib.sha256(part.data or part.data_url.encode()).hexdigest(), 32)
            for message in messages
            for part in message.content
            if isinstance(part, VideoPart)
        ]
        segments = [(0.0, 4.0), (4.0, 10.0)] if segmenting is not None else []
        generation = ScriptedGeneration(self, images, options, len(segments) or n, clips, segments)
        generation.held = len(self.generations) < self.num_held
        self.generations.append(generation)
        return generation

    async def look(self, data: bytes, reference: bytes = b"") -> Looked:
        """A frame that begins with "still" has not changed; one that begins with "bad" is no picture."""
        self.looks.append((data, reference))
        await asyncio.sleep(self.look_delay_s)
        if data.startswith(b"bad"):
            raise ClientError("The picture is damaged", code="image_undecodable")
        change = 0.0 if data.startswith(b"still") else 50.0
        return Looked("look", data[:16], change if reference else None)

    @property
    def last(self) -> tuple[list[Message], GenerationOptions, dict[str, object]]:
        return self.submitted[-1]


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def settings() -> Settings:
    limits = {"max_body_mb": 1, "max_image_mb": 0.5, "max_images": 3, "arena_mb": 64}
    return Settings.load({"served_model_name": "tiny,alias", **limits})


@pytest.fixture
def app(settings: Settings, service: ScriptedService) -> FastAPI:
    return create_app(settings, service)


class Client:
    """Sends requests to an application in this process, without sockets."""

    def __init__(self, app: FastAPI, **headers: str) -> None:
        self._app = app
        self._headers = headers

    def request(self, method: str, path: str, **options: object) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8000", headers=self._headers
            ) as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return asyncio.run(send())

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: object) -> httpx.Response:
        return self.request("POST", path, **options)

    def chat(self, content: object = "hello", **fields: object) -> httpx.Response:
        return self.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields})


@pytest.fixture
def client(app: FastAPI) -> Client:
    return Client(app)


@pytest.fixture
def client_of() -> Callable[..., Client]:
    return Client


@dataclass
class Served:
    """A real server in a thread."""

    url: str
    port: int


@pytest.fixture
def serve_app() -> Iterator[Callable[[FastAPI], Served]]:
    """Serves an application with uvicorn on a free port until the test ends."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: FastAPI) -> Served:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=HttpConnection, log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert eventually(lambda: server.started), "the server did not start"
        running.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Served(f"http://127.0.0.1:{port}", port)

    yield serve
    for server, thread in running:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)


@pytest.fixture
def served(app: FastAPI, serve_app: Callable[[FastAPI], Served]) -> Served:
    return serve_app(app)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true in time: far more than it takes on a machine that has a lot else to do."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., bool]:
    return eventually
