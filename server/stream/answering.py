"""A response of `vlm.stream.v1` from its beginning to its one end: the chat it is made of, its words, its failures.

_begin ─▶ on_started ─▶ on_delta … ─▶ _finish          exactly once, whatever happens
               └──── on_failed, _cancel_active ───┘
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from preprocess.errors import BeholderError
from preprocess.wire import Delta, ImagePart, Message, TextPart, VideoPart
from server.stream.client_events import Ask
from server.stream.configuration import first_configuration
from server.stream.lifetime import Lifetime, Tally
from server.stream.mailbox import Frame
from server.stream.outbound import ServerEvent
from server.stream.reception import Reception
from server.stream.response import Ending, Response
from server.stream.sampling import Question
from server.stream.server_events import ErrorEvent, ErrorInfo, SessionCreated, SessionUpdated
from server.stream.settings_events import SessionSettings, TriggerMode
from server.stream.terms import Terms
from server.stream.work import Start

HOLD_S: Final = 1.0
"""Pause of the automatic triggers after a failure that says nothing of when to try again."""
REMEMBERED_RESPONSES: Final = 256
MEDIA_CODES: Final = ("image_", "video_", "invalid_data_url")


@dataclass(frozen=True)
class Asked:
    """What a client asks itself, until its turn comes."""

    ask: Ask
    question: Question
    received_s: float
    event_id: str | None


class Answering(Lifetime[Response]):
    """The part of a session that answers; see `Lifetime` for its arguments."""

    def __init__(
        self, session_id: str, resume_token: str, terms: Terms, now_s: float, tally: Tally | None = None
    ) -> None:
        super().__init__(session_id, resume_token, terms, now_s, tally)
        self._configuration = first_configuration(terms)
        self._reception = Reception(terms.limits, self.mailbox, self._rates.frames)
        self._gallery = self._reception.gallery
        self._recent: OrderedDict[str, None] = OrderedDict()
        """Ids of the last responses."""
        self._reference = b""
        """Thumbnail of what was captioned last; with none, anything is a change."""
        self._hold_until_s = now_s
        self._put(
            SessionCreated(
                session_id=session_id,
                resume_token=resume_token,
                session=self.settings,
                limits=terms.limits,
                capabilities=terms.capabilities,
            )
        )

    @property
    def settings(self) -> SessionSettings:
        """What holds now, as clients see it."""
        return self._configuration.shown

    @property
    def held_bytes(self) -> int:
        """Encoded pictures kept in memory."""
        return self._reception.held_bytes

    # ---- beginning -------------------------------------------------------------------------------------------------

    def _begin(
        self,
        mode: TriggerMode,
        frames: list[Frame],
        newest: Frame | None,
        trigger_s: float,
        now_s: float,
        asked: Asked | None = None,
    ) -> None:
        """Ask the session's question, or the one that a client asks itself."""
        self._serial += 1
        response = Response(
            f"resp-{self.id}-{self._serial}",
            mode,
            frames,
            newest,
            now_s,
            None if asked is None else asked.ask.metadata,
            self.settings.return_token_ids,
            is_context=asked is None or asked.ask.frame_ids is None,
        )
        self._active = response
        self._recent[response.id] = None
        if len(self._recent) > REMEMBERED_RESPONSES:
            self._recent.popitem(last=False)
        question = self._configuration.question if asked is None else asked.question
        instructions = self.settings.instructions
        if asked is not None and asked.ask.instructions is not None:
            instructions = asked.ask.instructions
        messages = self._messages_of(frames, question.prompt, instructions)
        first = 1 if self.settings.prompt_position == "before" else 0
        for index, frame in enumerate((*self._gallery.pinned.values(), *frames), first):
            response.places[f"messages[{len(messages) - 1}].content[{index}]"] = frame
        self._actions.append(Start(response.id, messages, question.options))
        self._put(response.created(trigger_s))

    def _messages_of(self, frames: list[Frame], prompt: str, instructions: str | None) -> list[Message]:
        """The chat. The question stands before the pictures, where the prefix cache can hold it."""
        pictures = [self._part_of(frame) for frame in (*self._gallery.pinned.values(), *frames)]
        if self.settings.prompt_position == "before":
            question = Message("user", [TextPart(prompt), *pictures])
        else:
            question = Message("user", [*pictures, TextPart(prompt)])
        return [*([Message("system", [TextPart(instructions)])] if instructions else []), question]

    def _part_of(self, frame: Frame) -> ImagePart | VideoPart:
        max_pixels = self.settings.max_pixels or 0
        if frame.is_clip:
            return VideoPart(data=frame.data, max_pixels=max_pixels)
        return ImagePart(data=frame.data, detail=self.settings.detail, max_pixels=max_pixels)

    # ---- what the engine says --------------------------------------------------------------------------------------

    def on_started(
        self, response_id: str, num_prompt_tokens: int, decode_ms: float, preprocess_ms: float, now_s: float
    ) -> None:
        """The engine has a response's chat."""
        response = self._running(response_id)
        if response is None:
            return
        response.num_prompt_tokens = num_prompt_tokens
        response.decode_ms, response.preprocess_ms = decode_ms, preprocess_ms
        for frame in response.frames:
            self.mailbox.caption(frame)
        if response.is_context:
            self._gallery.captioned(response.frames, self.settings.context_frames)

    def _speak(self, response: Response, delta: Delta, now_s: float) -> None:
        was_silent = response.frame_age_ms is None
        event = response.take(delta, now_s)
        if was_silent and response.frame_age_ms is not None:
            self.age.add(response.frame_age_ms)
            if self._tally is not None:
                self._tally.first_token(response.frame_age_ms)
        if event is not None:
            self._put(event)

    # ---- ending ----------------------------------------------------------------------------------------------------

    def on_failed(self, response_id: str, error: BeholderError, now_s: float) -> None:
        """A response cannot go on, or could not begin."""
        response = self._running(response_id)
        if response is None:
            return
        if is_media_error(error):
            at_fault = response.places.get(error.param or "", response.newest)
            self._gallery.forget(at_fault)
            if at_fault is not None:
                self.mailbox.drop(at_fault, "decode_error")
            if at_fault is not None and self._gallery.pinned.get(at_fault.id) is at_fault:
                del self._gallery.pinned[at_fault.id]
                self._show_pinned(list(self._gallery.pinned))
            error.param = None if at_fault is None else f"frame {at_fault.id}"
        else:
            self._hold(error, now_s)
        self._finish(response, Ending("failed", error=error), now_s)
        self._advance(now_s)

    def _finish(self, response: Response, ending: Ending, now_s: float) -> None:
        self._active = None
        if ending.status == "failed":
            self._reference = b""  # the change was not told
        for frame in response.frames:
            self.mailbox.drop(frame, ending.reason)  # those that were captioned are settled
        self._put(response.done(ending, now_s))
        if self._tally is not None:
            self._tally.done(ending.status)

    def _hold(self, error: BeholderError, now_s: float) -> None:
        self._hold_until_s = now_s + (HOLD_S if error.retry_after_s is None else error.retry_after_s)

    # ---- saying ----------------------------------------------------------------------------------------------------

    def _show_pinned(self, pinned_ids: list[int]) -> None:
        self._configuration = self._configuration.pinning(pinned_ids)
        self._put(SessionUpdated(session=self.settings))

    def _put(self, event: ServerEvent) -> None:
        self.outbox.put(event)

    @staticmethod
    def refusal(error: BeholderError, event_id: str | None = None, *, fatal: bool = False) -> ServerEvent:
        """The event that tells of an error."""
        return ErrorEvent(error=ErrorInfo.of(error, event_id, fatal=fatal))


def is_media_error(error: BeholderError) -> bool:
    """Whether the picture is at fault: others may do better at once."""
    return error.status < 500 and error.code.startswith(MEDIA_CODES)
