"""The Python API from several threads, and its end: everybody gets an answer or hears that it was closed.

Steps of the engine wait for this file's word, so nothing here depends on how long anything takes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from clips import clip
from PIL import Image

import beholder as api
from beholder import Beholder, Caption, ServiceError

PATIENCE_S = 60
ENDLESS = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
"""Longer than any of these tests lets the engine go on."""


def picture(seed: int) -> Image.Image:
    return Image.new("RGB", (48, 32), (seed * 40 % 256, 90, 160))


class Held:
    """A model whose engine makes a step only when told to."""

    def __init__(self, model: Path) -> None:
        self.beholder = Beholder(model, dtype="float32", threads=1, kv_tokens=4000)
        self._step, self.beholder._engine.step = self.beholder._engine.step, self._wait  # type: ignore[method-assign]
        self._inside = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self.in_step: Callable[[], object] = lambda: None
        self.num_steps = 0

    def _wait(self) -> list[object]:
        self._inside.release()
        assert self._permits.acquire(timeout=PATIENCE_S)
        self.in_step()
        self.num_steps += 1
        return self._step()  # type: ignore[return-value]

    def wait_until_inside(self) -> None:
        """A thread has begun a step."""
        assert self._inside.acquire(timeout=PATIENCE_S)

    def wait_for_queue(self, length: int) -> None:
        """So many threads want to come next."""
        deadline = time.monotonic() + PATIENCE_S
        while self.beholder._turns.num_waiting != length:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def let(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.release()

    def let_all(self) -> None:
        self.let(10_000)


@pytest.fixture
def held(tiny_model: Path) -> Iterator[Held]:
    held = Held(tiny_model)
    yield held
    held.let_all()
    held.beholder.close()
    assert not held.beholder._running
    held.beholder._engine.check()


class Asker(threading.Thread):
    """Asks in a thread; `result` is what came back, or the error."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._result: object = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._ask()
        except Exception as error:
            self._result = error

    def result(self) -> object:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        return self._result


def is_closed(outcome: object) -> bool:
    return isinstance(outcome, ServiceError) and outcome.code == "closed"


ASKS: dict[str, Callable[[Beholder], object]] = {
    "caption": lambda b: b.caption(picture(1), **ENDLESS),
    "chat": lambda b: b.chat([{"role": "user", "content": "tell me"}], **ENDLESS),
    "stream": lambda b: list(b.stream(picture(1), **ENDLESS)),
    "clip": lambda b: b.caption(clip(), **ENDLESS),
    "timed captions": lambda b: b.timed_captions(clip(), segment_s=1, **ENDLESS),
    "decisions": lambda b: b.decide(picture(1), ["Is it red?", "Is it blue?"]),
    "many": lambda b: list(b.caption_all([picture(1), picture(2)], **ENDLESS))[-1],
}


@pytest.mark.parametrize("name", [name for name in ASKS if name != "decisions"])  # those take a single step
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closing_ends_what_another_thread_waits_for(held: Held, name: str, steps: int) -> None:
    asker = Asker(lambda: ASKS[name](held.beholder))
    for _ in range(steps):
        held.wait_until_inside()
        held.let()
    held.wait_until_inside()
    closer = Asker(held.beholder.close)
    held.wait_for_queue(1)
    held.let()  # the step under way ends, and no other begins
    assert is_closed(asker.result())
    assert closer.result() is None
    assert held.num_steps == steps + 1
    assert is_closed(Asker(lambda: ASKS[name](held.beholder)).result())


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_closing_refuses_what_is_prepared_meanwhile(held: Held, ask: Callable[[Beholder], object]) -> None:
    held.let_all()
    begun, go_on = threading.Event(), threading.Event()
    prepare = held.beholder._preparer.prepare

    def slowly(job):
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return prepare(job)

    held.beholder._preparer.prepare = slowly  # type: ignore[method-assign]
    asker = Asker(lambda: ask(held.beholder))
    assert begun.wait(PATIENCE_S)
    held.beholder.close()
    go_on.set()
    assert is_closed(asker.result())


def test_closing_ends_those_that_wait_for_their_turn_too(held: Held) -> None:
    """One runs, others want to begin; some of their requests begin before `close`, some after."""
    runs = Asker(lambda: ASKS["caption"](held.beholder))
    held.wait_until_inside()
    early = [Asker(lambda: ASKS["caption"](held.beholder)), Asker(lambda: ASKS["decisions"](held.beholder))]
    held.wait_for_queue(2)
    closers = [Asker(held.beholder.close)]
    held.wait_for_queue(3)
    closers.append(Asker(held.beholder.close))
    late = Asker(lambda: ASKS["timed captions"](held.beholder))
    held.let()
    assert all(is_closed(asker.result()) for asker in (runs, *early, late))
    assert [closer.result() for closer in closers] == [None, None]
    assert held.num_steps == 1


def test_an_answer_that_is_whole_stays_so(held: Held) -> None:
    held.let_all()
    asker = Asker(lambda: held.beholder.caption(picture(1), max_tokens=3, ignore_eos=True))
    answer = asker.result()
    held.beholder.close()
    held.beholder.close()
    assert isinstance(answer, Caption)
    assert answer.usage.completion_tokens == 3


def test_a_stream_gives_what_came_before_it_was_closed_and_then_the_error(held: Held) -> None:
    held.let_all()
    stream, unread = (held.beholder.stream(picture(seed), **ENDLESS) for seed in (1, 2))
    assert next(stream)
    held.beholder.close()
    for left in (stream, unread):
        with pytest.raises(ServiceError, match="closed"):
            list(left)


def test_a_signal_handler_may_close_what_it_interrupts(held: Held) -> None:
    """As one for SIGTERM does, in the thread that computes."""
    held.in_step = held.beholder.close
    held.let_all()
    assert is_closed(Asker(lambda: ASKS["caption"](held.beholder)).result())
    assert held.num_steps == 1


def test_a_stream_that_the_collector_ends_in_the_middle_of_a_step_is_stopped_by_the_next(held: Held) -> None:
    held.let_all()
    dropped = [held.beholder.stream(picture(1), **ENDLESS)]
    next(dropped[0])
    held.in_step = dropped.clear
    answer = Asker(lambda: held.beholder.caption(picture(2), max_tokens=3, ignore_eos=True)).result()
    assert isinstance(answer, Caption)
    assert not held.beholder._running
    assert not held.beholder._engine.has_work


def test_a_new_request_waits_for_one_step_and_not_for_other_answers(held: Held) -> None:
    first = Asker(lambda: ASKS["caption"](held.beholder))
    held.wait_until_inside()
    second = Asker(lambda: held.beholder.caption(picture(2), max_tokens=1))
    held.wait_for_queue(1)
    for _ in range(5):  # of the 60 that the other one takes
        held.let()
    assert isinstance(second.result(), Caption)
    assert first.is_alive()


def test_whose_answer_came_with_another_threads_step_makes_none_itself(held: Held) -> None:
    askers = [Asker(lambda: held.beholder.caption(picture(1), max_tokens=1))]
    held.wait_until_inside()
    askers += [Asker(lambda: held.beholder.caption(picture(2), max_tokens=1)) for _ in range(3)]
    held.wait_for_queue(3)
    held.let()  # the first gets its answer, the others begin
    held.wait_until_inside()
    held.wait_for_queue(2)
    held.let_all()
    assert all(isinstance(asker.result(), Caption) for asker in askers)
    assert held.num_steps == 2


def test_a_program_ends_though_a_thread_has_the_turn_and_a_stream_was_left(tiny_model: Path) -> None:
    program = f"""
import threading, time, PIL.Image, beholder
model = beholder.Beholder({str(tiny_model)!r}, dtype="float32", threads=1)
picture = PIL.Image.new("RGB", (48, 32))
left = model.stream(picture, max_tokens=60)
next(left)
inside = threading.Event()
def step():
    inside.set()
    time.sleep(1000)
model._engine.step = step
threading.Thread(target=model.caption, args=(picture,), daemon=True).start()
inside.wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S * 2, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_closing_is_possible_from_any_thread_while_many_ask(tiny_model: Path) -> None:
    """Nothing is held here: whatever the order is, each ends one way or the other."""
    for _ in range(3):
        beholder = api.Beholder(tiny_model, dtype="float32", threads=1, kv_tokens=4000)
        askers = [Asker(partial(ask, beholder)) for ask in ASKS.values()]
        closers = [Asker(beholder.close) for _ in range(2)]
        assert [closer.result() for closer in closers] == [None, None]
        for asker in askers:
            outcome = asker.result()
            assert is_closed(outcome) or not isinstance(outcome, Exception), outcome
        assert not beholder._running
        beholder._engine.check()
