"""One place in the process tree and the process that fills it now: start it, hear it, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from preprocess.child import Boot, Status
from preprocess.wire import ChildState, Role

MODULES: Final[Mapping[Role, str]] = {
    "server": "server.process",
    "preprocess": "preprocess.worker",
    "detokenizer": "preprocess.detokenizer",
    "engine": "engine.process",
}


@dataclass(frozen=True)
class Surroundings:
    """What every child of one launcher shares."""

    socket_folder: str
    arena_fd: int
    arena_size: int


class ChildProcess:
    """A place such as ``preprocess 1``. `ready` and `failure` are what its present process has said of itself."""

    def __init__(self, role: Role, index: int, config: object, surroundings: Surroundings, listen_fd: int = -1) -> None:
        self.role = role
        self.index = index
        self.generation = 0
        self.ready = False
        self.used = False
        """Whether the server has said that it gives work to the present process."""
        self.announced = False
        """Whether people have been told that the present process is up."""
        self.failure = ""
        self.facts: dict[str, object] = {}
        self.failed_starts = 0
        """Deaths in a row before it was ready."""
        self.start_at_s: float | None = None
        """When the launcher means to start it again; None while it runs."""
        self.beat_s = 0.0
        """When it last said that it is alive."""
        self.hung = ""
        """Why the launcher ended it, when it did because nothing was heard any more."""
        self.status_fd = -1
        self._config = msgspec.Raw(msgspec.json.encode(config))
        self._surroundings = surroundings
        self._listen_fd = listen_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def name(self) -> str:
        """For people: ``engine``, ``preprocess 1``."""
        return f"{self.role} {self.index}" if self.role == "preprocess" else self.role

    @property
    def pid(self) -> int | None:
        """Process id, or None when nothing runs here."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start a fresh process. Its standard input stays open as long as the launcher lives."""
        self.generation += 1
        self.ready, self.failure, self.hung, self._unread, self.start_at_s = False, "", "", b"", None
        self.used = self.announced = False
        status_fd, write_fd = os.pipe()
        os.set_blocking(status_fd, False)
        os.set_blocking(write_fd, False)  # a child never waits for its launcher
        boot = Boot(
            role=self.role,
            index=self.index,
            generation=self.generation,
            socket_folder=self._surroundings.socket_folder,
            status_fd=write_fd,
            arena_fd=self._surroundings.arena_fd,
            arena_size=self._surroundings.arena_size,
            config=self._config,
            listen_fd=self._listen_fd,
            launcher_pid=os.getpid(),
        )
        inherited = [fd for fd in (write_fd, boot.arena_fd, boot.listen_fd) if fd >= 0]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULES[self.role]],
                stdin=subprocess.PIPE,
                pass_fds=inherited,
                cwd=_folder(),
                env=_environment(self.role),
                start_new_session=True,  # a terminal's Ctrl-C goes to the launcher alone, which ends them in order
            )
        except OSError:
            os.close(status_fd)
            raise
        finally:
            os.close(write_fd)
        self.status_fd = status_fd
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: `poll` will tell
            self._process.stdin.write(msgspec.json.encode(boot) + b"\n")
            self._process.stdin.flush()

    def read_status(self) -> list[Status]:
        """What the process has said since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self.status_fd, 65_536)
        *lines, self._unread = self._unread.split(b"\n")
        words = [msgspec.json.decode(line, type=Status) for line in lines]
        for word in words:
            self.beat_s = time.monotonic()
            if word.state == "ready":
                self.ready, self.failed_starts, self.facts = True, 0, word.facts
            elif word.state == "failed":
                self.failure = word.message
        return words

    def poll(self) -> str | None:
        """How the process ended, or None while it runs or when there is none."""
        if self._process is None or self._process.poll() is None:
            return None
        return self.hung or describe_exit(self._process.returncode)

    def end(self, with_signal: signal.Signals) -> None:
        """Send a signal to the process, if one runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(with_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone within the time."""
        try:
            if self._process is not None:
                self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def state(self, up: bool, reason: str = "") -> ChildState:
        """This place's state as the server hears it."""
        return ChildState(self.role, self.index, up, reason, self.generation)

    def bury(self) -> None:
        """Empty the place after its process ended: nothing of it stays, but for what it last said."""
        if self._process is None:
            return
        if not self.ready:
            self.failed_starts += 1
        self.read_status()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self.status_fd)
        self._process, self.status_fd, self.ready, self.used = None, -1, False, False


def describe_exit(returncode: int) -> str:
    """``"signal SIGKILL"`` or ``"exit code 1"``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def _folder() -> str | None:
    """Where children work: here, unless this folder was removed, which libraries do not expect."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def _environment(role: Role) -> dict[str, str]:
    """One thread for the numeric libraries of everything but the engine, and no spinning while the engine waits.

    oneDNN keeps the code that it makes for every new number of tokens, about 1 MB each: the bounds below cost 3 % of a
    prefill of a length never seen, and keep the engine from growing by half a gigabyte (600 lengths: 700 for 1,220 MB).
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    environment.setdefault("LRU_CACHE_CAPACITY", "32")  # torch's own cache before oneDNN's
    if role != "engine":
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment
