"""The engine's GPU code on a CPU: everything around the kernels as it is, so that what it does is tested anywhere.

    CUDA graph       the callable again, its results copied into what the capture gave; other graphs' results spoilt
    Triton           plain torch (`tests.engine.plain_kernels`), or its interpreter, which is a hundred times as slow
    FlashInfer       plain torch, on the arguments that the kernels would get; what was planned is checked against them
    pinned memory    memory
    streams, events  nothing: work is done when its call returns

Give it tiny models, few sizes of graphs and short prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.load import FAMILIES, set_threads
from engine.load_drafter import load_drafter
from engine.models.experts import Experts
from engine.runner import TorchRunner
from preprocess.blocks.checkpoint import Checkpoint
from tests.engine.gpu import INTERPRETED
from tests.engine.plain_kernels import import_kernels, replace_kernels

if TYPE_CHECKING:
    from engine.gpu.runner import CudaRunner

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1, triton and no CUDA device"
)
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="the device itself is here")

MAX_POSITIONS: Final = 1024


class Event:
    """Of work that is done."""

    def record(self, stream: object = None) -> None:
        """Nothing is in flight."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has passed."""
        return True


class PlainModule:
    """What FlashInfer's compiled module does, one layer's attention of a part of a step, row by row."""

    scale_at = -4
    """Place of the scale of scores among the arguments."""

    def plan(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        pinned: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        key_lengths: torch.Tensor,
        tokens: int,
        rows: int,
        heads: int,
        kv_heads: int,
        page: int,
        is_captured: bool,
        *rest: Any,
    ) -> list[int]:
        """Writes into the workspace what it was planned for. Equal for equal sizes where it is captured."""
        assert queries.dtype == keys.dtype == key_lengths.dtype == torch.int32
        assert queries.is_contiguous()
        assert keys.is_contiguous()
        assert len(queries) == len(keys) == rows + 1
        assert torch.equal(keys.diff(), key_lengths)
        assert tokens >= int(queries[-1])
        assert bool((queries.diff() >= 0).all())
        assert bool((queries.diff() <= key_lengths).all())
        assert heads % kv_heads == 0
        assert page == 1
        width = rest[-1]
        assert not width or queries.diff().tolist() == [width] * rows
        planned = torch.cat((torch.tensor([rows], dtype=torch.int32), queries, keys))
        ints.view(torch.int32)[: len(planned)] = planned
        return [tokens, rows, 1, width] if is_captured else [int(queries[-1]), rows, 0, 0]

    def paged_run(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        info: list[int],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_offsets: torch.Tensor,
        key_offsets: torch.Tensor,
        slots: torch.Tensor,
        last_page: torch.Tensor,
        out: torch.Tensor,
        *rest: Any,
    ) -> None:
        """(tokens, heads, dim) of keys and values (slots, 1, kv_heads, dim)."""
        rows = info[1]
        planned = ints.view(torch.int32)[: 2 * rows + 3].tolist()
        assert planned == [rows, *query_offsets.tolist(), *key_offsets.tolist()], "planned for other rows"
        assert len(query) == len(out) == info[0]
        assert last_page.tolist() == [1] * rows
        scale = rest[self.scale_at]
        heads, kv_heads = query.shape[1], keys.shape[2]
        of_queries, of_keys = query_offsets.tolist(), key_offsets.tolist()
        for first, stop, key_first, key_stop in zip(
            of_queries[:-1], of_queries[1:], of_keys[:-1], of_keys[1:], strict=True
        ):
            if first == stop:
                continue
            at = slots[key_first:key_stop].long()
            key, value = (part[at, 0].float() for part in (keys, values))
            grouped = query[first:stop].float().unflatten(1, (kv_heads, heads // kv_heads))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * scale
            length, new = key_stop - key_first, stop - first
            if new > 1:  # one alone sees everything
                later = torch.arange(length)[None, :] > torch.arange(length - new, length)[:, None]
                scores.masked_fill_(later, -torch.inf)
            out[first:stop] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), value).flatten(1, 2).to(out.dtype)


class HopperModule(PlainModule):
    """The same with the arguments of the Hopper kernel; `num_runs` counts."""

    scale_at = -3

    def __init__(self) -> None:
        self.num_runs = 0

    def plan(self, *arguments: Any) -> list[int]:
        """See `PlainModule.plan`; without the last four arguments."""
        assert len(arguments) == 16
        return super().plan(*arguments, -1, True, 0, 0)

    def paged_run(self, *arguments: Any) -> None:
        """See `PlainModule.paged_run`."""
        assert len(arguments) == 24
        self.num_runs += 1
        super().paged_run(*arguments)


class PlainModules:
    """In place of `engine.attention.flashinfer_modules.Modules`. `looks` counts."""

    def __init__(self) -> None:
        self.tiled = PlainModule()
        self.hopper: HopperModule | None = None
        self.looks = 0

    def look(self) -> None:
        """Nothing is compiled here."""
        self.looks += 1

    def wait(self) -> None:
        """Nothing to wait for."""


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    assert isinstance(result, list | tuple)
    return [tensor for part in result for tensor in _tensors(part)]


def _spoil(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 20))


class Replays:
    """What stands in for `Graph.__init__` and `Graph.replay`."""

    def __init__(self) -> None:
        self._graphs: dict[int, list[Any]] = {}

    def capture(self, graph: Any, run: Callable[[], Any], memory: Any) -> None:
        """Results belong to this graph, their values to the next replay of any graph of that memory."""
        graph._run = run
        graph.result = run()
        memory.pool = memory
        graph._others = self._graphs.setdefault(id(memory), [memory])
        graph._others.append(graph)

    def replay(self, graph: Any) -> None:
        """Runs again; results of the others are as good as overwritten."""
        for other in graph._others[1:]:
            for tensor in _tensors(other.result):
                _spoil(tensor)
        for tensor, new in zip(_tensors(graph.result), _tensors(graph._run()), strict=True):
            if new.data_ptr() != tensor.data_ptr():
                tensor.copy_(new)


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return unpinned


def simulate(patch: pytest.MonkeyPatch, *, interpreted: bool = False, token_sizes: Sequence[int] = ()) -> None:
    """From here on until `patch` is undone, this process's GPU code runs on the CPU.

    Args:
        patch: Puts back what is replaced.
        interpreted: Whether Triton's interpreter runs the kernels; torch does otherwise.
        token_sizes: Captured numbers of tokens of steps with chunks, fewer than there are otherwise.
    """
    import_kernels()
    from engine.gpu.graph import Graph

    if not interpreted:
        replace_kernels(patch)
    replays = Replays()
    patch.setattr(Graph, "__init__", lambda graph, run, memory: replays.capture(graph, run, memory))
    patch.setattr(Graph, "replay", lambda graph: replays.replay(graph))
    patch.setattr(Graph, "seconds", lambda graph: 0.0)
    patch.setattr("torch.cuda.Event", Event)
    patch.setattr("torch.cuda.synchronize", lambda device=None: None)
    patch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor)
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        patch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    patch.setattr("engine.attention.flashinfer_backend._FLOAT_BYTES", 64)
    patch.setattr("engine.attention.flashinfer_backend._INT_BYTES", 1 << 16)
    patch.setattr("engine.attention.flashinfer_backend._PLAN_BYTES", 1 << 10)
    if token_sizes:
        patch.setattr("engine.gpu.step_sizes.token_sizes", lambda most: list(token_sizes))


def load_simulated(
    folder: Path, *, max_rows: int, kv_tokens: int = 4000, dtype: torch.dtype = torch.float32, **options: Any
) -> CudaRunner:
    """What `load_runner` makes on a GPU, once `simulate` was called. float32 lets answers be compared for equality.
    `options`: of `EngineConfig`, about who guesses.
    """
    from engine.gpu.runner import CudaRunner

    set_threads(1)
    cpu = torch.device("cpu")
    checkpoint = Checkpoint(folder, dtype=dtype, device=cpu)
    family = FAMILIES[checkpoint.config.choice("model_type", tuple(FAMILIES))]
    with torch.inference_mode():
        model, encoder = family.language(checkpoint), family.encoder(checkpoint)
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):
            weights = layer.mlp.gate_up, layer.mlp.down
            stacked = [torch.stack([linear.weight for linear in part]) for part in weights]
            layer.mlp.stacked = stacked[0], stacked[1]
    languages = {name: family.language for name, family in FAMILIES.items()}
    drafter = load_drafter(EngineConfig(str(folder), **options), model, checkpoint, languages, is_quick=True)
    runner = CudaRunner(
        model,
        encoder,
        num_slots=1 + kv_tokens,
        max_positions=MAX_POSITIONS,
        max_rows=max_rows,
        dtype=dtype,
        device=cpu,
        modules=PlainModules(),
    )
    if drafter is not None:
        runner.guess_with(drafter.on(runner.pools(), None))
    return runner


def rows_of_table(runner: TorchRunner, rows: int, each: int) -> None:
    """Slots for tests that write the table by themselves: `each` positions a row, one after the other."""
    runner.slot_table[:rows, :each] = torch.from_numpy(np.arange(1, 1 + rows * each).reshape(rows, each))
