"""What a starting server tells of where it can be reached."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from server import launch


def test_a_server_on_every_interface_tells_the_addresses_that_others_can_open(monkeypatch: Any) -> None:
    families = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "192.0.2.7"), (socket.AF_INET6, "fe80::1%eth0")]
    found = {"any": [SimpleNamespace(family=family, address=address) for family, address in families]}
    monkeypatch.setattr(launch.psutil, "net_if_addrs", lambda: found)
    assert launch.other_addresses("0.0.0.0") == launch.other_addresses("::") == ["192.0.2.7"]
    assert launch.other_addresses("127.0.0.1") == []
