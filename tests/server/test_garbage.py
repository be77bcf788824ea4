"""The server looks for garbage after a step's events, and Python by itself only where no step comes for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import msgspec
import pytest

from preprocess.wire import Deltas
from server.dispatcher import Dispatcher
from server.garbage import MOST_OBJECTS, OLDER_EVERY, YOUNG_OBJECTS, Garbage


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generation of every collection of this process from now on."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    gc.unfreeze()


class Itself:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


def rubbish(count: int) -> None:
    """Lists that hold themselves."""
    for _ in range(count):
        itself: list[object] = []
        itself.append(itself)


def test_garbage_is_looked_for_after_a_step_and_not_amid_other_work(looks: list[int]) -> None:
    dispatcher = Dispatcher(
        lambda name, *frames: None,
        num_workers=1,
        arena_size=1024,
        pixel_bytes_per_image=1,
        max_waiting=1,
        max_waiting_bytes=1,
    )
    dispatcher.on_step = Garbage().look
    looks.clear()
    rubbish(2 * YOUNG_OBJECTS)
    assert looks == []
    dispatcher.receive(msgspec.msgpack.encode(Deltas([])))
    assert looks == [0]
    dispatcher.receive(msgspec.msgpack.encode(Deltas([])))
    assert looks == [0]


def test_what_has_survived_some_looks_is_looked_through_now_and_then(looks: list[int]) -> None:
    garbage = Garbage()
    looks.clear()
    for _ in range(2 * OLDER_EVERY):
        rubbish(2 * YOUNG_OBJECTS)
        garbage.look()
    assert looks == [*[0] * (OLDER_EVERY - 1), 1] * 2


def test_what_lived_long_is_found_however_busy_the_server_is(looks: list[int]) -> None:
    garbage = Garbage()
    old = Itself()
    gc.collect()  # it is as old as Python counts
    left = weakref.ref(old)
    del old
    looks.clear()
    while left() is not None and len(looks) <= OLDER_EVERY**2:
        rubbish(2 * YOUNG_OBJECTS)
        garbage.look()
    assert looks == [*[*[0] * (OLDER_EVERY - 1), 1] * (OLDER_EVERY - 1), *[0] * (OLDER_EVERY - 1), 2]
    assert left() is None


def test_python_looks_where_no_step_comes(looks: list[int]) -> None:
    Garbage()
    looks.clear()
    rubbish(2 * MOST_OBJECTS)
    assert len(looks) in (1, 2)
