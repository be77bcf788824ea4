"""One live session: decides from frames, events and time what to say and what to have done. No sockets, no clock.

    receive_text, receive_binary, tick, attach, detach ─┐                     ┌─▶ outbox: events for the client
                                                        ├─▶ Session ─advance──┤
    on_looked, on_started, on_delta, on_failed ─────────┘                     └─▶ take_actions: work for the driver

Every call carries the time in seconds of one monotonic clock. At most one response runs; a response that was created
is done exactly once, whatever happens; what comes for a response that is done is ignored.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

import msgspec

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Delta, GenerationOptions, ImagePart, Looked, Message, TextPart, Usage, VideoPart
from server.complaints import invalid
from server.faults import rejection
from server.stream.configuration import CAPABILITIES, apply_patch, check_ask, default_settings, options
from server.stream.events import (
    Ask,
    ClientEvent,
    ErrorEvent,
    ErrorInfo,
    FeedbackCreate,
    FeedbackCreated,
    FramesStats,
    Ping,
    Pong,
    ResponseCancel,
    ResponseCreate,
    ServerEvent,
    SessionClose,
    SessionClosed,
    SessionCreated,
    SessionGoingAway,
    SessionLimits,
    SessionUpdate,
    SessionUpdated,
    Status,
    TriggerMode,
)
from server.stream.gallery import Gallery
from server.stream.incoming import decode_event, event_id_of
from server.stream.lifetime import Lifetime, Tally
from server.stream.mailbox import DropReason, Frame
from server.stream.media import Media, parse
from server.stream.pace import CaptureClock
from server.stream.response import Response
from server.stream.work import Cancel, CloseCode, LookAt, Start, State

STATS_EVERY_S: Final = 1.0
GOING_AWAY_S: Final = 60.0
HOLD_S: Final = 1.0
"""Pause of the automatic triggers after a failure that says nothing of when to try again."""
REMEMBERED_RESPONSES: Final = 256
MAX_EVENT_BYTES: Final = 262_144
MEDIA_CODES: Final = ("image_", "video_", "invalid_data_url")


@dataclass
class _Look:
    id: str
    frame: Frame
    for_reference: bool
    """The frame is being captioned already; only its thumbnail is wanted."""


@dataclass
class _Asked:
    ask: Ask
    options: GenerationOptions
    received_s: float


class Session(Lifetime):
    """The rules of one session.

    Args:
        session_id: Its name.
        resume_token: Who knows it may go on with the session.
        model_names: Names of the served model, the one that answers carry first.
        limits: What the server allows.
        now_s: The time.
        tally: Is told of what is counted over all sessions.
    """

    def __init__(
        self,
        session_id: str,
        resume_token: str,
        model_names: tuple[str, ...],
        limits: SessionLimits,
        now_s: float,
        tally: Tally | None = None,
    ) -> None:
        super().__init__(session_id, resume_token, model_names, limits, now_s, tally)
        self.settings = default_settings(model_names[0], limits)
        self._clock = CaptureClock()
        self._serial = 0
        self._next_frame_id = 1
        self._gallery = Gallery()
        self._clip = bytearray()
        """A clip of which more is to come."""
        self._asks: deque[_Asked] = deque()
        self._active: Response | None = None
        self._look: _Look | None = None
        self._reference = b""
        self._change: float | None = None
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._due_s = now_s
        self._hold_until_s = now_s
        self._warned = False
        self._closing = False
        self._draining = False
        self._stats: FramesStats | None = None
        self._stats_s = now_s
        self._put(
            SessionCreated(
                session_id=session_id,
                resume_token=resume_token,
                session=self.settings,
                limits=limits,
                capabilities=CAPABILITIES,
            )
        )

    # ---- what the driver reads -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a response runs."""
        return self._active is not None

    @property
    def _is_free(self) -> bool:
        """Whether a trigger may start a response. One never ends what a client asked for."""
        active = self._active
        return active is None or (self.settings.preempt and active.trigger != "manual")

    @property
    def held_bytes(self) -> int:
        """Encoded pictures kept in memory."""
        return self._gallery.num_bytes((*self.mailbox.waiting, *self.mailbox.out)) + len(self._clip)

    def wake_at_s(self) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        times = [super().wake_at_s()]
        if self.state is not State.CONNECTED:
            return times[0]
        if not self._warned:
            times.append(self._expires_s - GOING_AWAY_S)
        if self._stats_now() != self._stats:
            times.append(self._stats_s + STATS_EVERY_S)
        may_start = self._look is None and self._is_free and not (self._closing or self._draining)
        if self.mailbox.waiting and may_start and self.settings.trigger.mode != "manual":
            times.append(max(self._due_s, self._hold_until_s))
        return min(times)

    # ---- the connection --------------------------------------------------------------------------------------------

    def attach(self, now_s: float) -> None:
        """A connection has come back."""
        super().attach(now_s)
        self._due_s = now_s
        self._reference = b""
        self._advance(now_s)

    def drain(self, grace_s: float, now_s: float) -> None:
        """The server is about to end: finish what runs, start nothing."""
        if self.state is State.DETACHED:
            self.end(CloseCode.DRAINING, "the server is shutting down", now_s)
        elif self.state is State.CONNECTED and not self._draining:
            self._draining = True
            self._put(SessionGoingAway(time_left_ms=grace_s * 1e3, reason="draining"))
            self._refuse_asks()
            self._drop_frames("cancelled")
            self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        super().tick(now_s)
        if self.state is not State.CONNECTED:
            return
        if not self._warned and now_s >= self._expires_s - GOING_AWAY_S:
            self._warned = True
            self._put(SessionGoingAway(time_left_ms=(self._expires_s - now_s) * 1e3, reason="session_expires"))
        self._advance(now_s)
        if now_s >= self._stats_s + STATS_EVERY_S:
            self._say_stats(now_s)

    # ---- what the client sends -------------------------------------------------------------------------------------

    def receive_text(self, data: str | bytes, now_s: float) -> None:
        """One JSON event."""
        raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
        if not self._hear(len(raw), now_s):
            return
        event_id: str | None = None
        try:
            if len(raw) > MAX_EVENT_BYTES:
                raise ClientError(
                    f"The event has {len(raw):,} bytes; at most {MAX_EVENT_BYTES:,} are accepted as text. Pictures go "
                    "into binary messages.",
                    status=413,
                    code="event_too_large",
                )
            event = decode_event(raw)
            event_id = event.event_id
            self._on_event(event, now_s)
        except BeholderError as error:
            self._put(ErrorEvent(error=ErrorInfo.of(error, event_id or event_id_of(raw[:MAX_EVENT_BYTES]))))
        self._advance(now_s)

    def receive_binary(self, data: bytes, now_s: float) -> None:
        """One binary message with media."""
        if not self._hear(len(data), now_s):
            return
        try:
            media = parse(data)
            if media.kind == "frame":
                self._on_frame(media, now_s)
            elif media.kind == "image":
                self._on_pinned(media, now_s)
            else:
                self._on_chunk(media, now_s)
        except BeholderError as error:
            self._put(ErrorEvent(error=ErrorInfo.of(error)))
        self._advance(now_s)

    def _on_event(self, event: ClientEvent, now_s: float) -> None:
        if isinstance(event, SessionUpdate):
            self._on_update(event)
        elif isinstance(event, ResponseCreate):
            self._on_ask(event.response, now_s)
        elif isinstance(event, ResponseCancel):
            self._on_cancel(event, now_s)
        elif isinstance(event, FeedbackCreate):
            self._on_feedback(event)
        elif isinstance(event, Ping):
            self._put(Pong(t=event.t, server_t=now_s * 1e3))
        elif isinstance(event, SessionClose):
            self._closing = True
            self._drop_frames("cancelled")
        else:
            raise ClientError(
                "`session.resume` was not the first message of its connection.", code="resume_not_first", param="type"
            )

    def _on_update(self, event: SessionUpdate) -> None:
        self.settings = apply_patch(event.session, self.settings, self._model_names, self.limits)
        self.mailbox.keep_latest_only(self.settings.overflow == "latest")
        self._gallery.pinned = {pinned: self._gallery.pinned[pinned] for pinned in self.settings.pinned_ids}
        self._gallery.keep_context(self.settings.context_frames)
        self._reference = b""  # what holds now was asked of no frame yet
        self._due_s = self._heard_s
        self._put(SessionUpdated(session=self.settings))

    def _on_frame(self, media: Media, now_s: float) -> None:
        frame_id = self._next_frame_id if media.id is None else media.id
        self._next_frame_id = frame_id + 1
        frame = Frame(frame_id, media.payload, now_s, self._clock.captured_s(media.ts, now_s))
        if self._closing or self._draining:
            self.mailbox.refuse("cancelled")
        elif not self._frames.admits(now_s):
            self.mailbox.refuse("rate")
        elif len(frame.data) > self.limits.max_frame_bytes or self._holds_too_much(frame):
            self.mailbox.refuse("too_large")
            raise self._too_large(frame)
        else:
            self._gallery.latest = frame
            self.mailbox.put(frame)

    def _on_chunk(self, media: Media, now_s: float) -> None:
        """A part of a clip. Once it is whole it is one frame, which no later one is compared with."""
        num_bytes = len(self._clip) + len(media.payload)
        if num_bytes > self.limits.max_clip_bytes or self.held_bytes + len(media.payload) > self.limits.max_held_bytes:
            self._clip.clear()
            raise ClientError(
                f"The clip has {num_bytes:,} bytes so far; at most {self.limits.max_clip_bytes:,} are accepted, and "
                f"{self.limits.max_held_bytes:,} in all that a session keeps. What follows begins another one.",
                status=413,
                code="video_too_large",
                param="payload",
            )
        self._clip += media.payload
        if not media.last:
            return
        whole, self._clip = bytes(self._clip), bytearray()
        clip_id = self._next_frame_id if media.id is None else media.id
        self._next_frame_id = clip_id + 1
        if self._closing or self._draining:
            self.mailbox.refuse("cancelled")
            return
        clip = Frame(clip_id, whole, now_s, self._clock.captured_s(media.ts, now_s), is_clip=True)
        self._gallery.latest = clip
        self.mailbox.put(clip)

    def _on_pinned(self, media: Media, now_s: float) -> None:
        frame_id = self._next_frame_id if media.id is None else media.id
        frame = Frame(frame_id, media.payload, now_s, now_s)
        if len(frame.data) > self.limits.max_frame_bytes or self._holds_too_much(frame):
            raise self._too_large(frame)
        num_images = len({*self._gallery.pinned, frame_id}) + max(1, 2 * self.settings.context_frames)
        if num_images > self.limits.max_images:
            raise ClientError(
                f"With this picture a prompt would have {num_images} pictures; at most {self.limits.max_images} are "
                "accepted: take others out with `session.update` and `pinned_ids`.",
                code="too_many_images",
                param="id",
            )
        self._next_frame_id = max(self._next_frame_id, frame_id + 1)
        self._gallery.pinned[frame_id] = frame
        self.settings = msgspec.structs.replace(self.settings, pinned_ids=list(self._gallery.pinned))
        self._put(SessionUpdated(session=self.settings))

    def _holds_too_much(self, frame: Frame) -> bool:
        return self.held_bytes + len(frame.data) > self.limits.max_held_bytes

    def _too_large(self, frame: Frame) -> ClientError:
        return ClientError(
            f"Frame {frame.id} has {len(frame.data):,} bytes; at most {self.limits.max_frame_bytes:,} are accepted in "
            f"one picture, and {self.limits.max_held_bytes:,} in all that a session keeps.",
            status=413,
            code="image_too_large",
            param="payload",
        )

    def _on_ask(self, ask: Ask, now_s: float) -> None:
        sampling = check_ask(ask, self.settings, self.limits)
        if self._closing or self._draining:
            raise ServiceError("The session is closing and takes no more.", code="draining")
        if ask.frame_ids is None and self._gallery.latest is None and not self._gallery.pinned:
            raise ClientError(
                "There is no frame yet to answer about: send one first, or `frame_ids` [] for a question without a "
                "picture.",
                code="no_frame",
                param="response.frame_ids",
            )
        for frame_id in ask.frame_ids or []:
            if self._gallery.find(frame_id, self.mailbox.waiting) is None:
                raise invalid(
                    "response.frame_ids",
                    f"`response.frame_ids` names {frame_id}, which is not kept; kept are "
                    f"{self._gallery.ids(self.mailbox.waiting)}.",
                )
        if len(ask.frame_ids or []) + len(self._gallery.pinned) > self.limits.max_images:
            raise invalid("response.frame_ids", "`response.frame_ids` and the pinned pictures are too many together.")
        if len(self._asks) >= self.limits.max_queue:
            raise ClientError(
                f"{len(self._asks)} responses wait already, the most that this server allows (--stream-max-queue).",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        self._asks.append(_Asked(ask, sampling, now_s))
        if self._active is not None and self.settings.preempt:
            self._cancel_active("cancelled", now_s)

    def _on_cancel(self, event: ResponseCancel, now_s: float) -> None:
        if self._active is None or event.response_id not in {None, self._active.id}:
            known = event.response_id is not None
            what = f"The response {event.response_id!r:.80} does not run" if known else "No response runs"
            raise ClientError(
                f"{what} now.",
                code="response_not_active",
                param="response_id",
            )
        self._cancel_active("cancelled", now_s)

    def _on_feedback(self, event: FeedbackCreate) -> None:
        if event.response_id not in self._recent:
            raise ClientError(
                f"The response {event.response_id[:80]!r} is not one of this session's last {REMEMBERED_RESPONSES}.",
                code="response_not_found",
                status=404,
                param="response_id",
            )
        if event.rating not in {"up", "down"}:
            raise invalid("rating", f"`rating` is {event.rating[:40]!r}; expected up or down.")
        if len(event.comment) > 2000:
            raise invalid("comment", f"`comment` has {len(event.comment)} characters; expected at most 2000.")
        if len(event.tags) > 16 or any(len(tag) > 64 for tag in event.tags):
            raise invalid("tags", "`tags` is too large; expected at most 16 tags of 64 characters.")
        self._put(FeedbackCreated(response_id=event.response_id))
        if self._tally is not None:
            self._tally.feedback(event.rating)

    # ---- what the work gives ---------------------------------------------------------------------------------------

    def on_looked(self, look_id: str, looked: Looked, now_s: float) -> None:
        """A frame was compared."""
        look = self._look
        if look is None or look.id != look_id:
            return
        self._look = None
        self._change = looked.change if not look.for_reference else self._change
        if look.for_reference:
            self._reference = looked.thumbnail
        elif self.settings.trigger.mode != "on_change":
            self.mailbox.put_back(look.frame)
        elif looked.change is not None and looked.change < self.settings.trigger.change_threshold:
            self.mailbox.drop(look.frame, "unchanged")
        elif not self._is_free:  # something was asked meanwhile
            self.mailbox.put_back(look.frame)
        else:
            self._on_change(look.frame, looked, now_s)
        self._advance(now_s)

    def _on_change(self, frame: Frame, looked: Looked, now_s: float) -> None:
        """Caption what has changed; if a newer frame has come meanwhile that one, compared later."""
        newest = self.mailbox.take() if self.mailbox.latest_only else None
        if newest is None:
            self._reference = looked.thumbnail
        else:
            self.mailbox.drop(frame, "replaced")
            if not newest.is_clip:
                self._look_at(newest, for_reference=True)
        if self._active is not None:
            self._cancel_active("cancelled", now_s)
        self._start("on_change", newest or frame, now_s)

    def on_look_failed(self, look_id: str, error: BeholderError, now_s: float) -> None:
        """A frame could not be compared."""
        look = self._look
        if look is None or look.id != look_id:
            return
        self._look = None
        if not look.for_reference:
            self.mailbox.drop(look.frame, "decode_error" if is_media_error(error) else "failed")
            info = ErrorInfo.of(error)
            self._put(ErrorEvent(error=msgspec.structs.replace(info, param=f"frame {look.frame.id}")))
        if not is_media_error(error):
            self._hold(error, now_s)
        self._advance(now_s)

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

    def on_delta(self, response_id: str, delta: Delta, now_s: float) -> None:
        """The engine has said more."""
        response = self._running(response_id)
        if response is None:
            return
        if delta.error is not None:
            self.on_failed(response_id, rejection(delta.error), now_s)
            return
        if delta.finish_reason in {"abort", "error"}:
            self.on_failed(response_id, ServiceError("The generation was ended by the server.", code="aborted"), now_s)
            return
        was_silent = response.frame_age_ms is None
        event = response.take(delta, now_s)
        if was_silent and response.frame_age_ms is not None:
            self.age.add(response.frame_age_ms)
            if self._tally is not None:
                self._tally.first_token(response.frame_age_ms)
        if event is not None:
            self._put(event)
        if delta.finish_reason is not None:
            status: Status = "incomplete" if delta.finish_reason == "length" else "completed"
            self._finish(response, status, now_s, finish_reason=delta.finish_reason, usage=delta.usage)
        self._advance(now_s)

    def on_failed(self, response_id: str, error: BeholderError, now_s: float) -> None:
        """A response cannot go on, or could not begin."""
        response = self._running(response_id)
        if response is None:
            return
        reason: DropReason = "failed"
        if is_media_error(error):
            reason = "decode_error"
            at_fault = response.places.get(error.param or "", response.newest)
            self._gallery.forget(at_fault)
            if at_fault is not None and self._gallery.pinned.get(at_fault.id) is at_fault:
                del self._gallery.pinned[at_fault.id]
                self.settings = msgspec.structs.replace(self.settings, pinned_ids=list(self._gallery.pinned))
                self._put(SessionUpdated(session=self.settings))
            error.param = None if at_fault is None else f"frame {at_fault.id}"
        else:
            self._hold(error, now_s)
        self._finish(response, "failed", now_s, error=error, reason=reason)
        self._advance(now_s)

    # ---- deciding --------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Start what may start now."""
        if self.state is not State.CONNECTED or self._reads_too_slowly(now_s):
            return
        if self._asks and self._active is None:
            self._start_asked(self._asks.popleft(), now_s)
        if (self._closing or self._draining) and self._active is None:
            if self._closing:
                self._put(SessionClosed())
                self.end(CloseCode.NORMAL, "", now_s)
            else:
                self.end(CloseCode.DRAINING, "the server is shutting down", now_s)
            return
        if self._closing or self._draining or now_s < max(self._hold_until_s, self._due_s):
            return
        mode = self.settings.trigger.mode
        if mode == "manual" or not self._is_free:
            return
        if mode == "on_change":
            if self._look is not None or not self.mailbox.waiting:
                return
            if not self.mailbox.waiting[0].is_clip:
                frame = self.mailbox.take()
                assert frame is not None
                self._look_at(frame, for_reference=False)
                return
        frame = self.mailbox.take()
        if frame is not None:
            if self._active is not None:
                self._cancel_active("cancelled", now_s)
            self._start(mode, frame, now_s)

    def _look_at(self, frame: Frame, *, for_reference: bool) -> None:
        self._serial += 1
        self._look = _Look(f"look-{self.id}-{self._serial}", frame, for_reference)
        self._actions.append(LookAt(self._look.id, frame.data, self._reference))

    def _start(self, mode: TriggerMode, frame: Frame, now_s: float) -> None:
        """A response that a trigger starts."""
        self._due_s = now_s + self.settings.trigger.interval_ms / 1e3
        self._begin(
            mode,
            self._gallery.with_context(frame, self.settings.context_frames),
            frame,
            options(self.settings, "session"),
            frame.received_s,
            now_s,
        )

    def _start_asked(self, asked: _Asked, now_s: float) -> None:
        """A response that a client asked for."""
        ask = asked.ask
        newest: Frame | None
        if ask.frame_ids is None:
            newest = self._gallery.latest
            frames = [] if newest is None else self._gallery.with_context(newest, self.settings.context_frames)
        else:  # some may have gone while it waited
            frames = [
                found for i in ask.frame_ids if (found := self._gallery.find(i, self.mailbox.waiting)) is not None
            ]
            newest = frames[-1] if frames else None
        for frame in frames:
            self.mailbox.take_this(frame)
        self._begin("manual", frames, newest, asked.options, asked.received_s, now_s, ask)

    def _begin(
        self,
        mode: TriggerMode,
        frames: list[Frame],
        newest: Frame | None,
        sampling: GenerationOptions,
        trigger_s: float,
        now_s: float,
        ask: Ask | None = None,
    ) -> None:
        self._serial += 1
        response = Response(
            f"resp-{self.id}-{self._serial}",
            mode,
            frames,
            newest,
            now_s,
            ask.metadata if ask is not None else None,
            self.settings.return_token_ids,
        )
        self._active = response
        self._recent[response.id] = None
        if len(self._recent) > REMEMBERED_RESPONSES:
            self._recent.popitem(last=False)
        messages = self._messages_of(frames, ask)
        first = 1 if self.settings.prompt_position == "before" else 0
        for index, frame in enumerate((*self._gallery.pinned.values(), *frames), first):
            response.places[f"messages[{len(messages) - 1}].content[{index}]"] = frame
        self._actions.append(Start(response.id, messages, sampling))
        self._put(response.created(trigger_s))

    def _messages_of(self, frames: list[Frame], ask: Ask | None) -> list[Message]:
        """The chat. The question stands before the pictures, where the prefix cache can hold it."""
        prompt = self.settings.prompt if ask is None or ask.prompt is None else ask.prompt
        instructions = self.settings.instructions if ask is None or ask.instructions is None else ask.instructions
        pictures = [
            VideoPart(data=frame.data) if frame.is_clip else ImagePart(data=frame.data, detail=self.settings.detail)
            for frame in (*self._gallery.pinned.values(), *frames)
        ]
        if self.settings.prompt_position == "before":
            question = Message("user", [TextPart(prompt), *pictures])
        else:
            question = Message("user", [*pictures, TextPart(prompt)])
        return [*([Message("system", [TextPart(instructions)])] if instructions else []), question]

    # ---- ending ----------------------------------------------------------------------------------------------------

    def _cancel_active(self, reason: DropReason, now_s: float) -> None:
        assert self._active is not None
        self._actions.append(Cancel(self._active.id))
        self._finish(self._active, "cancelled", now_s, reason=reason)

    def _finish(
        self,
        response: Response,
        status: Status,
        now_s: float,
        *,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        error: BeholderError | None = None,
        reason: DropReason = "failed",
    ) -> None:
        self._active = None
        if status == "failed":
            self._reference = b""  # the change was not told
        for frame in response.frames:
            self.mailbox.drop(frame, reason)  # those that were captioned are settled
        self._put(response.done(status, now_s, finish_reason, usage, error))
        if self._tally is not None:
            self._tally.done(status)

    def _stop_work(self, reason: DropReason, now_s: float) -> None:
        self._clip.clear()
        if self._active is not None:
            self._cancel_active(reason, now_s)
        self._drop_frames(reason)

    def _forget(self) -> None:
        self._asks.clear()
        self._gallery.clear()
        self._clip.clear()

    @staticmethod
    def fatal(error: BeholderError) -> ServerEvent:
        """The event that tells why the connection is closed next."""
        return ErrorEvent(error=ErrorInfo.of(error, fatal=True))

    def _drop_frames(self, reason: DropReason) -> None:
        if self._look is not None:
            self._actions.append(Cancel(self._look.id))
            self.mailbox.drop(self._look.frame, reason)
            self._look = None
        self.mailbox.clear(reason)

    def _refuse_asks(self) -> None:
        while self._asks:
            self._asks.popleft()
            error = ServiceError("The server is shutting down; ask another one.", code="draining")
            self._put(ErrorEvent(error=ErrorInfo.of(error)))

    def _hold(self, error: BeholderError, now_s: float) -> None:
        self._hold_until_s = now_s + (HOLD_S if error.retry_after_s is None else error.retry_after_s)

    # ---- saying ----------------------------------------------------------------------------------------------------

    def _running(self, response_id: str) -> Response | None:
        active = self._active
        return active if active is not None and active.id == response_id else None

    def _put(self, event: ServerEvent) -> None:
        self.outbox.put(event)

    def _stats_now(self) -> FramesStats:
        return FramesStats(
            received=self.mailbox.received,
            captioned=self.mailbox.captioned,
            dropped={reason: count for reason, count in self.mailbox.dropped.items() if count},
            pending=self.mailbox.pending,
            change=self._change,
            frame_age_p50_ms=self.age.median,
            rtt_ms=self.rtt_ms,
        )

    def _say_stats(self, now_s: float) -> None:
        stats = self._stats_now()
        if stats != self._stats and stats.received:
            self._put(stats)
            self._stats_s = now_s
        self._stats = stats


def is_media_error(error: BeholderError) -> bool:
    """Whether the picture is at fault: others may do better at once."""
    return error.status < 500 and error.code.startswith(MEDIA_CODES)
