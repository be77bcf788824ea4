"""Any order of events, frames, answers and time: what a session promises holds after every step."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Delta, Looked, Usage
from server.settings import Settings
from server.stream.session import Session
from server.stream.terms import terms_of
from server.stream.work import Cancel, Close, LookAt, Start, State

TERMS = terms_of(
    Settings.load(
        {
            "stream_max_fps": 20,
            "stream_max_queue": 3,
            "stream_send_queue_kb": 16,
            "stream_idle_timeout_s": 20,
            "stream_max_session_s": 300,
            "stream_resume_s": 5,
            "max_images": 6,
            "served_model_name": "tiny",
        }
    )
)
TRIGGERS = ["manual", "continuous", "interval", "on_change"]
ENDS = [None, None, "stop", "length", "abort"]
ODD_BINARY = [b"", b"x", b"\x00\x02{}", b"\x00\x02{]abc", b"\xff\xd8bare", b"\x10\x01" + b"x" * 9000]
ODD_TEXT = ["{", "[]", '{"type": "session.updat"}', '{"type": "ping", "x": 1}', '{"type": 3}', "\ud800"]


def binary(frame_id: int, data: bytes, kind: str = "frame") -> bytes:
    header = json.dumps({"k": kind, "id": frame_id, "mime": "image/jpeg"}).encode()
    return struct.pack(">H", len(header)) + header + data


class Reader:
    """A client that keeps what it read."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def read(self, session: Session) -> None:
        while (data := session.outbox.take()) is not None:
            event = json.loads(data)
            assert event["seq"] == (self.events[-1]["seq"] if self.events else 0) + 1  # nothing lost, nothing twice
            self.events.append(event)


class Machine(RuleBasedStateMachine):
    """`newest` is the id of the newest accepted frame; `running` the work that the driver was told to do."""

    @initialize(mode=st.sampled_from(TRIGGERS), n=st.sampled_from([0, 1, 2]))
    def begin(self, mode: str, n: int) -> None:
        self.now = 1000.0
        self.session = Session("s", "token", TERMS, self.now)
        self.reader = Reader()
        self.running: dict[str, Start] = {}
        self.looks: dict[str, LookAt] = {}
        self.next_id = 1
        self.newest = b""
        self.said: dict[str, str] = {}
        self.closed: Close | None = None
        self.update(mode, "latest", n)

    def obey(self) -> None:
        """Do as a driver does with the actions."""
        for action in self.session.take_actions():
            assert self.closed is None, "work after the end"
            if isinstance(action, Start):
                assert not self.running, "two responses at once"
                self.running[action.response_id] = action
                self.said[action.response_id] = ""
                newest = action.messages[-1].content[-1]
                data = getattr(newest, "data", b"")
                if self.latest_only and data.startswith((b"frame", b"\xff")):
                    assert data == self.newest, "an older frame than the newest accepted"
            elif isinstance(action, LookAt):
                assert not self.looks, "two looks at once"
                self.looks[action.look_id] = action
            elif isinstance(action, Cancel):
                self.running.pop(action.work_id, None)
                self.looks.pop(action.work_id, None)
            else:
                self.closed = action

    @property
    def latest_only(self) -> bool:
        return self.session.settings.overflow == "latest"

    # ---- the client ------------------------------------------------------------------------------------------------

    @rule(mode=st.sampled_from(TRIGGERS), overflow=st.sampled_from(["latest", "queue"]), n=st.integers(0, 3))
    def update(self, mode: str, overflow: str, n: int) -> None:
        session = {"trigger": {"mode": mode}, "overflow": overflow, "context_frames": n, "preempt": mode == "interval"}
        self.text({"type": "session.update", "session": session})

    @rule(
        question=st.sampled_from(
            [
                {"preset": "list_objects"},
                {"preset": "yes_no"},
                {"preset": "yes_no", "prompt": "open?"},
                {"prompt": "why?"},
                {"preset": None},
            ]
        ),
        shape=st.sampled_from(
            [
                {},
                {"response_format": None},
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"choice": ["a", "b"]}},
                {"structured_outputs": {}},
            ]
        ),
        max_pixels=st.sampled_from([None, 0, 1, 5000]),
    )
    def question(self, question: dict[str, Any], shape: dict[str, Any], max_pixels: int | None) -> None:
        self.read()
        before = self.session.settings
        self.text({"type": "session.update", "session": {**question, **shape, "max_pixels": max_pixels}})
        after = self.session.settings
        if after is not before:  # what is shown may be sent back, and changes nothing
            shown = json.loads(msgspec.json.encode(after))
            self.text({"type": "session.update", "session": shown})
            assert json.loads(msgspec.json.encode(self.session.settings)) == shown

    @rule()
    def frame(self) -> None:
        self.next_id += 1
        self.media(binary(self.next_id, b"frame %d" % self.next_id), b"frame %d" % self.next_id)

    @rule(data=st.sampled_from(ODD_BINARY))
    def odd_binary(self, data: bytes) -> None:
        self.media(data, data)

    @rule(last=st.booleans())
    def chunk(self, last: bool) -> None:
        header = b'{"k": "video", "last": true}' if last else b'{"k": "video"}'
        before = self.session._reception._clip
        whole = bytes(before) + b"frames" if last else self.newest
        self.media(struct.pack(">H", len(header)) + header + b"frames", whole)

    def media(self, message: bytes, data: bytes) -> None:
        before, was = self.session.mailbox.newest, self.newest
        self.newest = data
        self.session.receive_binary(message, self.now)
        if self.session.mailbox.newest == before:  # it was refused
            self.newest = was
        self.obey()

    @rule(text=st.sampled_from(ODD_TEXT))
    def odd_text(self, text: str) -> None:
        self.read()  # who does not read is sent away sooner or later
        state = self.session.state
        self.session.receive_text(text, self.now)
        assert self.session.state is state
        self.obey()

    @rule(pinned=st.integers(1, 4))
    def pin(self, pinned: int) -> None:
        self.session.receive_binary(binary(9000 + pinned, b"pinned", "image"), self.now)
        self.obey()

    @rule(
        own=st.sampled_from(
            [
                {},
                {"prompt": "what?"},
                {"preset": "one_line"},
                {"preset": "yes_no"},
                {"structured_outputs": {"regex": "a+"}},
                {"frame_ids": []},
            ]
        )
    )
    def ask(self, own: dict[str, Any]) -> None:
        response: dict[str, Any] = {"metadata": {"a": "b"}, **own}
        self.text({"type": "response.create", "event_id": "mine", "response": response})

    @rule()
    def cancel(self) -> None:
        self.text({"type": "response.cancel"})
        assert not self.running or self.session.is_running

    @rule()
    def close(self) -> None:
        self.text({"type": "session.close"})

    @rule()
    def cut(self) -> None:
        self.session.detach(self.now)
        self.obey()
        assert not self.running, "a cut connection left work behind"
        assert not self.looks
        assert self.session.mailbox.pending == 0

    @precondition(lambda self: self.session.state is State.DETACHED)
    @rule(lost=st.integers(0, 5))
    def resume(self, lost: int) -> None:
        """The client lost its last few events with the connection."""
        del self.reader.events[max(1, len(self.reader.events) - lost) :]
        assert self.session.outbox.rewind(self.reader.events[-1]["seq"] if self.reader.events else 0) is None
        self.session.attach(self.now)
        self.obey()
        self.reader.read(self.session)

    # ---- the engine and the workers --------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule()
    def started(self) -> None:
        self.session.on_started(next(iter(self.running)), 20, 1.0, 2.0, self.now)
        self.obey()

    @precondition(lambda self: self.running)
    @rule(text=st.sampled_from(["a", "word ", "", "é" * 50]), end=st.sampled_from(ENDS))
    def delta(self, text: str, end: Any) -> None:
        name = next(iter(self.running))
        if end != "abort":
            self.said[name] += text
        if end is not None:
            del self.running[name]
        usage = Usage(20, 3, 10, 4, 1, 2, 3, 4) if end else None
        self.session.on_started(name, 20, 1.0, 2.0, self.now)
        self.session.on_delta(name, Delta(name, text, [1], finish_reason=end, usage=usage), self.now)
        self.obey()

    @precondition(lambda self: self.running)
    @rule(media=st.booleans())
    def fail(self, media: bool) -> None:
        error: BeholderError = ServiceError("the engine stopped", code="engine_restarting", retry_after_s=1.0)
        if media:
            error = ClientError("The picture is damaged", code="image_undecodable")
        name = next(iter(self.running))
        del self.running[name]
        self.session.on_failed(name, error, self.now)
        self.obey()

    @precondition(lambda self: self.looks)
    @rule(change=st.sampled_from([None, 0.0, 1.0, 50.0]), fails=st.booleans())
    def looked(self, change: float | None, fails: bool) -> None:
        name, look = self.looks.popitem()
        if fails:
            self.session.on_look_failed(name, ClientError("damaged", code="image_undecodable"), self.now)
        else:
            self.session.on_looked(name, Looked("x", b"seen", change if look.reference else None), self.now)
        self.obey()

    @rule(name=st.sampled_from(["resp-s-1", "resp-s-2", "look-s-1"]))
    def late(self, name: str) -> None:
        """Words for what is over change nothing."""
        if name not in self.running and name not in self.looks:
            before = len(self.session.outbox), self.session.mailbox.captioned
            self.session.on_started(name, 1, 1.0, 1.0, self.now)
            self.session.on_delta(name, Delta(name, "late", [1], finish_reason="stop"), self.now)
            self.session.on_failed(name, ServiceError("late", code="late"), self.now)
            self.session.on_looked(name, Looked("x", b"", None), self.now)
            assert (len(self.session.outbox), self.session.mailbox.captioned) == before
            assert not self.session.take_actions()

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)
        self.obey()

    @rule()
    def drain(self) -> None:
        self.session.drain(5.0, self.now)
        self.obey()

    @rule()
    def read(self) -> None:
        if self.session.state is State.CONNECTED:
            self.reader.read(self.session)

    def text(self, event: dict[str, Any]) -> None:
        self.session.receive_text(json.dumps(event), self.now)
        self.obey()

    # ---- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def every_frame_is_accounted_for(self) -> None:
        self.session.mailbox.check()
        assert self.session.held_bytes <= TERMS.limits.max_held_bytes

    @invariant()
    def what_is_being_answered_or_looked_at_is_pending_or_captioned(self) -> None:
        look = self.session._look
        if look is not None and not look.for_reference:
            assert look.frame in self.session.mailbox.out
        active = self.session._active
        if active is not None and active.trigger != "manual" and active.num_prompt_tokens == 0:
            assert active.newest in self.session.mailbox.out

    @invariant()
    def the_driver_and_the_session_agree(self) -> None:
        assert self.session.is_running == bool(self.running)
        if self.closed is not None:
            assert not self.running
            assert not self.looks

    @invariant()
    def waiting_work_will_be_woken_for(self) -> None:
        if self.session.state is not State.CLOSED:
            assert self.session.wake_at_s() < float("inf")

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        self.session.end(1011, "test", self.now)  # type: ignore[arg-type]
        self.obey()
        self.reader.read(self.session)
        created = [event["response_id"] for event in self.reader.events if event["type"] == "response.created"]
        done = {event["response_id"]: event for event in self.reader.events if event["type"] == "response.done"}
        assert created == [name for name in done if name in created]
        assert len(created) == len(set(created)) == sum(e["type"] == "response.done" for e in self.reader.events)
        for name, event in done.items():
            deltas = [
                e["delta"]
                for e in self.reader.events
                if e["type"] == "response.output_text.delta" and e["response_id"] == name
            ]
            assert "".join(deltas) == event["text"] == self.said[name]
        mailbox = self.session.mailbox
        assert mailbox.received == mailbox.captioned + sum(mailbox.dropped.values())


Machine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSession = Machine.TestCase
