"""Whose turn it is with the engine, when several threads of a program use it: first come, first served.

`threading.Lock` goes to whoever is quick. A thread that steps the engine until its answer is whole gives the lock back
and takes it again at once, and keeps out all others until then: new requests, `close`, and threads whose answers came
with the steps of this one.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that threads get in the order in which they asked for it: ``with turns: …``. It cannot be taken twice."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False
        self._thread = threading.local()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has a turn, waits for one, or is just giving it back.

        Code that may run in the middle of that (a signal's handler, what the garbage collector ends) must not wait for
        another turn, which would never come.
        """
        return getattr(self._thread, "is_within", False)

    @property
    def num_waiting(self) -> int:
        """Threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        self._thread.is_within = True
        try:
            self._take()
        except BaseException:
            self._thread.is_within = False
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()
        self._thread.is_within = False

    def _take(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            called = threading.Lock()
            called.acquire()
            self._waiting.append(called)
        try:
            called.acquire()
        except BaseException:  # such as KeyboardInterrupt
            with self._guard:
                still_waits = called in self._waiting
                if still_waits:
                    self._waiting.remove(called)
            if not still_waits:  # its turn came at that very moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
