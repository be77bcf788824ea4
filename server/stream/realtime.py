"""A session of the OpenAI Realtime API, as far as it is about text and pictures. No sockets, no clock.

The client builds a conversation of items and asks for responses. `input_image_buffer.append` keeps a camera's newest
picture; the next response turns it into an item of the conversation and answers about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.options import bounded
from preprocess.wire import Delta, GenerationOptions, Looked, TextPart, Usage
from server.complaints import invalid, unsupported
from server.request_models import Sampling
from server.sampling_rules import generation_options
from server.stream.client_events import ClientEvent
from server.stream.configuration import check_metadata
from server.stream.conversation import Conversation, Item, PictureTerms, item_of, messages_of, new_id, picture
from server.stream.incoming import Decoders
from server.stream.lifetime import Lifetime, Tally
from server.stream.mailbox import DropReason, Frame
from server.stream.realtime_events import (
    DELTA,
    HARMLESS,
    NOT_SERVED,
    REALTIME_EVENTS,
    UNSERVED,
    Extras,
    ImageAppend,
    ItemCreate,
    ItemNamed,
    RealtimeConfig,
    RealtimeEvent,
    RealtimeResponseCancel,
    RealtimeResponseCreate,
    RealtimeUpdate,
    ResponseParams,
    error_event,
)
from server.stream.response import Ending
from server.stream.sampling import DEFAULT_TOKENS
from server.stream.terms import Terms
from server.stream.work import CloseCode, Start, State

_decoders: Final = Decoders(REALTIME_EVENTS)
_REASONS: Final = {"cancelled": "client_cancelled", "incomplete": "max_output_tokens"}


@dataclass
class _Response:
    id: str
    params: ResponseParams
    item: Item
    max_output_tokens: int
    in_conversation: bool
    frame: Frame | None
    created_s: float
    started: bool = False
    has_spoken: bool = False
    text: list[str] = field(default_factory=list)


class RealtimeSession(Lifetime[_Response]):
    """The rules of one Realtime session; see `Lifetime` for its arguments."""

    resumable = False

    def __init__(
        self, session_id: str, resume_token: str, terms: Terms, now_s: float, tally: Tally | None = None
    ) -> None:
        super().__init__(session_id, resume_token, terms, now_s, tally)
        self._config = RealtimeConfig(
            type="realtime",
            model=terms.model_names[0],
            instructions="",
            output_modalities=["text"],
            max_output_tokens="inf",
            beholder=Extras(),
        )
        self._conversation = Conversation(terms.limits.max_held_bytes, terms.limits.max_images)
        self._say("session.created", session=self._shown_session())

    # ---- what the client sends -------------------------------------------------------------------------------------

    def receive_binary(self, data: bytes, now_s: float) -> None:
        """Realtime events are text; a picture comes as base64."""
        if self._hear(len(data), now_s):
            error = ClientError(
                "Binary messages are not taken here: send JSON, or use /v1/stream.", code="unsupported_media_type"
            )
            self.end(CloseCode.BAD_MEDIA_TYPE, "text messages only", now_s, error)

    def _decode(self, raw: bytes) -> ClientEvent:
        return _decoders.decode(raw, NOT_SERVED)

    def _on_event(self, event: ClientEvent, now_s: float) -> None:
        if isinstance(event, RealtimeUpdate):
            self._on_update(event.session)
        elif isinstance(event, ItemCreate):
            item = item_of(event.item, "item", self._picture_terms(self._extras))
            self._add(item, event.previous_item_id)
        elif isinstance(event, ItemNamed) and event.type == "conversation.item.retrieve":
            self._say("conversation.item.retrieved", item=self._conversation.find(event.item_id).shown())
        elif isinstance(event, ItemNamed):
            self._conversation.delete(event.item_id)
            self._say("conversation.item.deleted", item_id=event.item_id)
        elif isinstance(event, RealtimeResponseCreate):
            self._on_ask(event.response, now_s)
        elif isinstance(event, RealtimeResponseCancel):
            self._on_cancel(event, now_s)
        elif isinstance(event, ImageAppend):
            self._on_image(event, now_s)
        else:
            self.mailbox.clear("cancelled")

    def _on_update(self, patch: RealtimeConfig) -> None:
        _refuse_unserved(patch, "session")
        if patch.type not in {None, "realtime"}:
            raise unsupported("session.type", f"`session.type` {patch.type!r:.40} is not supported except as realtime.")
        if patch.model is not None and patch.model not in self.terms.model_names:
            raise ClientError(
                f"The model {patch.model[:200]!r} is not served here; expected {' or '.join(self.terms.model_names)}.",
                status=404,
                code="model_not_found",
                param="session.model",
            )
        changes = {
            name: value
            for name in ("model", "instructions", "output_modalities", "max_output_tokens", "beholder")
            if (value := getattr(patch, name)) is not None
        }
        config = msgspec.structs.replace(self._config, **changes)
        self._options(config.max_output_tokens, config.beholder, "session")
        self._config = config
        self._say("session.updated", session=self._shown_session())

    def _on_image(self, event: ImageAppend, now_s: float) -> None:
        url = event.image.strip()
        if url[:5].lower() != "data:":
            if ":" in url[:64]:
                picture(url, "image", PictureTerms(0))  # says that nothing is fetched
            url = f"data:application/octet-stream;base64,{url}"
        picture(url, "image", PictureTerms(self.limits.max_frame_bytes))
        self._serial += 1
        frame = Frame(self._serial, url.encode(), now_s, now_s)
        if self._rates.frames.admits(now_s):
            self.mailbox.put(frame)
        else:
            self.mailbox.refuse("rate")

    def _add(self, item: Item, previous_item_id: str | None = None) -> None:
        previous = self._conversation.add(item, previous_item_id)
        self._say("conversation.item.added", previous_item_id=previous, item=item.shown())
        self._say("conversation.item.done", previous_item_id=previous, item=item.shown())

    def _on_ask(self, params: ResponseParams, now_s: float) -> None:
        _refuse_unserved(params, "response")
        if self._draining:
            raise ServiceError("The server is shutting down; ask another one.", code="draining")
        if self._active is not None:
            raise ClientError(
                f"The response {self._active.id} runs already; wait for its response.done, or cancel it.",
                code="conversation_already_has_active_response",
            )
        if params.conversation not in {None, "auto", "none"}:
            raise invalid("response.conversation", "`response.conversation` is not known; expected auto or none.")
        check_metadata(params.metadata)
        max_tokens = params.max_output_tokens or self._config.max_output_tokens
        extras = _merged(self._extras, params.beholder)
        sampling = self._options(max_tokens, extras, "response")
        given = None
        if params.input is not None:
            terms = self._picture_terms(extras)
            given = [item_of(item, f"response.input[{i}]", terms) for i, item in enumerate(params.input)]
        self._check_brings_pictures(params.beholder, given)
        frame = self._show_newest(extras) if given is None else None
        items = list(self._conversation) if given is None else given
        if not items:
            raise ClientError("The conversation is empty: create an item first.", code="conversation_empty")
        instructions = params.instructions if params.instructions is not None else self._config.instructions
        self._active = response = _Response(
            new_id("resp"),
            params,
            Item(new_id("item"), "assistant", [TextPart("")], "in_progress"),
            sampling.max_tokens or 0,
            params.conversation != "none",
            frame,
            now_s,
        )
        self._actions.append(Start(response.id, messages_of(items, instructions), sampling))
        self._say("response.created", response=self._shown_response(response, "in_progress"))
        left = [msgspec.to_builtins(limit) for limit in self._rates.shown_to_openai(now_s)]
        self._say("rate_limits.updated", rate_limits=left)

    def _check_brings_pictures(self, extras: Extras | None, given: list[Item] | None) -> None:
        """What is said of a response's pictures is refused where it brings none."""
        brings = len(self.mailbox.waiting) > 0 if given is None else any(item.num_images for item in given)
        for name in ("detail", "max_pixels"):
            if not brings and getattr(extras, name, None) is not None:
                path = f"response.beholder.{name}"
                raise invalid(
                    path,
                    f"`{path}` is of the pictures that a response brings, in its `input` or from the camera, and there "
                    "is none: set it in the session before its pictures come.",
                )

    def _show_newest(self, extras: Extras) -> Frame | None:
        """The camera's newest picture becomes an item, unless there is none."""
        frame = self.mailbox.take()
        if frame is not None:
            try:
                url = frame.data.decode()
                self._add(Item(new_id("item"), "user", [picture(url, "image", self._picture_terms(extras))]))
            except ClientError:
                self.mailbox.drop(frame, "failed")
                raise
        return frame

    def _on_cancel(self, event: RealtimeResponseCancel, now_s: float) -> None:
        if self._active is None or event.response_id not in {None, self._active.id}:
            raise ClientError("No such response runs now.", code="response_cancel_not_active", param="response_id")
        self._cancel_active("cancelled", now_s)

    # ---- what the work gives ---------------------------------------------------------------------------------------

    def on_started(
        self, response_id: str, num_prompt_tokens: int, decode_ms: float, preprocess_ms: float, now_s: float
    ) -> None:
        """The engine has a response's chat: its item begins."""
        response = self._running(response_id)
        if response is None or response.started:
            return
        response.started = True
        if response.frame is not None:
            self.mailbox.caption(response.frame)
        item = {**response.item.shown(), "content": []}
        self._say("response.output_item.added", response_id=response.id, output_index=0, item=item)
        if response.in_conversation:
            previous = self._conversation.add(response.item)
            self._say("conversation.item.added", previous_item_id=previous, item=item)
        self._say("response.content_part.added", **self._place(response), part={"type": "text", "text": ""})

    def _speak(self, response: _Response, delta: Delta, now_s: float) -> None:
        if delta.token_ids and not response.has_spoken:
            response.has_spoken = True
            if response.frame is not None and self._tally is not None:
                self._tally.first_token((now_s - response.frame.captured_s) * 1e3)
        if delta.text:
            response.text.append(delta.text)
            self._say(DELTA, **self._place(response), delta=delta.text)

    def on_failed(self, response_id: str, error: BeholderError, now_s: float) -> None:
        """A response cannot go on, or could not begin."""
        response = self._running(response_id)
        if response is not None:
            self._finish(response, Ending("failed", error=error), now_s)
            self._advance(now_s)

    def on_looked(self, look_id: str, looked: Looked, now_s: float) -> None:
        """Nothing is compared here."""

    def on_look_failed(self, look_id: str, error: BeholderError, now_s: float) -> None:
        """Nothing is compared here."""

    # ---- ending ----------------------------------------------------------------------------------------------------

    def drain(self, grace_s: float, now_s: float) -> None:
        """The server is about to end: finish what runs, start nothing."""
        self._draining = True
        self._advance(now_s)

    def _advance(self, now_s: float) -> None:
        if self.state is not State.CONNECTED or self._reads_too_slowly(now_s):
            return
        if self._draining and self._active is None:
            self.end(CloseCode.DRAINING, "the server is shutting down", now_s)

    def _finish(self, response: _Response, ending: Ending, now_s: float) -> None:
        self._active = None
        status = ending.status
        if response.frame is not None:
            self.mailbox.drop(response.frame, ending.reason)  # unless it was captioned
        response.item.status = "completed" if status == "completed" else "incomplete"
        response.item.parts = [TextPart("".join(response.text))]
        if response.started:
            text, place = "".join(response.text), self._place(response)
            self._say("response.output_text.done", **place, text=text)
            self._say("response.content_part.done", **place, part={"type": "text", "text": text})
            self._say("response.output_item.done", response_id=response.id, output_index=0, item=response.item.shown())
            if response.in_conversation and response.item in self._conversation:
                self._say("conversation.item.done", item=response.item.shown())
        self._say("response.done", response=self._shown_response(response, status, ending.usage, ending.error))
        if self._tally is not None:
            self._tally.done(status)

    def _drop_frames(self, reason: DropReason) -> None:
        self.mailbox.clear(reason)

    def _forget(self) -> None:
        self._conversation.clear()

    @staticmethod
    def refusal(error: BeholderError, event_id: str | None = None, *, fatal: bool = False) -> RealtimeEvent:
        """The event that tells of an error. OpenAI's has no word for a fatal one: the connection is closed next."""
        return error_event(error, event_id)

    # ---- small things ----------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Encoded pictures kept in memory."""
        waiting = (*self.mailbox.waiting, *self.mailbox.out)
        return self._conversation.num_bytes + sum(len(frame.data) for frame in waiting)

    @property
    def _extras(self) -> Extras:
        return self._config.beholder or Extras()

    def _picture_terms(self, extras: Extras) -> PictureTerms:
        return PictureTerms(self.limits.max_frame_bytes, extras.detail or "auto", extras.max_pixels or 0)

    def _options(self, max_output_tokens: int | str | None, extras: Extras | None, path: str) -> GenerationOptions:
        if isinstance(max_output_tokens, str) and max_output_tokens != "inf":
            raise invalid(
                f"{path}.max_output_tokens",
                f"`{path}.max_output_tokens` is {max_output_tokens[:40]!r}; expected a number or inf.",
            )
        limit = self.limits.max_response_tokens
        tokens = min(DEFAULT_TOKENS, limit) if isinstance(max_output_tokens, str) else max_output_tokens
        if tokens is not None and not 1 <= tokens <= limit:
            raise invalid(
                f"{path}.max_output_tokens", f"`{path}.max_output_tokens` is {tokens}; expected 1 to {limit} or inf."
            )
        values = msgspec.structs.asdict(extras or Extras())
        del values["detail"], values["max_pixels"]
        try:
            bounded("max_pixels", (extras or Extras()).max_pixels, 1, self.limits.max_pixels)
            return generation_options(Sampling(max_tokens=tokens, **values))
        except ClientError as error:
            name = f"{path}.beholder.{error.param}"
            message = error.message.replace(f"`{error.param}`", f"`{name}`", 1)
            raise ClientError(message, code=error.code, param=name) from None

    def _say(self, name: str, **fields: Any) -> None:
        self.outbox.put(RealtimeEvent(name=name, fields=fields))

    @staticmethod
    def _place(response: _Response) -> dict[str, Any]:
        return {"response_id": response.id, "item_id": response.item.id, "output_index": 0, "content_index": 0}

    def _shown_session(self) -> dict[str, Any]:
        config = msgspec.to_builtins(self._config)
        served = ("type", "model", "instructions", "output_modalities", "max_output_tokens", "beholder")
        expires_in_s = self.limits.max_session_s
        shown: dict[str, Any] = {name: config[name] for name in served}
        return {"object": "realtime.session", "id": self.id, **shown, "tools": [], "expires_in_s": expires_in_s}

    @staticmethod
    def _shown_response(
        response: _Response, status: str, usage: Usage | None = None, error: BeholderError | None = None
    ) -> dict[str, Any]:
        details: dict[str, Any] | None = None
        if status not in {"in_progress", "completed"}:
            details = {"type": status}
            if status in _REASONS:
                details["reason"] = _REASONS[status]
            if error is not None:
                details["error"] = {"type": error.kind, "code": error.code, "message": error.message}
        return {
            "object": "realtime.response",
            "id": response.id,
            "status": status,
            "status_details": details,
            "output": [response.item.shown()] if response.started and status != "in_progress" else [],
            "output_modalities": ["text"],
            "max_output_tokens": response.max_output_tokens,
            "metadata": response.params.metadata,
            "usage": None if usage is None else _shown_usage(usage),
        }


def _merged(session: Extras, response: Extras | None) -> Extras:
    """A response's own settings, and the session's where it says nothing."""
    if response is None:
        return session
    given = {name: value for name, value in msgspec.structs.asdict(response).items() if value is not None}
    return msgspec.structs.replace(session, **given)


def _shown_usage(usage: Usage) -> dict[str, Any]:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - usage.image_tokens,
            "image_tokens": usage.image_tokens,
            "audio_tokens": 0,
            "cached_tokens": usage.cached_tokens,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }


def _refuse_unserved(given: RealtimeConfig | ResponseParams, path: str) -> None:
    if given.output_modalities not in (None, ["text"]):
        raise unsupported(
            f"{path}.output_modalities", f'`{path}.output_modalities` is not supported except as ["text"].'
        )
    for name in UNSERVED:
        value = getattr(given, name, None)
        if value is not None and value not in HARMLESS.get(name, ()):
            raise unsupported(f"{path}.{name}", f"`{path}.{name}` is not supported: leave it out.")
