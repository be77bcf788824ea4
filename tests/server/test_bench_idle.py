"""`beholder bench idle`: its arithmetic on a trace made up, its steps on a CPU, and on a GPU all of it."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.bench import command
from server.bench.device_trace import DeviceTime, KernelTime, device_time, kernel_times, read_trace
from server.bench.idle import ROOM, Alone, main, measure
from tests.engine.gpu import needs_gpu


def _event(begin_us: float, end_us: float, launch: int, name: str = "k", category: str = "kernel") -> dict[str, Any]:
    args = {"correlation": launch, "stream": 7}
    return {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": args}


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 90.0, "args": {"correlation": 1}},
    _event(130, 140, 2, "copy", "gpu_memcpy"),  # events of a trace are in no order
    _event(100, 110, 1),
    _event(112, 120, 1),  # 2 inside a launch
    _event(115, 119, 3, "set", "gpu_memset"),  # at the same time, and ended before the other
    _event(141, 150, 4),  # 1 between launches, as the 10 before the copy
    _event(150, 160, 4, "other"),
]
"""Work of 100 … 160 µs, idle for 2 inside a launch and 11 between launches."""


def _written(path: Path, events: list[dict[str, Any]]) -> Path:
    data = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_gaps_are_told_apart_by_what_the_host_had_sent(name: str, tmp_path: Path) -> None:
    found = device_time(read_trace(_written(tmp_path / name, EVENTS)))
    assert found == DeviceTime(span_us=60, busy_us=47, inside_us=2, between_us=11, longest_us=10)
    assert found.idle == pytest.approx(13 / 60)
    assert found.idle_between == pytest.approx(11 / 60)


def test_what_runs_at_once_counts_once(tmp_path: Path) -> None:
    events = [_event(0, 10, 1), _event(2, 8, 2), _event(5, 12, 3), _event(12, 13, 3)]
    found = device_time(read_trace(_written(tmp_path / "trace.json", events)))
    assert found == DeviceTime(span_us=13, busy_us=13, inside_us=0, between_us=0, longest_us=0)
    assert found.idle == 0


def test_kernels_are_summed_up_by_name(tmp_path: Path) -> None:
    times = kernel_times(read_trace(_written(tmp_path / "trace.json", EVENTS)))
    assert times[0] == KernelTime("k", 3, 27)
    assert {time.name: time.total_us for time in times[1:]} == {"copy": 10, "other": 10, "set": 4}


def test_a_trace_without_work_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no work of a device"):
        device_time([])


def test_streams_are_timed_and_traced_alone_and_beside_pictures(tiny_model: Path, tmp_path: Path) -> None:
    traced: list[str] = []

    def trace(work: Callable[[], None], path: Path) -> None:
        work()
        traced.append(_written(path, EVENTS).name)

    alone = Alone(str(tiny_model), "cpu", 2, 8, (32, 32), trace)
    options = argparse.Namespace(streams=[1, 2], steps=4, seconds=0.05, picture_every_ms=25, kernels=1)
    rows = measure(alone, options, tmp_path / "trace.json")
    assert [(row["streams"], row["beside"]) for row in rows] == [
        (1, "nothing"),
        (1, "pictures"),
        (2, "nothing"),
        (2, "pictures"),
    ]
    assert traced == ["trace-1.json", "trace-1-pictures.json", "trace-2.json", "trace-2-pictures.json"]
    first = rows[0]
    assert first["step ms"] > 0
    assert first["host ms"] == first["step ms"]  # nothing overlaps on a CPU
    assert (first["traced step ms"], first["busy ms"]) == (0.015, 0.012)
    assert (first["idle %"], first["between %"], first["longest µs"]) == (21.7, 18.3, 10)
    assert first["kernels"] == [{"µs a step": 27 / 4, "runs a step": 3 / 4, "kernel": "k"}]
    assert all(row["traced step ms"] > 0 for row in rows)


def test_streams_and_pictures_find_room(tiny_model: Path) -> None:
    alone = Alone(str(tiny_model), "cpu", 100, 8, (32, 32), lambda work, path: None)
    assert alone.start(100, 4).runner.max_rows == 100 + ROOM


def test_a_machine_without_a_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["idle"]) == 1
    assert "needs a CUDA device, and torch sees none" in capsys.readouterr().err


def test_names_of_traces_are_checked_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", "trace.txt"])
    assert "--trace trace.txt: expected a name that ends with .json" in capsys.readouterr().err


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_gpu)])
def test_a_gpu_is_traced(mark: None, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "trace.json.gz"
    given = (
        f"--model {tiny_model} --streams 1,2 --steps 4 --stream-words 8 --seconds 0.1 --image-size 32x32 --kernels 2"
    )
    assert main([*given.split(), "--json", "--trace", str(kept)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    for row in rows:
        assert 0 < row["busy ms"] <= row["traced step ms"]
        assert 0 <= row["between %"] <= row["idle %"] < 100
        assert len(row["kernels"]) == 2
    assert 0 < rows[0]["host ms"] <= rows[0]["step ms"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"trace-{name}.json.gz" for name in ("1", "1-pictures", "2", "2-pictures")
    }
    assert torch.cuda.is_available()
