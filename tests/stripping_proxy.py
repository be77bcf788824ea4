"""A proxy that has the server below a path, as many do who have one address for several programs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

_MOST_BYTES = 65_536


@contextlib.contextmanager
def below(prefix: str, url: str) -> Iterator[str]:
    """Serves what is at `url` below `prefix` ("/vision") of another port, and nothing else there. Gives that address.

    It takes the prefix away and tells the server nothing of it. WebSockets pass.
    """
    parts = urlsplit(url)
    behind = (parts.hostname or "", parts.port or 80)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def take() -> None:
            while True:
                try:
                    visitor, _ = door.accept()
                except OSError:
                    return  # closed: the end
                threading.Thread(target=_pass, args=(visitor, behind, prefix), daemon=True).start()

        threading.Thread(target=take, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}{prefix}"
        finally:
            door.shutdown(socket.SHUT_RDWR)


# One request a connection, so that only heads have to be understood.
def _pass(visitor: socket.socket, behind: tuple[str, int], prefix: str) -> None:
    with visitor, contextlib.suppress(OSError):
        head = b""
        while b"\r\n\r\n" not in head:
            more = visitor.recv(_MOST_BYTES)
            if not more:
                return
            head += more
        head, _, body = head.partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        method, path, version = line.split(" ")
        if not path.startswith(prefix + "/"):
            visitor.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            return
        if not any(field.lower().startswith("upgrade:") for field in fields):
            fields = [field for field in fields if not field.lower().startswith("connection:")] + ["connection: close"]
        told = "\r\n".join([f"{method} {path.removeprefix(prefix)} {version}", *fields]) + "\r\n\r\n"
        with socket.create_connection(behind) as server:
            server.sendall(told.encode("latin-1") + body)
            back = threading.Thread(target=_copy, args=(server, visitor), daemon=True)
            back.start()
            _copy(visitor, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_MOST_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
