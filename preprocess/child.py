"""What every child process does at its birth and death: boot from a pipe, report to the launcher, end with it.

The launcher writes one `Boot` to the child's standard input and keeps that pipe open; end of file there means that the
launcher is gone, however it went, and the child ends at once. Sockets are ZeroMQ over files in a private folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import zmq

from preprocess.wire import ChildState, Role

PR_SET_PDEATHSIG = 1
BEAT_EVERY_S = 1.0
"""How often a child tells the launcher that it is alive."""
EXIT_BAD_START = 78
"""Exit code of a child that cannot start as configured (sysexits' EX_CONFIG): starting it again would not help."""

T = TypeVar("T")


class Boot(msgspec.Struct, frozen=True):
    """Everything a child is told at start. `config` is the JSON of the role's own configuration.

    File descriptors are inherited: `status_fd` takes JSON lines of `Status`; `arena_fd` is the pixel arena;
    `listen_fd` is the listening HTTP socket (server only).
    """

    role: Role
    index: int
    generation: int
    socket_folder: str
    status_fd: int
    arena_fd: int
    arena_size: int
    config: msgspec.Raw
    listen_fd: int = -1
    launcher_pid: int = 0


class Status(msgspec.Struct, frozen=True):
    """A child's word to the launcher: ``"ready"``, then ``"alive"`` again and again, or ``"failed"`` with a sentence
    for the person who started it. The server's besides: it ``"uses"`` another `child` from now on.
    """

    state: Literal["ready", "alive", "failed", "uses"]
    message: str = ""
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    child: ChildState | None = None


class Child:
    """This process as the launcher's child: its boot record, its status pipe, its sockets."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.context = zmq.Context()
        self._beat_at_s = 0.0
        self._unsaid: deque[Status] = deque()

    @classmethod
    def from_stdin(cls) -> Child:
        """Read `Boot` from standard input and tie this process's life to the launcher's."""
        line = sys.stdin.buffer.readline()
        boot = msgspec.json.decode(line, type=Boot)
        _die_with_parent(boot.launcher_pid)
        for number in (signal.SIGINT, signal.SIGQUIT):  # a terminal's keys reach all processes: the launcher answers
            signal.signal(number, signal.SIG_IGN)
        return cls(boot)

    def config(self, kind: type[T]) -> T:
        """The role's configuration."""
        return msgspec.json.decode(self.boot.config, type=kind)

    def bind(self, name: str) -> zmq.Socket[bytes]:
        """A socket that receives what others push to `name`."""
        socket = self.context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(endpoint(self.boot.socket_folder, name))
        return socket

    def connect(self, name: str) -> zmq.Socket[bytes]:
        """A socket that pushes to `name`, whether or not its owner is up yet."""
        return push_socket(self.context, self.boot.socket_folder, name)

    def ready(self, **facts: object) -> None:
        """Tell the launcher that this process takes work; `facts` go into its start-up table.

        What was loaded until now stays. The garbage collector, which takes 44 ms to go through that of the server, need
        not look at it again in the middle of somebody's answer.
        """
        gc.collect()
        gc.freeze()
        self._report(Status("ready", facts=dict(facts)))

    def uses(self, other: ChildState) -> None:
        """Tell the launcher that this process, the server, gives work to another one from now on."""
        self._report(Status("uses", child=other))

    def beat(self) -> None:
        """Tell the launcher that this process gets on with its work. Main loops call it at every turn."""
        now = time.monotonic()
        if now >= self._beat_at_s:
            self._beat_at_s = now + BEAT_EVERY_S
            if self._unsaid:
                self._say_unsaid()  # as good a sign of life
            else:
                self._report(Status("alive"))

    def receive(self, socket: zmq.Socket[bytes]) -> bytes:
        """The next message, however long it takes; meanwhile this process is known to be alive."""
        return self.receive_frames(socket)[0]

    def receive_frames(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        """The same, of messages that have several frames."""
        self.beat()
        while not socket.poll(round(BEAT_EVERY_S * 1e3)):
            self.beat()
        return socket.recv_multipart()

    def fail(self, message: str) -> NoReturn:
        """Tell the launcher that this process cannot start as configured, and end."""
        self._report(Status("failed", message))
        sys.stderr.flush()
        os._exit(EXIT_BAD_START)

    def fail_unforeseen(self, error: Exception) -> NoReturn:
        """Tell of an error that nobody foresaw at the very first start: trying again would not help. Later, when the
        same start has worked before, it may: then the error goes on, and the launcher tries again.
        """
        if self.boot.generation > 1:
            raise error
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.fail(
            f"the {self.boot.role} process cannot start with this model folder and these options: "
            f"{type(error).__name__} in {Path(where.filename).name}, line {where.lineno}"
        )

    def _report(self, status: Status) -> None:
        self._unsaid.append(status)
        self._say_unsaid()

    def _say_unsaid(self) -> None:
        """Write what fits into the pipe. The rest waits for the next beat: nobody waits for a launcher that is slow."""
        with contextlib.suppress(BlockingIOError):
            while self._unsaid:
                os.write(self.boot.status_fd, msgspec.json.encode(self._unsaid[0]) + b"\n")
                self._unsaid.popleft()


def push_socket(context: zmq.Context[Any], folder: str, name: str) -> zmq.Socket[bytes]:
    """A pushing socket that never blocks its owner and drops what is unsent when closed."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.linger = 0
    socket.connect(endpoint(folder, name))
    return socket


def endpoint(folder: str, name: str) -> str:
    """The address of the socket `name` in the private folder."""
    return f"ipc://{folder}/{name}"


def _die_with_parent(launcher_pid: int) -> None:
    """End this process when the launcher ends, even by kill -9: the kernel's way on Linux, the pipe's everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if launcher_pid and os.getppid() != launcher_pid:  # it died before the call above
            os._exit(1)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
