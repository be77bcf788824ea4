"""`POST /v1/decisions`: pictures and typed questions in, probabilities out; all questions share one prefix."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from preprocess.errors import BeholderError, ClientError
from preprocess.wire import Delta, ImageInfo, TextPart
from server.decision_models import Decision, DecisionQuestion, DecisionRequest
from server.decisions import (
    OPTIONS,
    checked_questions,
    decision_from_json,
    decision_from_text,
    decisions_of,
    weighed,
)
from server.intake import Call, caption_call
from server.json_body import read_json
from server.request_models import CaptionRequest
from server.routes.answering import Arrival, collect, start
from server.routes.captions import own_field
from server.routes.chat import CompletionUsage, completion_usage
from server.routes.connection import body_chunks
from server.routes.context import Context
from server.routes.form import Form, read_form


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer."""

    id: str
    object: Literal["decisions"] = "decisions"
    created: int
    model: str
    decisions: list[Decision]
    images: list[ImageInfo]
    usage: CompletionUsage
    total_ms: float


def router(context: Context) -> APIRouter:
    """The route, bound to a context."""
    routes = APIRouter()

    async def create_decisions(request: Request) -> Response:
        arrival = Arrival(context)
        async with arrival.time_limit():
            call, questions = await _read_call(request, context)
        try:
            answer = await start(context, request, call, arrival)
        except BeholderError as error:
            error.param = own_field(error.param, call)
            raise
        scores: dict[int, list[float]] = {}

        def on_delta(index: int, delta: Delta) -> None:
            for token in delta.logprobs:
                scores[index] = [logprob for _, _, logprob in token.top]

        await collect(request, answer, on_delta)
        body = Decisions(
            id=f"decisions-{secrets.token_hex(12)}",
            created=arrival.unix_s,
            model=context.settings.model_name,
            decisions=decisions_of(questions, answer.generation.branches, scores),
            images=answer.images,
            usage=completion_usage(answer),
            total_ms=(time.monotonic() - arrival.monotonic_s) * 1e3,
        )
        return Response(msgspec.json.encode(body), media_type="application/json")

    routes.add_route("/v1/decisions", create_decisions, methods=["POST"])
    return routes


async def _read_call(request: Request, context: Context) -> tuple[Call, list[DecisionQuestion]]:
    """Read a request as JSON or as a form.

    Raises:
        ClientError: It is neither, or its fields are not right.
    """
    settings = context.settings
    content_type = request.headers.get("content-type", "").strip()
    if request.query_params:
        name = next(iter(request.query_params))[:200]
        raise ClientError(f"`{name}` belongs into the body.", code="invalid_value", param=name)
    session_header = request.headers.get("x-session-id")
    form = Form()
    if content_type.lower().startswith("multipart/form-data"):
        chunks = body_chunks(request, settings.max_body_bytes, context.bodies)
        async with contextlib.aclosing(chunks):
            form = await read_form(content_type, chunks, max_files=settings.max_images)
        return _call_of(decision_from_text(form.fields), form, context, session_header)
    body = await read_json(request, settings.max_body_bytes, context.bodies)
    return await body.read(
        lambda raw: _call_of(decision_from_json(raw), form, context, session_header), lambda made: made[0].messages
    )


def _call_of(
    fields: DecisionRequest, form: Form, context: Context, session_header: str | None
) -> tuple[Call, list[DecisionQuestion]]:
    questions = checked_questions(fields)
    caption = CaptionRequest(
        model=fields.model,
        prompt=f"{fields.context}\n" if fields.context else "",
        detail=fields.detail,
        image=fields.image,
        images=fields.images,
        session_id=fields.session_id,
        priority=fields.priority,
    )
    call = caption_call(caption, form.files, context.settings, session_header)
    messages = [
        msgspec.structs.replace(message, content=[part for part in message.content if part != TextPart("")])
        for message in call.messages
    ]
    return msgspec.structs.replace(
        call, messages=messages, options=OPTIONS, questions=[weighed(question) for question in questions]
    ), questions
