"""How fast a session may send: its messages, bytes and frames a second, and how clients are told what is left."""

from __future__ import annotations

from typing import Final

from server.stream.pace import Bucket
from server.stream.server_events import RateLimit, SessionLimits

TELL_EVERY_S: Final = 1.0


class Rates:
    """One per session. `due_s`: when its client is to be told next, None when there is nothing to tell."""

    def __init__(self, limits: SessionLimits, now_s: float) -> None:
        self.messages = Bucket(limits.max_messages_per_s, 2 * limits.max_messages_per_s, now_s)
        self.bytes = Bucket(
            limits.max_bytes_per_s, max(2 * limits.max_bytes_per_s, float(limits.max_message_bytes)), now_s
        )
        self.frames = Bucket(limits.max_fps, max(1.0, limits.max_fps / 4), now_s)
        self.due_s: float | None = None
        self._told_s = now_s - TELL_EVERY_S

    def note(self, now_s: float) -> None:
        """Something came: when too little is left of a limit, the client is to be told."""
        if self.due_s is None and self._is_low(now_s):
            self.due_s = max(now_s, self._told_s + TELL_EVERY_S)

    def told(self, now_s: float) -> None:
        """The client was told; again in a while, until all limits are far again."""
        self._told_s = now_s
        self.due_s = now_s + TELL_EVERY_S if self._is_low(now_s) else None

    def shown(self, now_s: float) -> list[RateLimit]:
        """What is left of every limit."""
        return [_shown(name, bucket, now_s) for name, bucket in self._buckets.items()]

    def shown_to_openai(self, now_s: float) -> list[RateLimit]:
        """The one of OpenAI's limits that there is here: on messages, which it calls requests."""
        return [_shown("requests", self.messages, now_s)]

    @property
    def _buckets(self) -> dict[str, Bucket]:
        return {"messages": self.messages, "bytes": self.bytes, "frames": self.frames}

    def _is_low(self, now_s: float) -> bool:
        return any(bucket.level(now_s) < bucket.burst / 2 for bucket in self._buckets.values())


def _shown(name: str, bucket: Bucket, now_s: float) -> RateLimit:
    level = bucket.level(now_s)
    return RateLimit(name, round(bucket.burst, 3), round(level, 3), round((bucket.burst - level) / bucket.per_s, 3))
