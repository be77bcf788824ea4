"""A callable as a CUDA graph: what it launches is recorded once, and sent again as a whole at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class GraphMemory:
    """What graphs keep their tensors in. Those that share one may overwrite each other's: a result holds until the next
    replay of any of them.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        """Known once a graph has been captured."""


class Graph(Generic[Result]):
    """Captures at once.

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
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory.pool):
            self.result = run()
        memory.pool = self._graph.pool()

    def replay(self) -> None:
        """Sends the work to the device."""
        self._graph.replay()
