"""A live camera as tests use it: sends frames, keeps every event, and checks each against the published schema."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import random
import struct
import time
from pathlib import Path
from typing import Any, Final

import jsonschema
from PIL import Image, ImageDraw
from serving import PATIENCE_S
from websockets.asyncio.client import ClientConnection, connect

SCHEMA: Final = json.loads((Path(__file__).parents[1] / "docs" / "protocol.schema.json").read_text())


@functools.cache
def _validator(side: str, kind: str) -> Any:
    """For one type of event, so that a failure names the field and not every other event."""
    for reference in SCHEMA["$defs"][side]["oneOf"]:
        part = SCHEMA["$defs"][reference["$ref"].rpartition("/")[2]]
        rule = part["properties"]["type"]
        if kind in (rule.get("const"), *rule.get("enum", ())):
            return jsonschema.Draft202012Validator({"$ref": reference["$ref"], "$defs": SCHEMA["$defs"]})
    raise AssertionError(f"{kind} is no {side} of the schema")


def check_event(event: dict[str, Any], side: str = "ServerEvent") -> None:
    """Raises when an event is not as the schema says."""
    _validator(side, event["type"]).validate(event)


def picture(seed: int, box: int = 0, size: tuple[int, int] = (160, 120)) -> bytes:
    """A JPEG: a plain colour with a red square somewhere."""
    colours = random.Random(seed)
    image = Image.new("RGB", size, tuple(colours.randrange(60, 200) for _ in range(3)))
    ImageDraw.Draw(image).rectangle((box, 40, box + 30, 70), fill=(250, 10, 10))
    out = io.BytesIO()
    image.save(out, "JPEG")
    return out.getvalue()


def framed(frame_id: int, data: bytes) -> bytes:
    """A binary message with a header."""
    header = json.dumps({"k": "frame", "id": frame_id, "ts": time.monotonic() * 1e3}).encode()
    return struct.pack(">H", len(header)) + header + data


class Camera:
    """A session with its socket."""

    def __init__(self, url: str) -> None:
        self.url = url.replace("http://", "ws://") + "/v1/stream"
        self.events: list[dict[str, Any]] = []
        self.socket: ClientConnection | None = None

    async def open(self, **session: Any) -> Camera:
        """Connect and configure."""
        self.socket = await self._connect()
        await self.until("session.created")
        await self.say("session.update", session={"max_tokens": 8, "ignore_eos": True, "temperature": 0, **session})
        await self.until("session.updated")
        return self

    async def _connect(self) -> ClientConnection:
        """Without a bound on what is unread: a full queue would hold up the closing handshake."""
        return await connect(
            self.url,
            subprotocols=["vlm.stream.v1"],  # type: ignore[list-item]
            max_size=None,
            max_queue=None,
            close_timeout=2,
        )

    async def resume(self) -> None:
        """Come back after `cut`; `next` then sees that nothing was lost or repeated."""
        created = self.events[0]
        self.socket = await self._connect()
        await self.say(
            "session.resume",
            session_id=created["session_id"],
            resume_token=created["resume_token"],
            last_seq=self.events[-1]["seq"],
        )
        while (event := json.loads(await asyncio.wait_for(self.socket.recv(), PATIENCE_S)))[
            "type"
        ] != "session.resumed":
            assert event["type"] == "session.created", event
        check_event(event)

    async def say(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        event = {"type": kind, **fields}
        check_event(event, "ClientEvent")
        assert self.socket is not None
        await self.socket.send(json.dumps(event))

    async def send(self, data: bytes) -> None:
        """Send a binary message."""
        assert self.socket is not None
        await self.socket.send(data)

    async def next(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next event."""
        assert self.socket is not None
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), timeout_s))
        check_event(event)
        assert event["seq"] == (self.events[-1]["seq"] if self.events else 0) + 1
        self.events.append(event)
        return event

    async def until(self, kind: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next event of a type."""
        while (event := await self.next(timeout_s))["type"] != kind:
            pass
        return event

    async def ask(self, data: bytes | None = None, **response: Any) -> dict[str, Any]:
        """One response."""
        if data is not None:
            await self.send(data)
        await self.say("response.create", response=response)
        return await self.until("response.done")

    def cut(self) -> None:
        """As when a cable is pulled out."""
        assert self.socket is not None
        self.socket.transport.abort()

    async def close(self) -> None:
        """Leave."""
        assert self.socket is not None
        await self.socket.close()

    def check(self) -> None:
        """Every response that was created is done exactly once, and its text is what was said of it."""
        created = [e["response_id"] for e in self.events if e["type"] == "response.created"]
        done = [e for e in self.events if e["type"] == "response.done"]
        assert [e["response_id"] for e in done] == created[: len(done)]
        assert len(created) - len(done) <= 1  # the last one may still run
        said: dict[str, str] = {}
        for event in self.events:
            if event["type"] == "response.output_text.delta":
                said[event["response_id"]] = said.get(event["response_id"], "") + event["delta"]
        for event in done:
            assert said.get(event["response_id"], "") == event["text"]
