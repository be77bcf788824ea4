"""What a binary message becomes: a frame that waits, a pinned picture, a part of a clip; or why it goes no further."""

from __future__ import annotations

from preprocess.errors import ClientError
from server.stream.gallery import Gallery
from server.stream.mailbox import Frame, Mailbox
from server.stream.media import MAX_ID, Media
from server.stream.pace import Bucket, CaptureClock
from server.stream.server_events import SessionLimits


class Reception:
    """Takes what a session is sent, within its limits.

    Args:
        limits: What the server allows.
        mailbox: Where frames go, and where they are accounted for.
        rate: How many frames a second are taken.
    """

    def __init__(self, limits: SessionLimits, mailbox: Mailbox, rate: Bucket) -> None:
        self.gallery = Gallery()
        self.closed = False
        """Nothing gets a response any more."""
        self._limits = limits
        self._mailbox = mailbox
        self._rate = rate
        self._clock = CaptureClock()
        self._next_id = 1
        self._clip = bytearray()
        """A clip of which more is to come."""

    @property
    def held_bytes(self) -> int:
        """Encoded pictures and parts of clips kept in memory."""
        return self.gallery.num_bytes((*self._mailbox.waiting, *self._mailbox.out)) + len(self._clip)

    def take_frame(self, media: Media, now_s: float) -> None:
        """A picture of a live source. Raises `ClientError` when it is too large."""
        frame = self._frame(media, now_s)
        if self.closed:
            self._mailbox.refuse("cancelled")
        elif not self._rate.admits(now_s):
            self._mailbox.refuse("rate")
        elif self._is_too_large(frame):
            self._mailbox.refuse("too_large")
            raise self._too_large(frame)
        else:
            self._line_up(frame)

    def take_part(self, media: Media, now_s: float) -> None:
        """A part of a clip. Once it is whole it is one frame, which no later one is compared with.

        Raises:
            ClientError: There is too much of it; all of it is forgotten.
        """
        num_bytes = len(self._clip) + len(media.payload)
        if (
            num_bytes > self._limits.max_clip_bytes
            or self.held_bytes + len(media.payload) > self._limits.max_held_bytes
        ):
            self._clip.clear()
            raise ClientError(
                f"The clip has {num_bytes:,} bytes so far; at most {self._limits.max_clip_bytes:,} are accepted, and "
                f"{self._limits.max_held_bytes:,} in all that a session keeps. What follows begins another one.",
                status=413,
                code="video_too_large",
                param="payload",
            )
        self._clip += media.payload
        if not media.last:
            return
        whole, self._clip = bytes(self._clip), bytearray()
        clip = self._frame(media, now_s)
        clip.data, clip.is_clip = whole, True
        if self.closed:
            self._mailbox.refuse("cancelled")
        else:
            self._line_up(clip)

    def pin(self, media: Media, num_context: int, now_s: float) -> list[int]:
        """A picture that stays; the ids of all that do.

        Raises:
            ClientError: It is too large, or one too many beside twice `num_context` frames.
        """
        frame = Frame(self._next_id if media.id is None else media.id, media.payload, now_s, now_s)
        if self._is_too_large(frame):
            raise self._too_large(frame)
        num_images = len({*self.gallery.pinned, frame.id}) + max(1, 2 * num_context)
        if num_images > self._limits.max_images:
            raise ClientError(
                f"With this picture a prompt would have {num_images} pictures; at most {self._limits.max_images} are "
                "accepted: take others out with `session.update` and `pinned_ids`.",
                code="too_many_images",
                param="id",
            )
        self._next_id = max(self._next_id, _after(frame.id))
        self.gallery.pinned[frame.id] = frame
        return list(self.gallery.pinned)

    def forget_parts(self) -> None:
        """The rest of a clip will not come."""
        self._clip.clear()

    def _frame(self, media: Media, now_s: float) -> Frame:
        frame_id = self._next_id if media.id is None else media.id
        self._next_id = _after(frame_id)
        return Frame(frame_id, media.payload, now_s, self._clock.captured_s(media.ts, now_s))

    def _line_up(self, frame: Frame) -> None:
        self.gallery.latest = frame
        self._mailbox.put(frame)

    def _is_too_large(self, frame: Frame) -> bool:
        num_bytes = len(frame.data)
        return num_bytes > self._limits.max_frame_bytes or self.held_bytes + num_bytes > self._limits.max_held_bytes

    def _too_large(self, frame: Frame) -> ClientError:
        return ClientError(
            f"Frame {frame.id} has {len(frame.data):,} bytes; at most {self._limits.max_frame_bytes:,} are accepted in "
            f"one picture, and {self._limits.max_held_bytes:,} in all that a session keeps.",
            status=413,
            code="image_too_large",
            param="payload",
        )


def _after(frame_id: int) -> int:
    return frame_id + 1 if frame_id < MAX_ID else 0
