"""When a response of `vlm.stream.v1` starts: what clients asked for goes first, then what the trigger says of frames.

on_change:  a frame waits ─▶ it is looked at ─▶ unchanged: dropped
                                            └─▶ changed: the newest frame is captioned, and is the next reference
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from preprocess.errors import BeholderError
from preprocess.wire import Looked
from server.stream.answering import Answering, Asked, is_media_error
from server.stream.lifetime import Tally
from server.stream.mailbox import DropReason, Frame
from server.stream.server_events import ErrorEvent, ErrorInfo, SessionClosed
from server.stream.settings_events import TriggerMode
from server.stream.terms import Terms
from server.stream.work import Cancel, CloseCode, LookAt, State


@dataclass(frozen=True)
class _Look:
    id: str
    frame: Frame
    for_reference: bool
    """The frame is being captioned already; only its thumbnail is wanted."""


class Triggered(Answering):
    """The part of a session that decides; see `Lifetime` for its arguments."""

    def __init__(
        self, session_id: str, resume_token: str, terms: Terms, now_s: float, tally: Tally | None = None
    ) -> None:
        super().__init__(session_id, resume_token, terms, now_s, tally)
        self._asks: deque[Asked] = deque()
        self._look: _Look | None = None
        self._change: float | None = None
        """Of the frame that was compared last, in percent."""
        self._due_s = now_s
        """When a trigger may start the next response."""
        self._closing = False

    @property
    def _is_free(self) -> bool:
        """Whether a trigger may start a response. One never ends what a client asked for."""
        active = self._active
        return active is None or (self.settings.preempt and active.trigger != "manual")

    @property
    def _is_leaving(self) -> bool:
        return self._closing or self._draining

    def _trigger_at_s(self) -> float | None:
        """When time alone lets a trigger start a response."""
        mode = self.settings.trigger.mode
        if mode == "manual" or not self.mailbox.waiting or self._look is not None:
            return None
        return max(self._due_s, self._hold_until_s) if self._is_free and not self._is_leaving else None

    # ---- starting --------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Start what may start now."""
        if self.state is not State.CONNECTED or self._reads_too_slowly(now_s):
            return
        if self._asks and self._active is None:
            self._start_asked(self._asks.popleft(), now_s)
        if self._is_leaving:
            if self._active is None:
                self._leave(now_s)
        elif now_s >= max(self._hold_until_s, self._due_s) and self._is_free:
            self._start_triggered(now_s)

    def _leave(self, now_s: float) -> None:
        """All is said."""
        if self._closing:
            self._put(SessionClosed())
            self.end(CloseCode.NORMAL, "", now_s)
        else:
            self.end(CloseCode.DRAINING, "the server is shutting down", now_s)

    def _start_triggered(self, now_s: float) -> None:
        mode = self.settings.trigger.mode
        if mode == "manual" or not self.mailbox.waiting or (mode == "on_change" and self._look is not None):
            return
        frame = self.mailbox.take()
        assert frame is not None
        if mode == "on_change" and not frame.is_clip:
            self._look_at(frame, for_reference=False)
        else:
            self._start(mode, frame, now_s)

    def _start(self, mode: TriggerMode, frame: Frame, now_s: float) -> None:
        """A response that a trigger starts."""
        if self._active is not None:
            self._cancel_active("cancelled", now_s)
        self._due_s = now_s + self.settings.trigger.interval_ms / 1e3
        frames = self._gallery.with_context(frame, self.settings.context_frames)
        self._begin(mode, frames, frame, frame.received_s, now_s)

    def _start_asked(self, asked: Asked, now_s: float) -> None:
        """A response that a client asked for."""
        newest: Frame | None
        if asked.ask.frame_ids is None:
            newest = self._gallery.latest
            frames = [] if newest is None else self._gallery.with_context(newest, self.settings.context_frames)
        else:  # some may have gone while it waited
            waiting = self.mailbox.waiting
            found = [self._gallery.find(frame_id, waiting) for frame_id in asked.ask.frame_ids]
            frames = [frame for frame in found if frame is not None]
            newest = frames[-1] if frames else None
        for frame in frames:
            self.mailbox.take_this(frame)
        look = self._look
        if look is not None and look.frame in frames and not look.for_reference:
            self._give_up_look()  # the frame is this response's now
        self._begin("manual", frames, newest, asked.received_s, now_s, asked)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _look_at(self, frame: Frame, *, for_reference: bool) -> None:
        self._serial += 1
        self._look = _Look(f"look-{self.id}-{self._serial}", frame, for_reference)
        self._actions.append(LookAt(self._look.id, frame.data, self._reference))

    def _give_up_look(self) -> None:
        assert self._look is not None
        self._actions.append(Cancel(self._look.id))
        self._look = None

    def _looked_at(self, look_id: str) -> _Look | None:
        """The look of that id, which is over; None when it was given up before."""
        look = self._look
        if look is None or look.id != look_id:
            return None
        self._look = None
        return look

    def on_looked(self, look_id: str, looked: Looked, now_s: float) -> None:
        """A frame was compared."""
        look = self._looked_at(look_id)
        if look is None:
            return
        if look.for_reference:
            self._reference = looked.thumbnail
        else:
            self._change = looked.change
            if self.settings.trigger.mode != "on_change":  # since it was taken
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
        self._start("on_change", newest or frame, now_s)

    def on_look_failed(self, look_id: str, error: BeholderError, now_s: float) -> None:
        """A frame could not be compared."""
        look = self._looked_at(look_id)
        if look is None:
            return
        if not look.for_reference:
            self.mailbox.drop(look.frame, "decode_error" if is_media_error(error) else "failed")
            info = ErrorInfo.of(error)
            self._put(ErrorEvent(error=msgspec.structs.replace(info, param=f"frame {look.frame.id}")))
        if not is_media_error(error):
            self._hold(error, now_s)
        self._advance(now_s)

    # ---- giving up -------------------------------------------------------------------------------------------------

    def _drop_frames(self, reason: DropReason) -> None:
        self._reception.forget_parts()
        if self._look is not None:
            if not self._look.for_reference:
                self.mailbox.drop(self._look.frame, reason)
            self._give_up_look()
        self.mailbox.clear(reason)

    def _forget(self) -> None:
        self._asks.clear()
        self._gallery.clear()
        self._reception.forget_parts()
