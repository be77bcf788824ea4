"""The servers that benchmarks start: their "ready" is heard whatever else they say, and nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from server.bench import serving

TALKATIVE = """
import sys, time
for number in range(40_000):
    print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2], flush=True)
print("beholder: ready    http://127.0.0.1:8123 after 1.0 s", file=sys.stderr, flush=True)
time.sleep(3600)
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_a_server_that_says_much_is_heard_when_it_is_ready() -> None:
    with serving.started([sys.executable, "-c", TALKATIVE]) as (url, process):
        assert url == "http://127.0.0.1:8123"
        assert process.is_running()
    assert not process.is_running()


def test_a_server_that_ends_before_it_is_ready_is_quoted() -> None:
    with (
        pytest.raises(RuntimeError, match="no such model"),
        serving.started([sys.executable, "-c", "raise SystemExit('no such model')"]),
    ):
        pass


def test_a_server_that_does_not_end_is_killed_with_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        serving.end(process, timeout_s=0)
        assert process.returncode < 0
        # Nobody may be there to ask after an orphan: then it stays in the table as a zombie.
        while _runs(child):
            time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
