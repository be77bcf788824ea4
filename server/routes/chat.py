"""`POST /v1/chat/completions`, as OpenAI's clients speak it, stream and not."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.wire import Delta, DeltaLogprob
from server.intake import Call, chat_call
from server.json_body import read_json
from server.routes.answering import Answer, Arrival, MediaTokens, collect, start
from server.routes.context import Context
from server.routes.streaming import DONE, Stream, event_of
from server.tool_calls import ToolCallParser
from server.tool_models import ToolCallDelta, ToolCallOut

# ---- response models ------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token and the likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """Log probabilities of a choice."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    """The answer of one choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    refusal: None = None
    tool_calls: list[ToolCallOut] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    """One whole answer. `stop_reason` and `token_ids` are vLLM's additions."""

    index: int
    message: AssistantMessage = msgspec.field(default_factory=AssistantMessage)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`image_tokens` and `media` (of each picture and frame, in order) are additions."""

    cached_tokens: int
    image_tokens: int
    media: list[MediaTokens] | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Tokens that the server had guessed ahead: those that the answer holds, and those that were wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class ChunkDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new in a choice."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChunkChoice(msgspec.Struct, frozen=True):
    """A choice in a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


# ---- the route ------------------------------------------------------------------------------------------------------


def router(context: Context) -> APIRouter:
    """The route, bound to a context."""
    routes = APIRouter()

    async def create_chat_completion(request: Request) -> Response:
        arrival = Arrival(context)
        async with arrival.time_limit():
            body = await read_json(request, context.settings.max_body_bytes, context.bodies)
            session_header = request.headers.get("x-session-id")
            call = await body.read(
                lambda raw: chat_call(raw, context.settings, session_header), lambda call: call.messages
            )
        del body
        answer = await start(context, request, call, arrival)
        completion_id = f"chatcmpl-{secrets.token_hex(12)}"
        if call.stream:
            return Stream(answer, _Events(completion_id, call, answer))
        return await _whole(completion_id, request, call, answer)

    routes.add_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return routes


async def _whole(completion_id: str, request: Request, call: Call, answer: Answer) -> Response:
    texts: list[list[str]] = [[] for _ in range(call.n)]
    choices = [CompletionChoice(index) for index in range(call.n)]
    for choice in choices:
        if call.options.logprobs is not None:
            choice.logprobs = Logprobs([])
        if call.return_token_ids:
            choice.token_ids = []

    def on_delta(index: int, delta: Delta) -> None:
        choice = choices[index]
        texts[index].append(delta.text)
        if choice.logprobs is not None:
            choice.logprobs.content += map(_token_logprob, delta.logprobs)
        if isinstance(choice.token_ids, list):
            choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    await collect(request, answer, on_delta)
    for choice, pieces in zip(choices, texts, strict=True):
        choice.message.content = "".join(pieces)
        if call.tool_names:
            _find_calls(choice, call)
    completion = Completion(
        id=completion_id,
        created=answer.arrival.unix_s,
        model=answer.context.settings.model_name,
        choices=choices,
        usage=completion_usage(answer),
    )
    return Response(msgspec.json.encode(completion), media_type="application/json")


class _Events:
    """A chat as events; see `server.routes.streaming.Told`."""

    def __init__(self, completion_id: str, call: Call, answer: Answer) -> None:
        self._id = completion_id
        self._call = call
        self._answer = answer
        self._encode = msgspec.json.Encoder().encode
        self._created = answer.arrival.unix_s
        self._model = answer.context.settings.model_name
        self._no_usage: Any = None if call.include_usage else msgspec.UNSET
        self._parsers = [
            ToolCallParser(call.tool_names, call.max_calls) for _ in range(call.n if call.tool_names else 0)
        ]
        self._usual = [] if self._parsers else [self._usual_parts(index) for index in range(call.n)]

    def begin(self) -> bytes:
        """Every choice's role."""
        role = ChunkDelta(role="assistant", content="")
        return b"".join(self._event([ChunkChoice(index, role)]) for index in range(self._call.n))

    def add(self, index: int, delta: Delta) -> bytes:
        """What is new, and the end."""
        if self._usual and delta.text and delta.token_ids and delta.finish_reason is None and not delta.logprobs:
            before, between, after = self._usual[index]
            ids = self._encode(delta.token_ids) if self._call.return_token_ids else b""
            return before + self._encode(delta.text) + between + ids + after
        logprobs = Logprobs(list(map(_token_logprob, delta.logprobs))) if delta.logprobs else None
        token_ids = delta.token_ids if self._call.return_token_ids and delta.token_ids else msgspec.UNSET
        finish_reason: str | None = delta.finish_reason
        changes = [ChunkDelta(content=delta.text)] if delta.text or logprobs or token_ids else []
        if self._parsers:
            changes = _changes(self._parsers[index], delta)
            if not changes and (logprobs or token_ids):
                changes = [ChunkDelta(content="")]
            if finish_reason == "stop" and self._parsers[index].calls:
                finish_reason = "tool_calls"
        choices = [
            ChunkChoice(index, change) if place else ChunkChoice(index, change, logprobs, token_ids=token_ids)
            for place, change in enumerate(changes)
        ]
        if finish_reason is not None:
            choices.append(ChunkChoice(index, ChunkDelta(), finish_reason=finish_reason, stop_reason=delta.stop_reason))
        return b"".join([self._event([choice]) for choice in choices])

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        return (self._event([], completion_usage(self._answer)) if self._call.include_usage else b"") + DONE

    def _usual_parts(self, index: int) -> tuple[bytes, bytes, bytes]:
        """What stands before the text of an event that tells nothing else, between it and the ids, and behind these:
        nearly all events are such, and what is the same in all of them is encoded once.
        """
        text, ids = "\0", [0]
        shown_ids = ids if self._call.return_token_ids else msgspec.UNSET
        event = self._event([ChunkChoice(index, ChunkDelta(content=text), token_ids=shown_ids)])
        before, _, rest = event.partition(self._encode(text))
        between, _, after = rest.partition(self._encode(ids))
        return before, between, after

    def _event(self, choices: list[ChunkChoice], usage: CompletionUsage | None = None) -> bytes:
        shown: Any = usage or self._no_usage
        chunk = Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=shown)
        return event_of(self._encode(chunk))


def _changes(parser: ToolCallParser, delta: Delta) -> list[ChunkDelta]:
    """What new text adds to content and calls."""
    pieces = parser.feed(delta.text)
    if delta.finish_reason is not None:
        pieces += parser.finish()
    return [ChunkDelta(content=piece) if isinstance(piece, str) else ChunkDelta(tool_calls=[piece]) for piece in pieces]


def _find_calls(choice: CompletionChoice, call: Call) -> None:
    """Take a whole answer apart into text and calls."""
    parser = ToolCallParser(call.tool_names, call.max_calls)
    pieces = [*parser.feed(choice.message.content or ""), *parser.finish()]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    if parser.calls:
        choice.message.content = text or None
        choice.message.tool_calls = parser.calls
        if choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
    else:
        choice.message.content = text


def completion_usage(answer: Answer) -> CompletionUsage:
    """OpenAI's usage object."""
    usage = answer.usage()
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            usage.cached_tokens, usage.image_tokens, answer.media_tokens() or msgspec.UNSET
        ),
        completion_tokens_details=CompletionTokensDetails(
            usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        ),
    )


def _token_logprob(token: DeltaLogprob) -> TokenLogprob:
    top = [TopLogprob(text, logprob, list(data)) for text, data, logprob in token.top]
    return TokenLogprob(token.token, token.logprob, list(token.data), top)
