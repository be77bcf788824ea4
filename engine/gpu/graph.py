"""A callable as a CUDA graph: what it launches is recorded once, and sent again as a whole at each replay.

`torch.cuda.graph` waits for the device and hands all memory that torch keeps back to it, the host's pinned memory too,
before it records, so that the steps that follow ask for theirs anew. Recording needs none of it: it runs nothing, on a
stream of its own, and takes its tensors from a pool that nobody else takes from; what the device computes meanwhile
stays untouched. So a capture costs what its launches cost the host, and streams go on beside it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import torch

Result = TypeVar("Result")

LONG_S: Final = 0.01
"""A replay that takes so long is timed once."""

_streams: list[torch.cuda.Stream] = []
"""The one that all captures are recorded on: a pool hands memory on only where the stream is the same."""


class GraphMemory:
    """What graphs keep their tensors in. Those that share one may overwrite each other's: a result holds until the next
    replay of any of them.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        """Known once a graph is being captured."""
        self._graphs = weakref.WeakSet[Graph[Any]]()

    def take(self) -> Any:
        """The pool for one more graph. Torch refuses one that has had graphs and has none left, since it may be giving
        it up; then it is a new one.
        """
        if not self._graphs:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def add(self, graph: Graph[Any]) -> None:
        """A graph that lives in the pool, as long as anybody holds it."""
        self._graphs.add(graph)


class Graph(Generic[Result]):
    """Captures at once, without waiting for the device.

    Args:
        run: Launches the work, on tensors that stay where they are and of shapes that stay as they are. It has run
            before, so that kernels are compiled and libraries set up.
        memory: Where its tensors come from.

    Attributes:
        result: What `run` gave: tensors that each replay fills anew.

    Raises:
        RuntimeError: Something that was launched cannot be captured.
    """

    def __init__(self, run: Callable[[], Result], memory: GraphMemory) -> None:
        captured = None
        with contextlib.suppress(torch.OutOfMemoryError):
            captured = _captured(run, memory.take())
        if captured is None:  # while it captures torch cannot give up what it keeps for later
            # Not while the error is handled: what had been captured lives as long as its traceback.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            captured = _captured(run, memory.take())
        self._graph, self.result = captured
        memory.add(self)

    def replay(self) -> None:
        """Sends the work to the device."""
        self._graph.replay()

    def seconds(self) -> float:
        """What a replay takes the device, which is waited for: the least of three, since the first one sends the graph
        itself, and the host may be late with the second; or the first one alone, where that hardly counts and streams
        would stand still for the others.
        """
        first_s = self._least_s(1)
        return first_s if first_s > LONG_S else min(first_s, self._least_s(2))

    def _least_s(self, replays: int) -> float:
        """Of so many, one right behind the other."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            self.replay()
            event.record()
        events[-1].synchronize()
        return min(float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(events)) / 1e3


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage stays: were another graph part of it, destroying that would break a capture off."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _captured(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    if not _streams:
        _streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(_streams[0]):
        # What other threads do, such as loading kernels that they have compiled, must not break it off.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # broken off: what broke it says more
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result
