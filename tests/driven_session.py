"""A session with the driver and the reader that tests are: no sockets, the clock is the test's."""

from __future__ import annotations

import json
import struct
from typing import Any

from streaming import check_event

from preprocess.wire import Delta, ImagePart, Looked, Usage
from server.settings import Settings
from server.stream.session import Session
from server.stream.terms import terms_of
from server.stream.work import LookAt, Start

JPEG = b"\xff\xd8 a picture"


class Driven:
    """A session, its driver and its reader."""

    def __init__(self, **options: object) -> None:
        settings = Settings.load({"max_images": 8, "served_model_name": "tiny,alias", **options})
        self.now = 100.0
        self.session = Session("s", "secret", terms_of(settings), self.now)
        self.events: list[dict[str, Any]] = []
        self.actions: list[Any] = []
        self.take()

    def take(self) -> None:
        self.actions += self.session.take_actions()
        while (data := self.session.outbox.take()) is not None:
            self.events.append(json.loads(data))
            check_event(self.events[-1])

    def say(self, kind: str, **fields: Any) -> None:
        self.session.receive_text(json.dumps({"type": kind, **fields}), self.now)
        self.take()

    def update(self, **fields: Any) -> None:
        self.say("session.update", session=fields)

    def frame(self, data: bytes = JPEG, k: str = "frame", **header: Any) -> None:
        if header or k != "frame":
            encoded = json.dumps({"k": k, **header}).encode()
            data = struct.pack(">H", len(encoded)) + encoded + data
        self.session.receive_binary(data, self.now)
        self.take()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)
        self.take()

    def deltas(self, *texts: str, end: Any = "stop", cached: int = 4) -> None:
        name = self.starts[-1].response_id
        self.session.on_started(name, 20, 1.5, 2.5, self.now)
        for i, text in enumerate(texts):
            last = end is not None and i == len(texts) - 1
            usage = Usage(20, len(texts), cached, 16, 1, 2, 3, 4, 1, 5) if last else None
            delta = Delta(name, text, [i], finish_reason=end if last else None, usage=usage)
            self.session.on_delta(name, delta, self.now)
        self.take()

    def fail(self, error: Any) -> None:
        self.session.on_failed(self.starts[-1].response_id, error, self.now)
        self.take()

    def looked(self, change: float | None, seen: bytes = b"seen") -> None:
        self.session.on_looked(self.looks[-1].look_id, Looked("x", seen, change), self.now)
        self.take()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def starts(self) -> list[Start]:
        return [action for action in self.actions if isinstance(action, Start)]

    @property
    def looks(self) -> list[LookAt]:
        return [action for action in self.actions if isinstance(action, LookAt)]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.of("error")[-1]["error"]
        return error

    def shown(self, start: int = -1) -> list[bytes]:
        return [part.data for part in self.starts[start].messages[-1].content if isinstance(part, ImagePart)]

    @property
    def dropped(self) -> dict[str, int]:
        return {reason: count for reason, count in self.session.mailbox.dropped.items() if count}
