"""A session of the OpenAI Realtime API, as far as it is about text and pictures. No sockets, no clock.

The client builds a conversation of items and asks for responses. `input_image_buffer.append` keeps a camera's newest
picture; the next response turns it into an item of the conversation and answers about it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Delta, Looked, TextPart
from server.complaints import invalid, unsupported
from server.stream.answering import is_media_error
from server.stream.client_events import ClientEvent
from server.stream.configuration import check_metadata
from server.stream.conversation import Conversation, Item, PictureTerms, item_of, messages_of, new_id, picture
from server.stream.incoming import Decoders
from server.stream.lifetime import Lifetime, Tally
from server.stream.mailbox import DropReason, Frame
from server.stream.realtime_events import (
    DELTA,
    NOT_SERVED,
    REALTIME_EVENTS,
    Extras,
    ImageAppend,
    ItemCreate,
    ItemInput,
    ItemNamed,
    RealtimeConfig,
    RealtimeEvent,
    RealtimeResponseCancel,
    RealtimeResponseCreate,
    RealtimeUpdate,
    ResponseParams,
    error_event,
)
from server.stream.realtime_rules import check_brings_pictures, merged, options_of, picture_terms, refuse_unserved
from server.stream.realtime_shown import Response, shown_session
from server.stream.response import Ending
from server.stream.terms import Terms
from server.stream.work import CloseCode, Start, State

_decoders: Final = Decoders(REALTIME_EVENTS)


class RealtimeSession(Lifetime[Response]):
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
        self._say("session.created", session=self._shown_session)

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
            item = item_of(event.item, "item", picture_terms(self._extras, self.limits))
            self._add(item, event.previous_item_id)
        elif isinstance(event, ItemNamed) and event.type == "conversation.item.retrieve":
            self._say("conversation.item.retrieved", item=self._conversation.find(event.item_id).shown())
        elif isinstance(event, ItemNamed):
            self._conversation.delete(event.item_id)
            self._say("conversation.item.deleted", item_id=event.item_id)
        elif isinstance(event, RealtimeResponseCreate):
            self._on_ask(event.response, now_s)
        elif isinstance(event, RealtimeResponseCancel):
            self._cancel_asked(event.response_id, "response_cancel_not_active", now_s)
        elif isinstance(event, ImageAppend):
            self._on_image(event, now_s)
        else:
            self.mailbox.clear("cancelled")

    def _on_update(self, patch: RealtimeConfig) -> None:
        refuse_unserved(patch, "session")
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
        options_of(config.max_output_tokens, config.beholder or Extras(), self.limits, "session")
        self._config = config
        self._say("session.updated", session=self._shown_session)

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
        refuse_unserved(params, "response")
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
        extras = merged(self._extras, params.beholder)
        sampling = options_of(max_tokens, extras, self.limits, "response")
        given = None
        if params.input is not None:
            terms = picture_terms(extras, self.limits)
            given = [self._given(item, f"response.input[{i}]", terms) for i, item in enumerate(params.input)]
        check_brings_pictures(
            params.beholder,
            None if given is None else [item for item in given if item not in self._conversation],
            camera=bool(self.mailbox.waiting),
        )
        in_conversation = params.conversation != "none"
        if in_conversation:
            self._conversation.check_room()
        frame = self._show_newest(extras) if given is None else None
        items = list(self._conversation) if given is None else given
        instructions = params.instructions if params.instructions is not None else self._config.instructions
        if not items and not instructions:
            raise ClientError(
                "The conversation is empty: create an item first, or give instructions.", code="conversation_empty"
            )
        messages, whose = messages_of(items, instructions)
        self._active = response = Response(
            new_id("resp"),
            params,
            Item(new_id("item"), "assistant", [TextPart("")], "in_progress"),
            sampling.max_tokens or 0,
            in_conversation,
            frame,
            whose,
            now_s,
        )
        self._actions.append(Start(response.id, messages, sampling))
        self._say("response.created", response=response.shown("in_progress"))
        left = [msgspec.to_builtins(limit) for limit in self._rates.shown_to_openai(now_s)]
        self._say("rate_limits.updated", rate_limits=left)

    def _given(self, given: ItemInput, path: str, terms: PictureTerms) -> Item:
        """An item of a response's `input`: a new one, or one of the conversation."""
        if given.type != "item_reference":
            return item_of(given, path, terms)
        if given.role is not None or given.content is not None:
            raise invalid(path, f"`{path}` refers to an item by its `id`, and has no `role` or `content`.")
        return self._conversation.find(given.id or "", f"{path}.id")

    def _show_newest(self, extras: Extras) -> Frame | None:
        """The camera's newest picture becomes an item, unless there is none."""
        frame = self.mailbox.take()
        if frame is not None:
            try:
                url = frame.data.decode()
                self._add(Item(new_id("item"), "user", [picture(url, "image", picture_terms(extras, self.limits))]))
            except ClientError:
                self.mailbox.drop(frame, "failed")
                raise
        return frame

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
            previous = self._conversation.answer(response.item)
            self._say("conversation.item.added", previous_item_id=previous, item=item)
        self._say("response.content_part.added", **response.place, part={"type": "text", "text": ""})

    def _speak(self, response: Response, delta: Delta, now_s: float) -> None:
        if delta.token_ids and not response.has_spoken:
            response.has_spoken = True
            if response.frame is not None and self._tally is not None:
                self._tally.first_token((now_s - response.frame.captured_s) * 1e3)
        if delta.text:
            response.text.append(delta.text)
            self._say(DELTA, **response.place, delta=delta.text)

    def on_failed(self, response_id: str, error: BeholderError, now_s: float) -> None:
        """A response cannot go on, or could not begin."""
        response = self._running(response_id)
        if response is None:
            return
        reason: DropReason = "failed"
        at_fault = response.whose.get(error.param or "") if is_media_error(error) else None
        if at_fault is not None and at_fault in self._conversation:  # or else no later response could succeed
            self._conversation.delete(at_fault.id)
            self._say("conversation.item.deleted", item_id=at_fault.id)
            error.message += f" The item {at_fault.id} was deleted."
            if response.frame is not None and at_fault is list(response.whose.values())[-1]:
                reason = "decode_error"
        self._finish(response, Ending("failed", error=error, reason=reason), now_s)
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

    def _finish(self, response: Response, ending: Ending, now_s: float) -> None:
        self._active = None
        status = ending.status
        if response.frame is not None:
            self.mailbox.drop(response.frame, ending.reason)  # unless it was captioned
        response.item.status = "completed" if status == "completed" else "incomplete"
        response.item.parts = [TextPart("".join(response.text))]
        if response.started:
            text, place = "".join(response.text), response.place
            self._say("response.output_text.done", **place, text=text)
            self._say("response.content_part.done", **place, part={"type": "text", "text": text})
            self._say("response.output_item.done", response_id=response.id, output_index=0, item=response.item.shown())
            if response.in_conversation and response.item in self._conversation:
                self._say("conversation.item.done", item=response.item.shown())
        self._say("response.done", response=response.shown(status, ending.usage, ending.error))
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

    @property
    def _shown_session(self) -> dict[str, Any]:
        return shown_session(self._config, self.id, self.limits.max_session_s)

    def _say(self, name: str, **fields: Any) -> None:
        self.outbox.put(RealtimeEvent(name=name, fields=fields))
