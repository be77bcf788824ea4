"""The engine's process: whom it listens to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from engine.process import EngineLoop
from preprocess.arena import Arena
from preprocess.wire import Abort, Admitted, EngineReply, EngineRequest, Reset, ResetDone, SamplingParams, TextOptions


class Sent:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, data: bytes) -> None:
        self.messages.append(msgspec.msgpack.decode(data, type=EngineReply))


class Inbox:
    """A socket with a script."""

    def __init__(self, *messages: msgspec.Struct) -> None:
        self._data = [msgspec.msgpack.encode(message) for message in messages]

    def poll(self, _: int) -> bool:
        return bool(self._data)

    def recv(self, _: int) -> bytes:
        if not self._data:
            raise zmq.Again
        return self._data.pop(0)


def test_a_fresh_engine_serves_nobody_before_its_own_reset() -> None:
    """What was meant for the process before it may arrive late: the pixels it names are somebody else's by then."""

    def request(name: str) -> EngineRequest:
        return EngineRequest(name, bytes(8), [], SamplingParams(1), TextOptions(), 0.0)

    taken: list[str] = []
    resets: list[int] = []

    class Engine:
        has_work = False
        max_context = 512

        def submit(self, request: EngineRequest, _: object) -> Admitted:
            taken.append(request.request_id)
            return Admitted(request.request_id)

        def reset(self) -> None:
            resets.append(len(taken))

        def step(self) -> list[object]:
            return []

        def idle(self) -> bool:
            return False

        def stats(self) -> None:
            return None

    sent = Sent()
    with Arena.create(64) as arena:
        boot = SimpleNamespace(arena_fd=arena.fd, arena_size=arena.size, generation=2)
        child: Any = SimpleNamespace(boot=boot, connect=lambda _: sent)
        inbox: Any = Inbox(
            request("stale"), Reset("a", 1), request("stale too"), Abort("x"), Reset("b", 2), request("ours")
        )
        engine: Any = Engine()
        loop = EngineLoop(engine, child, inbox)
        loop.turn()
        loop._arena.fd = -1  # the arena's owner closes it
    assert taken == ["ours"]
    assert resets == [0]
    assert [message for message in sent.messages if isinstance(message, ResetDone)] == [ResetDone("b", 512)] * 2


def test_a_turn_without_work_is_for_what_makes_later_ones_faster() -> None:
    """And no other: whatever came goes first, and a turn waits for messages only when nothing is left to prepare."""
    done: list[str] = []
    waits: list[int] = []

    class Engine:
        has_work = False
        max_context = 512
        steps_left = 0
        idle_left = 3

        def submit(self, request: EngineRequest, _: object) -> Admitted:
            self.has_work, self.steps_left = True, 2
            return Admitted(request.request_id)

        def reset(self) -> None:
            done.append("reset")

        def step(self) -> list[object]:
            if self.steps_left:
                done.append("step")
                self.steps_left -= 1
                self.has_work = self.steps_left > 0
            return []

        def idle(self) -> bool:
            assert not self.has_work
            done.append("idle")
            self.idle_left -= 1
            return self.idle_left > 0

        def check(self) -> None:
            done.append("check")

        def stats(self) -> None:
            return None

    class WatchedInbox(Inbox):
        def poll(self, wait_ms: int) -> bool:
            waits.append(wait_ms)
            return super().poll(wait_ms)

    with Arena.create(64) as arena:
        boot = SimpleNamespace(arena_fd=arena.fd, arena_size=arena.size, generation=1)
        child: Any = SimpleNamespace(boot=boot, connect=lambda _: Sent())
        request = EngineRequest("x", bytes(8), [], SamplingParams(1), TextOptions(), 0.0)
        inbox = WatchedInbox(Reset("a", 1))
        engine: Any = Engine()
        loop = EngineLoop(engine, child, inbox)  # type: ignore[arg-type]
        loop.turn()
        inbox._data.append(msgspec.msgpack.encode(request))
        for _ in range(6):
            loop.turn()
        loop._arena.fd = -1
    assert done == ["reset", "idle", "step", "step", "check", "idle", "idle", "idle", "idle"]
    assert [wait_ms > 0 for wait_ms in waits] == [True, False, False, True, False, True, True], "after work a pause"
