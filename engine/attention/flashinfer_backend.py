"""Attention with FlashInfer's paged kernels on NVIDIA GPUs (Ye et al. 2025, arXiv:2501.01005), page size 1.

One compiled kernel, the batched prefill with tensor cores, does chunks of any lengths in one batch, and splits the keys
of few tokens over more blocks. A faster one, where the device has it, does all whose keys need no splitting: 2,048
tokens in 93 instead of 172 µs of an H200. Decode rows have a kernel of ours (`engine.gpu.decode_attention`). A step is
planned once, on the host; every layer then runs by that plan. The modules are called directly, since the library's
wrappers copy buffers at every plan that we keep in place, and would plan a captured step by the size they were made
with.

    plan       host: lengths ─▶ tiles and splits ─▶ pinned ─▶ device workspace (behind everything in flight)
    captured   the same, but grids are padded to what the step's size may ever need, so that a graph can be replayed

The Hopper kernel has a block for each multiprocessor whatever the step, and its plan lies where the step's size says,
so that it can be replayed, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import Segment
from engine.attention.flashinfer_modules import AttentionModules
from engine.gpu.decode_attention import DecodeAttention, DecodePart, DecodeRows, drafts_attention, part_keys
from engine.gpu.ops import gather_slots
from engine.gpu.step_sizes import most_checked
from engine.gpu.tree_parts import tree_parts

ENOUGH_TILES: Final = 96
"""So many blocks of 128 queries, by key head, keep the device busy without splitting their keys."""

TILE: Final = 128
"""Tokens of one head that a block of the Hopper kernel takes."""

FEW_TOKENS: Final = TILE // 2
"""With fewer a row than this, most of such tiles would be padding."""

BLOCKS: Final = 132
"""Multiprocessors of an H200, of which the Hopper kernel gives each one of its tiles at a time."""

FULL: Final = 8900
"""Tokens times heads that keep the device busy however their keys are split: from then on the other kernel takes as
long for more keys as the Hopper kernel does (14 µs for a thousand).
"""

TOGETHER: Final = (0.6, 1.5)
"""What it takes to put together what was read in parts, whatever the keys, and so much more at `FULL`: as long as the
Hopper kernel takes for so many thousand keys.
"""

Reader = Literal["split", "whole", "hopper"]
"""Who reads chunks: the one kernel with keys split or not, or the Hopper kernel, which cannot split them."""

_FLOAT_BYTES: Final = 384 << 20
_INT_BYTES: Final = 8 << 20
_PLAN_BYTES: Final = 128 << 10
_IN_FLIGHT: Final = 4
"""Pinned workspaces in rotation: one may be written again once the plan that it held has been copied."""
_MOST_PADDING: Final = 16
"""Rows of padding that a captured step may have beyond the table's."""
_CAUSAL: Final = 1
_NHD: Final = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A step's rows, on the host: int32 (rows + 1,) offsets of their new tokens and of their keys."""

    query: NDArray[np.int32]
    keys: NDArray[np.int32]

    @classmethod
    def of(cls, new: NDArray[np.int32], total: NDArray[np.int32]) -> Lengths:
        """From how many tokens each row computes, and how many it then has."""
        return cls(_offsets(new), _offsets(total))


class Workspace:
    """What one plan is kept in: device memory that the kernels read, and pinned memory that it is copied from."""

    def __init__(self, device: torch.device) -> None:
        self.ints = torch.empty(_INT_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(_INT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_IN_FLIGHT)]
        self._copied: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(_IN_FLIGHT)
        ]
        self._next = 0

    def take(self) -> torch.Tensor:
        """Pinned memory that nothing in flight reads."""
        self._copied[self._next].synchronize()
        return self._pinned[self._next]

    def planned(self) -> None:
        """The copy out of what `take` gave has been launched."""
        self._copied[self._next].record()
        self._next = (self._next + 1) % _IN_FLIGHT


class Part(Protocol):
    """Tokens `first` … `first + count - 1` of a step."""

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    def read(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """One layer's attention of them, (count, heads, dim) each; the step's keys and values are in the pool."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PartPlan:
    """A part that FlashInfer reads. int32 on the device: offsets of each row's new tokens and of its keys, and the
    slots of all keys, row by row. `reader`: whom it was planned for.
    """

    backend: FlashInferAttention
    first: int
    count: int
    workspace: Workspace
    info: Any
    queries: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor
    reader: Reader

    def read(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """See `Part.read`."""
        self.backend.run(layer, self, query, out)


class StepPlan:
    """See `AttentionPlan`.

    Args:
        pool: (layers, slots, 2, kv_heads, head_dim).
        slots: int32 (tokens,), where the step's keys and values go.
        parts: Cover the step's tokens, each planned by itself.
        pad: Whether there may be tokens that no row of theirs holds; attention gives zeros there.
    """

    def __init__(self, pool: torch.Tensor, slots: torch.Tensor, parts: Sequence[Part], *, pad: bool = False) -> None:
        self.slots = slots
        self._pool = pool
        self._parts = parts
        self._pad = pad

    @cached_property
    def places(self) -> torch.Tensor:
        """int64: the same slots, as torch's indexing wants them."""
        return self.slots.long()

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        self._pool[layer].index_copy_(0, self.places, key_value)
        return self.read(layer, query)

    def read(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention alone: the step's keys and values are in the pool. (tokens, heads, dim) → (tokens, heads * dim)."""
        make = torch.zeros if self._pad else torch.empty
        out = make(query.shape, dtype=query.dtype, device=query.device)
        for part in self._parts:
            stop = part.first + part.count
            part.read(layer, query[part.first : stop], out[part.first : stop])
        return out.flatten(1)


class FlashInferAttention:
    """See `AttentionBackend`.

    Args:
        pool: (layers, slots, 2, kv_heads, head_dim), bfloat16 or float16.
        slot_table: (rows, positions) int32.
        num_heads: Query heads.
        modules: Its kernels; they may still be on their way.
    """

    def __init__(self, pool: torch.Tensor, slot_table: torch.Tensor, num_heads: int, modules: AttentionModules) -> None:
        device = pool.device
        self.pool = pool
        self.slot_table = slot_table
        self.num_heads = num_heads
        self.num_kv_heads, self.head_dim = pool.shape[3:]
        self.scale = 1 / math.sqrt(self.head_dim)
        self.modules: AttentionModules = modules
        # (slots, 1, kv_heads, head_dim) each: a page of one token.
        self.caches = [(layer[:, 0].unsqueeze(1), layer[:, 1].unsqueeze(1)) for layer in pool]
        self.floats = torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self.ones = torch.ones(slot_table.shape[0] + _MOST_PADDING, dtype=torch.int32, device=device)
        self.decoding = DecodeAttention(pool, slot_table, num_heads, most_rows=slot_table.shape[0])
        self._workspace = Workspace(device)

    @cached_property
    def drafting(self) -> DecodeAttention:
        """Attention of rows with drafts. It has memory of its own, which nobody needs who never drafts."""
        most = most_checked(self.slot_table.shape[0] - 1)
        return drafts_attention(self.pool, self.slot_table, self.num_heads, most)

    def plan(self, segments: Sequence[Segment], positions: torch.Tensor) -> StepPlan:
        """See `AttentionBackend.plan`; trees of drafts come last."""
        new = np.array([segment.length for segment in segments], np.int32)
        total = np.array([segment.start for segment in segments], np.int32) + new
        ones = int((new == 1).cumprod().sum())  # rows in front that decode
        stop = next((index for index, segment in enumerate(segments) if segment.parents is not None), len(segments))
        lengths = Lengths.of(new[ones:stop], total[ones:stop])
        cuts = part_keys(total[:ones], self.num_kv_heads) if ones else total[:0]
        packed = np.concatenate(
            ([segment.table_row for segment in segments], new, total[:ones] - 1, cuts, lengths.query, lengths.keys)
        )
        on_device = torch.from_numpy(packed.astype(np.int32)).pin_memory().to(self.pool.device, non_blocking=True)
        sizes = [len(segments), len(segments), ones, ones, len(lengths.query), len(lengths.keys)]
        table_rows, counts, last, decode_cuts, query, keys = torch.split(on_device, sizes)
        token_rows = table_rows
        if len(positions) > len(segments):
            token_rows = table_rows.repeat_interleave(counts, output_size=len(positions))
        slots = self.slot_table[token_rows, positions]
        parts: list[Part] = []
        if ones:
            rows = DecodeRows(table_rows[:ones], last, decode_cuts)
            parts.append(DecodePart(0, ones, self.decoding, rows))
        count = int(lengths.query[-1])
        if count:
            indices = torch.empty(int(lengths.keys[-1]), dtype=torch.int32, device=self.pool.device)
            gather_slots(self.slot_table, table_rows[ones:stop], keys, indices)
            reader = self.reader(count, splits=self.splits(lengths, count))
            if reader == "hopper" and count < FEW_TOKENS * (stop - ones):
                reader = "whole" if self.is_whole(count) else "split"
            info = self.schedule(lengths, self._workspace, reader)
            parts.append(PartPlan(self, ones, count, self._workspace, info, query, keys, indices, reader))
        if stop < len(segments):
            parts += tree_parts(segments[stop:], ones + count, self.drafting)
        return StepPlan(self.pool, slots, parts)

    def reader(self, tokens: int, *, splits: bool) -> Reader:
        """Who reads chunks of so many tokens, as things are now; `splits`: see there."""
        if self.modules.hopper is not None and not splits:
            return "hopper"
        return "whole" if self.is_whole(tokens) else "split"

    def splits(self, lengths: Lengths, tokens: int) -> bool:
        """Whether the keys of such rows, in a step of so many tokens, are worth splitting: the tokens are few and some
        keys many, so that the Hopper kernel would leave most of the device idle for long.
        """
        if self.is_whole(tokens):
            return False
        rounds = -(-int((-(-np.diff(lengths.query) // TILE)).sum()) * self.num_heads // BLOCKS)
        share = tokens * self.num_heads / FULL
        thousands = int(np.diff(lengths.keys).max()) / 1024
        return thousands * (rounds - share) > TOGETHER[0] + TOGETHER[1] * share

    def is_whole(self, tokens: int) -> bool:
        """Whether so many tokens keep the device busy without splitting their keys, whatever they are."""
        blocks = -(-tokens * (self.num_heads // self.num_kv_heads) // TILE) * self.num_kv_heads
        return blocks >= ENOUGH_TILES

    def run(self, layer: int, part: PartPlan, query: torch.Tensor, out: torch.Tensor) -> None:
        """One layer's attention of a part, (tokens, heads, dim) each."""
        keys, values = self.caches[layer]
        arguments = (
            self.floats,
            part.workspace.ints,
            part.info,
            query,
            keys,
            values,
            part.queries,
            part.keys,
            part.slots,
            self.ones[: len(part.keys) - 1],
            out,
            None,  # no log-sum-exp
            _CAUSAL,
            _NHD,
            -1,  # no window
            False,  # no programmatic dependent launch
        )
        if part.reader == "hopper":
            module: Any = self.modules.hopper
            module.paged_run(
                *arguments,
                *[None] * 4,  # prefixes, items and their lengths, scales
                0.0,  # no soft cap
                self.scale,
                1.0,  # scale of values
                0,
            )
        else:
            self.modules.tiled.paged_run(
                *arguments,
                *[None] * 8,  # masks, slopes, prefixes, scales
                0.0,  # no soft cap
                self.scale,
                1.0,  # rotation inside the kernel, which is not used
                1e-4,
                0,
            )

    def schedule(self, lengths: Lengths, workspace: Workspace, reader: Reader, *, padded_tokens: int = 0) -> Any:
        """Plans on the host and sends the plan to `workspace`. `padded_tokens`: for a captured step of that size."""
        key_lengths = np.diff(lengths.keys)
        tokens = padded_tokens or int(lengths.query[-1])
        pinned = workspace.take()
        if reader == "whole" and padded_tokens:
            # Without splits nobody tells the tiles that padding adds to stop: they do tile 0 again.
            pinned[:_PLAN_BYTES].zero_()
        arguments = (
            self.floats,
            workspace.ints,
            pinned,
            torch.from_numpy(lengths.query),
            torch.from_numpy(lengths.keys),
            torch.from_numpy(key_lengths),
            tokens,
            len(key_lengths),
            self.num_heads,
            self.num_kv_heads,
            1,
            padded_tokens > 0,
            self.head_dim,
            self.head_dim,
            True,
            -1,
        )
        if reader == "hopper":
            module: Any = self.modules.hopper
            info = module.plan(*arguments)
        else:
            info = self.modules.tiled.plan(*arguments, -1, reader == "whole", 0, 0)
        workspace.planned()
        return info


def _offsets(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
