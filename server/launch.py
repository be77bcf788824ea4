"""The launcher: starts every process, watches them, restarts what died, and takes all of them down in order.

It owns what must outlive a child: the listening socket, the pixel arena, the private folder of sockets. It serves
nothing itself, so nothing that a client sends can hurt it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import msgspec
import psutil
import zmq

from preprocess.arena import Arena
from preprocess.child import BEAT_EVERY_S, EXIT_BAD_START, push_socket
from preprocess.wire import ChildState, Drain
from server.child_process import ChildProcess, Surroundings, describe_exit
from server.options.option import SettingsError
from server.settings import Settings
from server.socket_folder import socket_folder
from server.start_table import Start

RESTART_PAUSE_S: Final = 0.1
"""Between a death and the next start; doubles with every death in a row before it was ready."""
MAX_FAILED_STARTS: Final = 5
"""A child that dies this often in a row before it is ready takes the service down: something is wrong for good."""
STOP_TIMEOUT_S: Final = 3.0
MAX_WAIT_S: Final = 1.0
"""Longest sleep of the launcher between two looks at its children."""
DRAIN_MARGIN_S: Final = 5.0
BAD_START: Final = describe_exit(EXIT_BAD_START)
CLEAN_EXIT: Final = describe_exit(0)


def launch(settings: Settings) -> int:
    """Serve until a signal or a fault that cannot be mended; the exit code of the command.

    Raises:
        SettingsError: The model folder cannot be used, the address cannot be listened on, or this machine lacks what
            the options ask for.
    """
    start = Start.of(settings)
    settings = start.settings
    _open_standard_streams()
    _allow_many_files()
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(_listen(settings.host, settings.port))
        try:
            folder = resources.enter_context(socket_folder())
            arena = resources.enter_context(Arena.create(settings.arena_bytes))
            signals = resources.enter_context(_signals())
        except OSError as error:
            raise SettingsError(f"cannot start: {error.strerror or error}") from None
        surroundings = Surroundings(folder, arena.fd, arena.size)
        return _Launcher(start, listener, surroundings, signals).run()


class _Launcher:
    def __init__(self, start: Start, listener: socket.socket, surroundings: Surroundings, signals: _Signals) -> None:
        self._start_table = start
        self._settings = settings = start.settings
        self._listener = listener
        self._signals = signals
        self._started_s = time.monotonic()
        self._server = ChildProcess("server", 0, settings, surroundings, listener.fileno())
        self._engine = ChildProcess("engine", 0, settings.engine_config(), surroundings)
        self._detokenizer = ChildProcess("detokenizer", 0, settings.preprocess_config(), surroundings)
        self._workers = [
            ChildProcess("preprocess", index, settings.preprocess_config(), surroundings)
            for index in range(settings.num_workers)
        ]
        self._children = [self._engine, self._server, self._detokenizer, *self._workers]
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)
        self._context: zmq.Context[Any] = zmq.Context()
        self._to_server: zmq.Socket[bytes] | None = None
        self._folder = surroundings.socket_folder
        self._announced = False
        self._watched_s = self._started_s
        self._drain_until_s: float | None = None
        self._exit_code: int | None = None

    def run(self) -> int:
        """Watch until there is an exit code, then leave nothing behind."""
        try:
            for child in self._children:
                child.start_at_s = self._started_s
            while self._exit_code is None:
                self._turn()
            return self._exit_code
        finally:
            self._stop_all()
            self._context.destroy(linger=0)
            self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if isinstance(key.data, ChildProcess):
                self._hear(key.data)
        for number in self._signals.take():
            self._on_signal(number)
        self._end_hung()
        for child in self._children:
            reason = child.poll()
            if reason is not None:
                self._bury(child)
                self._on_death(child, reason)
        now = time.monotonic()
        for child in self._children:
            if child.start_at_s is not None and child.start_at_s <= now and self._exit_code is None:
                self._start(child)
        if self._drain_until_s is not None and now > self._drain_until_s:
            _say("the grace time is over; ending what still runs")
            self._exit_code = 0

    def _wait_s(self) -> float:
        times = [child.start_at_s for child in self._children if child.start_at_s is not None]
        if self._drain_until_s is not None:
            times.append(self._drain_until_s)
        return max(0.0, min([MAX_WAIT_S, *(at - time.monotonic() for at in times)]))

    # ---- births and deaths -------------------------------------------------------------------------------------------

    def _start(self, child: ChildProcess) -> None:
        try:
            child.start()
        except OSError as error:  # no more processes, memory or file descriptors
            child.failed_starts += 1
            reason = f"it could not be started: {error.strerror or error}"
            if child.generation == 1:
                child.failure, reason = f"the {child.name} process is lost: {reason}", BAD_START
            self._on_death(child, reason)
            return
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)

    def _end_hung(self) -> None:
        """Kill what has not said for long that it is alive. Time in which this process slept too does not count."""
        now = time.monotonic()
        has_slept, self._watched_s = now - self._watched_s > MAX_WAIT_S + BEAT_EVERY_S, now
        for child in self._children:
            if has_slept:
                child.beat_s = now
            limit_s = self._settings.hang_timeout_s
            if child.role == "preprocess":  # silent while it works, under a deadline of its own
                limit_s += self._settings.preprocess_deadline_s
            if child.ready and not child.hung and now - child.beat_s > limit_s:
                child.hung = f"no sign of life for {limit_s:g} s"
                child.end(signal.SIGKILL)

    def _hear(self, child: ChildProcess) -> None:
        for word in child.read_status():
            if word.state == "ready":
                self._on_ready(child)
            elif word.child is not None:
                self._on_use(word.child)

    def _on_ready(self, child: ChildProcess) -> None:
        if child is self._server:
            if self._to_server is not None:
                self._to_server.close()
            self._to_server = push_socket(self._context, self._folder, "server")
            for other in self._children:
                if other is not child and other.ready:
                    self._tell(other.state(up=True))
        else:
            self._tell(child.state(up=True))

    def _on_use(self, state: ChildState) -> None:
        """The server gives work to this process. Only now people hear that it is up, and may rely on it."""
        for child in self._children:
            if (child.role, child.index, child.generation) == (state.role, state.index, state.generation):
                child.used = child.ready
        self._server.used = (
            self._server.ready
            and self._engine.used
            and self._detokenizer.used
            and any(worker.used for worker in self._workers)
        )
        new = [child for child in self._children if child.used and not child.announced]
        if self._announced:
            for child in new:
                _say(f"the {child.name} process is up again")
        elif len(new) == len(self._children):
            self._announced = True
            self._announce()
        else:
            return
        for child in new:
            child.announced = True

    def _on_death(self, child: ChildProcess, reason: str) -> None:
        if self._drain_until_s is not None and child is self._server:
            self._exit_code = 0 if reason == CLEAN_EXIT else 1
            return
        if child.failure and reason == BAD_START:
            _say(child.failure)
            self._exit_code = 1
            return
        if child.failed_starts >= MAX_FAILED_STARTS:
            _say(f"the {child.name} process died {child.failed_starts} times before it was ready ({reason}); giving up")
            self._exit_code = 1
            return
        _say(f"the {child.name} process died ({reason}); restarting it")
        pause_s = RESTART_PAUSE_S * 2 ** max(0, child.failed_starts - 1)
        child.start_at_s = time.monotonic() + pause_s
        if child is self._server:
            self._close_link()
            for other in self._children:
                other.used = False
            for worker in self._workers:  # they may write where the next server leases: none may outlive its server
                worker.end(signal.SIGKILL)
                worker.wait(STOP_TIMEOUT_S)
                self._bury(worker)
                worker.failed_starts = 0  # this death says nothing about it
                worker.start_at_s = child.start_at_s
        else:
            self._tell(child.state(up=False, reason=reason))

    def _bury(self, child: ChildProcess) -> None:
        if child.status_fd >= 0:
            self._selector.unregister(child.status_fd)
        child.bury()

    def _tell(self, message: msgspec.Struct) -> None:
        if self._to_server is not None:
            self._to_server.send(msgspec.msgpack.encode(message))

    def _close_link(self) -> None:
        if self._to_server is not None:
            self._to_server.close()
            self._to_server = None

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._drain_until_s is not None:
            _say("second signal: stopping at once")
            self._exit_code = 128 + number
        elif self._to_server is None or not self._server.ready:
            self._exit_code = 0
        else:
            _say("stopping: no new requests; running ones may finish")
            self._listener.close()
            self._tell(Drain(self._settings.grace_s))
            self._drain_until_s = time.monotonic() + self._settings.grace_s + DRAIN_MARGIN_S

    def _stop_all(self) -> None:
        """End what runs: politely, then not. The server goes first, so that nobody is told of wanted deaths."""
        for child in (self._server, *self._workers, self._detokenizer, self._engine):
            child.end(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            if not child.wait(max(0.05, deadline - time.monotonic())):
                child.end(signal.SIGKILL)
                child.wait(STOP_TIMEOUT_S)
            self._bury(child)
        self._close_link()

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        for line in self._start_table.lines(self._engine.facts):
            _say(line)
        _say(f"ready    {self._settings.scheme}://{shown}:{port} after {time.monotonic() - self._started_s:.1f} s")
        for address in other_addresses(host):
            _say(f"         {self._settings.scheme}://{address}:{port} from other machines")


def other_addresses(host: str) -> list[str]:
    """The IPv4 addresses by which other machines reach a server that listens on every interface; else none."""
    if host not in {"0.0.0.0", "::"}:
        return []
    every = [each for interface in psutil.net_if_addrs().values() for each in interface]
    return [each.address for each in every if each.family == socket.AF_INET and not each.address.startswith("127.")]


class _Signals:
    """Signals as bytes on a socket, so that the launcher's one wait hears them."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver
        self.fd = receiver.fileno()

    def take(self) -> list[int]:
        """Numbers of the signals that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            return list(self._receiver.recv(4096))
        return []


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)

    def wake(number: int, frame: FrameType | None) -> None:
        """The interpreter has already written the number to `sender`."""

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup asks to outlive the terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, wake) for number in numbers}
    old_fd = signal.set_wakeup_fd(sender.fileno())
    try:
        yield _Signals(receiver)
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()


def _open_standard_streams() -> None:
    """Fill closed descriptors 0, 1 and 2: else sockets would get those numbers, and children lose them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


def _allow_many_files() -> None:
    """As many open files as this user may have, for a connection each; shells start with few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    both = address == "::" and socket.has_dualstack_ipv6()  # every interface: IPv4's too
    try:
        return socket.create_server((address, port), family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise SettingsError(
            f"cannot listen on {host} port {port} ({reason}); choose another with --host and --port"
        ) from None


def _say(line: str) -> None:
    """For whoever reads standard error; that nobody does any more must not end the service."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(f"beholder: {line}\n")
        sys.stderr.flush()
