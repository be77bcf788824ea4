"""The engine without its server, for benchmarks: requests prepared beforehand, its events, and a clock that fits.

Where one thread computes, times are processor time of that thread, since shared machines are noisy; otherwise they are
ordinary time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from preprocess.prepare import Preparer
from preprocess.wire import (
    EngineRequest,
    GenerationOptions,
    Job,
    Lease,
    Message,
    Pixels,
    Prepared,
    TokenEvent,
    TokenEvents,
)
from server.sampling_rules import sampling_options

if TYPE_CHECKING:
    import torch

    from engine.core import Engine


def clock_of(device: str) -> Callable[[], float]:
    """Seconds, monotonic, for an engine on a device (``"cpu"``, ``"cuda"``) that runs in this thread."""
    import torch

    return time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def prepared(
    preparer: Preparer, name: str, messages: list[Message], sampling: Mapping[str, Any], *, session: str = ""
) -> EngineRequest:
    """A greedy request, decoded and tokenised, unless `sampling` says otherwise. Raises RuntimeError where refused."""
    options: GenerationOptions = sampling_options({"temperature": 0.0, **sampling})
    found = preparer.prepare(Job(name, messages, options, Lease(), time.monotonic(), session_id=session))
    if not isinstance(found, Prepared):
        raise RuntimeError(found.message)
    return found.request


def events(engine: Engine) -> Iterator[TokenEvent]:
    """One step, and what came of it. Raises RuntimeError for a request that failed."""
    for message in engine.step():
        if isinstance(message, TokenEvents):
            for event in message.events:
                if event.error is not None:
                    raise RuntimeError(event.error.message)
                yield event


def pixels_of(pixels: Pixels) -> torch.Tensor:
    """uint8 (tiles, height, width, 3)."""
    import torch

    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)
