"""How graphs are captured beside running streams: nothing waits for the device, and what fails leaves nothing behind.
On a CUDA that notes what it is asked for.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.gpu.graph import Graph, GraphMemory


class Cuda:
    """Notes calls in order; `stream` is the current one, 0 the usual one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pools: list[Any] = []
        self.streams = 0
        self.stream = 0
        self.breaks_off = False

    def make_stream(self) -> int:
        """Another stream."""
        self.streams += 1
        return self.streams

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """See `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    noted = Cuda()

    class CUDAGraph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            assert noted.stream, "a capture on the stream that steps run on"
            assert capture_error_mode == "thread_local"
            noted.pools.append(pool)
            noted.calls.append("begin")

        def capture_end(self) -> None:
            noted.calls.append("end")
            if noted.breaks_off:
                raise RuntimeError("the capture was broken off")

        def replay(self) -> None:
            assert not noted.stream
            noted.calls.append("replay")

    monkeypatch.setattr("engine.gpu.graph._streams", [])
    for name, fake in (
        ("CUDAGraph", CUDAGraph),
        ("Stream", noted.make_stream),
        ("stream", noted.on),
        ("graph_pool_handle", lambda: object()),
        ("synchronize", lambda: noted.calls.append("synchronize")),
        ("empty_cache", lambda: noted.calls.append("empty_cache")),
    ):
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    return noted


def test_a_capture_waits_for_nothing_and_gives_no_memory_back(cuda: Cuda) -> None:
    graph = Graph(lambda: cuda.stream, GraphMemory())
    assert graph.result == 1, "on a stream of its own"
    assert cuda.stream == 0
    graph.replay()
    assert cuda.calls == ["begin", "end", "replay"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(cuda: Cuda, is_broken: bool) -> None:
    """Other graphs may be among it, and destroying one would break the capture off."""
    collected = []

    class Garbage:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            collected.append(len(cuda.calls))

    def run() -> None:
        Garbage()
        keeps = [[index] for index in range(5000)]  # so many new objects are looked through for garbage
        assert len(keeps) == 5000
        if is_broken:
            raise RuntimeError("such as no memory")

    with pytest.raises(RuntimeError) if is_broken else contextlib.nullcontext():
        Graph(run, GraphMemory())
    assert gc.isenabled()
    gc.collect()
    assert collected == [len(cuda.calls)]


def test_graphs_of_one_memory_share_a_pool_and_all_share_a_stream(cuda: Cuda) -> None:
    one, other = GraphMemory(), GraphMemory()
    graphs = [Graph(lambda: None, memory) for memory in (one, other, one)]
    assert cuda.pools[0] is cuda.pools[2] is one.pool
    assert cuda.pools[1] is other.pool is not one.pool
    assert cuda.streams == 1
    assert len(graphs) == 3


def test_a_pool_whose_graphs_are_all_gone_is_never_asked_for_again(cuda: Cuda) -> None:
    """Torch refuses it: nothing of that memory could be captured any more."""
    memory = GraphMemory()
    graphs = [Graph(lambda: None, memory) for _ in range(2)]
    del graphs[0]
    graphs.append(Graph(lambda: None, memory))
    graphs.clear()
    kept = Graph(lambda: None, memory)
    assert cuda.pools[0] is cuda.pools[1] is cuda.pools[2]
    assert cuda.pools[3] is memory.pool is not cuda.pools[0]

    def fails() -> None:
        raise ValueError("no kernel for this")

    broken = GraphMemory()
    with pytest.raises(ValueError, match="no kernel"):
        Graph(fails, broken)
    Graph(lambda: None, broken)
    assert cuda.pools[4] is not cuda.pools[5]
    assert kept.result is None


@pytest.mark.parametrize("breaks_off", [False, True])
def test_what_cannot_be_captured_raises_what_it_raised_and_the_next_capture_is_sound(
    cuda: Cuda, breaks_off: bool
) -> None:
    def fails() -> None:
        raise ValueError("no kernel for this")

    cuda.breaks_off = breaks_off
    with pytest.raises(ValueError, match="no kernel"):
        Graph(fails, GraphMemory())
    assert cuda.stream == 0
    assert cuda.calls == ["begin", "end"]
    cuda.breaks_off = False
    Graph(lambda: None, GraphMemory())


def test_memory_that_torch_keeps_is_given_back_only_where_there_is_no_other(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short() -> str:
        if cuda.calls.count("begin") == 1:
            raise torch.OutOfMemoryError("none left")
        return "captured"

    assert Graph(short, GraphMemory()).result == "captured"
    assert cuda.calls == ["begin", "end", "synchronize", "empty_cache", "begin", "end"]

    class Taken:
        """Memory of a capture that broke off."""

    def greedy() -> Taken:
        taken = Taken()
        held.add(taken)
        if len(seen) < 1:
            seen.append(1)
            raise torch.OutOfMemoryError("none left")
        return taken

    held, seen = weakref.WeakSet[Taken](), list[int]()
    at_giving_back: list[int] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: at_giving_back.append(len(held)))
    graph = Graph(greedy, GraphMemory())
    assert at_giving_back == [0], "what broke off holds nothing any more"
    assert list(held) == [graph.result]

    def never() -> None:
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError):
        Graph(never, GraphMemory())
