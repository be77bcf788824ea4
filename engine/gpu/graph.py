"""A callable as a CUDA graph: what it launches is recorded once, and sent again as a whole at each replay.

`torch.cuda.graph` waits for the device and hands all memory that torch keeps back to it, the host's pinned memory too,
before it records, so that the steps that follow ask for theirs anew. Recording needs none of it: it runs nothing, on a
stream of its own, and takes its tensors from a pool that nobody else takes from; what the device computes meanwhile
stays untouched. So a capture costs what its launches cost the host, and streams go on beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_streams: list[torch.cuda.Stream] = []
"""The one that all captures are recorded on: a pool hands memory on only where the stream is the same."""


class GraphMemory:
    """What graphs keep their tensors in. Those that share one may overwrite each other's: a result holds until the next
    replay of any of them.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        """Known once a graph is being captured."""


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
        if memory.pool is None:
            memory.pool = torch.cuda.graph_pool_handle()
        try:
            self._graph, self.result = _captured(run, memory.pool)
        except torch.OutOfMemoryError:  # while it captures torch cannot give up what it keeps for later
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._graph, self.result = _captured(run, memory.pool)

    def replay(self) -> None:
        """Sends the work to the device."""
        self._graph.replay()


def _captured(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    if not _streams:
        _streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_streams[0]):
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
