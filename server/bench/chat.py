"""Streamed chats with any OpenAI-compatible server, and when their words came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import msgspec

from server.bench.event_lines import EventLines
from server.bench.http_client import HttpClient

SAID: Final = ("content", "reasoning", "reasoning_content")
"""Where servers put what a model says."""


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None  # some servers send null where nothing was said
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """What is read of an event: little, since a client's own time is measured too."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_DECODER: Final = msgspec.json.Decoder(_Event)
_MODELS_DECODER: Final = msgspec.json.Decoder(_Models)


class Answer:
    """What came of one answer so far.

    Attributes:
        num_tokens: As the server counts them; 0 until it has told.
        num_ids: Of the newest event; 1 where ids are not told.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_ids = 1


class Chat:
    """A client of one server.

    Args:
        http: Whose base is the server's `/v1/`.
        model: The name that it goes by there; also an attribute.
    """

    def __init__(self, http: HttpClient, model: str) -> None:
        self._http = http
        self.model = model

    @classmethod
    @asynccontextmanager
    async def with_server(cls, url: str, *, model: str = "", api_key: str = "") -> AsyncIterator[Self]:
        """As many connections as are wanted.

        Args:
            url: Of the server, with or without ``/v1``.
            model: Its name there; empty: the first that the server tells.
            api_key: What it wants to see.

        Raises:
            RuntimeError: It refuses to say what models it has, what it says is no list of models, or the URL is none.
            ConnectionError: It was not reached.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        async with HttpClient(url.rstrip("/").removesuffix("/v1") + "/v1", headers) as http:
            if not model:
                model = _first_model(await http.get("models"))
            yield cls(http, model)

    def events(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        answer: Answer | None = None,
        *,
        token_ids: bool = False,
    ) -> AsyncIterator[float]:
        """When events came of the answer to a chat: `answer` to its `body`, with what both take and raise."""
        return self.answer(self.body(messages, max_tokens, token_ids=token_ids), answer)

    def body(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, *, token_ids: bool = False) -> bytes:
        """What is sent for a chat.

        Args:
            messages: The chat.
            max_tokens: Of the answer, no fewer: `ignore_eos` is set.
            token_ids: Whether to ask for them as well, which tells how many tokens an event brings.
        """
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if token_ids:
            asked["return_token_ids"] = True
        return msgspec.json.encode(asked)

    async def answer(self, body: bytes, answer: Answer | None = None) -> AsyncIterator[float]:
        """When the events came that bring something of an answer, by `time.perf_counter`: the same for those that came
        in one read.

        Args:
            body: What is sent.
            answer: Is told what came.

        Raises:
            RuntimeError: The server refused, told of an error, or sent what is no event of a chat.
            ConnectionError: It was not reached, or not to the end.
        """
        lines = EventLines()
        async with self._http.post("chat/completions", body) as response:
            async for now_s, piece in response:
                for text in lines.feed(piece):
                    if _says(text, answer):
                        yield now_s
            for text in lines.end():
                if _says(text, answer):
                    yield now_s


def _says(text: bytes, answer: Answer | None) -> bool:
    """Whether an event brings something of an answer; what else it tells goes to `answer`."""
    event = _decoded(text)
    if event.error is not None:
        raise RuntimeError(str(event.error))
    choices = event.choices or ()
    if answer is not None:
        answer.num_ids = sum(len(choice.token_ids or ()) for choice in choices) or 1
        if event.usage is not None:
            answer.num_tokens = event.usage.completion_tokens or 0
    return any(choice.token_ids or any((choice.delta or {}).get(name) for name in SAID) for choice in choices)


def _decoded(text: bytes) -> _Event:
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError as error:
        shown = text[:200].decode(errors="replace")
        raise RuntimeError(f"the server sent what is no event of a chat ({error}): {shown}") from None


def _first_model(body: bytes) -> str:
    try:
        models = _MODELS_DECODER.decode(body).data
    except msgspec.DecodeError as error:
        shown = body[:200].decode(errors="replace")
        raise RuntimeError(f"/models is no list of models ({error}): {shown}; name one with --model") from None
    if not models:
        raise RuntimeError("the server says that it has no models; name one with --model")
    return models[0].id
