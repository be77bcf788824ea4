"""Where frames wait for their response, and the account of what became of every one.

    received = captioned + dropped + pending          after every call

`overflow` latest: at most one waits, and a newer one replaces it. `overflow` queue: all wait in order, up to a limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

DropReason = Literal[
    "replaced", "rate", "unchanged", "decode_error", "queue_full", "too_large", "failed", "cancelled", "disconnected"
]
DROP_REASONS: tuple[DropReason, ...] = (
    "replaced",
    "rate",
    "unchanged",
    "decode_error",
    "queue_full",
    "too_large",
    "failed",
    "cancelled",
    "disconnected",
)


@dataclass(eq=False, slots=True)
class Frame:
    """An encoded picture, or a clip, as it came. `captured_s` is the camera's moment on our clock."""

    id: int
    data: bytes
    received_s: float
    captured_s: float
    is_clip: bool = False
    order: int = 0
    """Given by the mailbox that accepted it: a later frame has a larger one."""


@dataclass
class Mailbox:
    """Frames on their way to a response.

    A frame is pending while it waits here, is being looked at, or is being prepared for its response; `out` are those
    that have left the line and are not settled yet.
    """

    max_queue: int
    latest_only: bool = True
    received: int = 0
    newest: int = 0
    """`order` of the newest frame accepted. With `latest_only` no other may wait, not even when that one is gone."""
    captioned: int = 0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    waiting: deque[Frame] = field(default_factory=deque)
    out: set[Frame] = field(default_factory=set)

    def refuse(self, reason: DropReason) -> None:
        """A frame came and goes no further."""
        self.received += 1
        self.dropped[reason] += 1

    def put(self, frame: Frame) -> bool:
        """A frame came; False when a full queue refused it."""
        self.received += 1
        if self.latest_only:
            self.clear("replaced")
        elif len(self.waiting) >= self.max_queue:
            self.dropped["queue_full"] += 1
            return False
        frame.order = self.newest = self.received
        self.waiting.append(frame)
        return True

    def take(self) -> Frame | None:
        """The frame whose turn it is; it stays pending until `caption` or `drop`."""
        if not self.waiting:
            return None
        frame = self.waiting.popleft()
        self.out.add(frame)
        return frame

    def take_this(self, frame: Frame) -> None:
        """Take a frame out of its turn; nothing when it does not wait."""
        if frame in self.waiting:
            self.waiting.remove(frame)
            self.out.add(frame)

    def put_back(self, frame: Frame) -> None:
        """Its turn has to come again, unless a newer one has come. Nothing when it is settled."""
        if frame in self.out:
            self.out.remove(frame)
            if self.latest_only and frame.order != self.newest:
                self.dropped["replaced"] += 1
            else:
                self.waiting.appendleft(frame)

    def keep_latest_only(self, latest_only: bool) -> None:
        """Change the rule for those that wait."""
        self.latest_only = latest_only
        while latest_only and self.waiting and self.waiting[0].order != self.newest:
            self.waiting.popleft()
            self.dropped["replaced"] += 1

    def caption(self, frame: Frame) -> None:
        """Its response has begun. A frame that was settled before is not counted twice."""
        if frame in self.out:
            self.out.remove(frame)
            self.captioned += 1

    def drop(self, frame: Frame, reason: DropReason) -> None:
        """It gets no response."""
        if frame in self.out:
            self.out.remove(frame)
            self.dropped[reason] += 1

    def clear(self, reason: DropReason) -> None:
        """Drop all that wait."""
        self.dropped[reason] += len(self.waiting)
        self.waiting.clear()

    @property
    def pending(self) -> int:
        """Frames that are neither captioned nor dropped."""
        return len(self.waiting) + len(self.out)

    def check(self) -> None:
        """Raises AssertionError when a frame was lost or counted twice."""
        assert self.received == self.captioned + sum(self.dropped.values()) + self.pending
        assert not self.out & set(self.waiting)
        assert len(self.waiting) <= (1 if self.latest_only else self.max_queue + 1)  # one may have been put back
