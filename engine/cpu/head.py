"""A head in the layout of EAGLE-3 beside native steps: what it guesses is one call of `head.h`, whatever rows it has.

`CpuRunner` has the library write down what its layers make of each token; `engine.speculation.torch_drafters` holds the
same head for steps that torch computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cpu.native import Matrix, NativeModel, Weights, library, padded
from engine.models.decoder import Decoder
from engine.models.eagle3 import Eagle3
from engine.speculation.drafter import DraftRow
from engine.speculation.drafting import Kind
from engine.speculation.torch_drafters import Pools, Told, head_entry_bytes, warm_up
from preprocess.blocks.rope import MRope

_P, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_LAG: Final = 1


class _Head(ctypes.Structure):
    """`Head` of head.h."""

    _fields_ = (
        ("token_norm", _P),
        ("feature_norm", _P),
        ("mlp_norm", _P),
        ("norm", _P),
        ("fc", Matrix),
        ("queries", Matrix),
        ("keys_values", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("head", Matrix),
        ("targets", _P),
        ("hidden", _I32),
        ("intermediate", _I32),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("num_features", _I32),
        ("norm_before_residual", _I32),
        ("eps", ctypes.c_float),
    )


class _Draft(ctypes.Structure):
    """`Draft` of head.h."""

    _fields_ = (
        ("rows", _P),
        ("ends", _P),
        ("lengths", _P),
        ("allowed", _P),
        ("embeddings", _P),
        ("table", _P),
        ("features", _P),
        ("ahead", _P),
        ("rotation", _P),
        ("slot_table", _P),
        ("kv_pool", _P),
        ("logits", _P),
        ("guesses", _P),
        ("workspace", _P),
        ("num_slots", _I64),
        ("table_width", _I64),
        ("table_stride", _I64),
        ("num_rows", _I32),
        ("num_pairs", _I32),
        ("num_ends", _I32),
        ("is_guessed", _I32),
        ("in_order", _I32),
    )


class NativeHead:
    """See `engine.speculation.drafter.ChainDrafter`.

    Args:
        model: Its weights, which are taken out of it.
        target: The model that it was trained for: embeds tokens.
        native: The same in the library's layout: gives logits where the head has none of its own.
        pools: The target's slots.
        cost, late_cost: See `Drafter`.
    """

    kind = Kind.HEAD
    lag = _LAG
    keeps_guesses = False

    def __init__(
        self, model: Eagle3, target: Decoder, native: NativeModel, pools: Pools, *, cost: float, late_cost: float
    ) -> None:
        config = model.config
        loaded = library()
        assert loaded is not None
        self.cost, self.late_cost = cost, late_cost
        self.told = Told(config.layers, config.hidden_size, pools)
        has_axes = config.rope.sections is not None
        self.max_positions = pools.slot_table.shape[1] if has_axes else config.max_positions
        self.token_bytes = head_entry_bytes(config, pools.dtype)
        self.threads = torch.get_num_threads()
        self._library = loaded
        self._targets = model.targets
        self._rope = model.rope
        self._vocab_size = config.vocab_size
        self._native, self._weights = native, Weights(takes=True)  # both are pointed to
        self._head = self._laid_out(model)
        self._slot_table = pools.slot_table
        self._slots = pools.slot_table.numpy()
        self._pool = pools.zeros(pools.num_slots, 2, config.num_kv_heads, config.head_dim)
        self._ahead = torch.zeros(pools.slot_table.shape[0], padded(config.hidden_size))
        self._table = table = (model.embedding or target.embedding).table
        self._table_at, self._table_bytes = table.data_ptr(), table.stride(0) * table.itemsize
        self._num_reserved = 0
        rows = pools.slot_table.shape[0]
        # What a call is told and says, in memory of its own, since numpy takes its time to say where an array lies.
        self._rows = np.zeros((rows, 5), np.int32)  # `Row` of step.cpp
        self._ends = np.zeros(rows, np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._allowed = np.zeros(rows, np.uint64)
        self._draft = _Draft(
            rows=self._rows.ctypes.data,
            ends=self._ends.ctypes.data,
            table=table.data_ptr(),
            features=self.told.features.data_ptr(),
            ahead=self._ahead.data_ptr(),
            slot_table=self._slot_table.data_ptr(),
            kv_pool=self._pool.data_ptr(),
            num_slots=pools.num_slots,
            table_width=pools.slot_table.shape[1],
            table_stride=table.stride(0),
        )
        self._lengths_at, self._allowed_at = self._lengths.ctypes.data, self._allowed.ctypes.data
        self._pointers = ctypes.byref(self._head), ctypes.byref(self._draft)
        self._guesses = torch.empty(0, dtype=torch.int32)
        self._logits = torch.empty((rows, self._head.head.outputs))
        self._reserve(64, 15 * rows)

    def _laid_out(self, model: Eagle3) -> _Head:
        config, weights = model.config, self._weights
        queries, keys_values = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
        parts = weights.products(model.qkv, queries, keys_values)
        return _Head(
            token_norm=weights.vector(model.token_norm.weight),
            feature_norm=weights.vector(model.feature_norm.weight),
            mlp_norm=weights.vector(model.mlp_norm.weight),
            norm=weights.vector(model.norm.weight),
            fc=weights.product(model.fc),
            queries=parts[0],
            keys_values=parts[1],
            out=weights.product(model.out),
            gate_up=weights.gated(model.mlp.gate_up),
            down=weights.product(model.mlp.down),
            head=self._native.model.head if model.head is None else weights.product(model.head),
            targets=None if model.targets is None else weights.keep(model.targets.int()),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_features=len(config.layers),
            norm_before_residual=config.norm_before_residual,
            eps=config.rms_norm_eps,
        )

    def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        """See `Drafter.forward`."""
        draft = self._draft
        num_ends = self._lay_out(rows, 0)
        logits = torch.empty((num_ends, self._head.head.outputs))
        draft.logits, draft.lengths, draft.is_guessed = logits.data_ptr(), None, guessed
        self._library.beholder_draft(*self._pointers, self.threads)
        if self._targets is None:
            return logits
        return logits.new_full((num_ends, self._vocab_size), -torch.inf).index_copy_(1, self._targets, logits)

    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], allowed: Sequence[NDArray[np.int32] | None]
    ) -> list[list[int]]:
        """See `ChainDrafter.guess`."""
        draft, most = self._draft, max(lengths)
        num_ends = self._lay_out(rows, most - 1)
        assert num_ends == len(lengths)
        self._lengths[:num_ends] = lengths
        draft.allowed = None
        if any(words is not None for words in allowed):
            self._allowed[:num_ends] = [0 if words is None else words.ctypes.data for words in allowed]
            draft.allowed = self._allowed_at
        draft.logits = self._logits.data_ptr()
        draft.lengths, draft.is_guessed = self._lengths_at, False
        self._library.beholder_draft(*self._pointers, self.threads)
        guesses: list[int] = self._guesses[: num_ends * most].tolist()
        return [guesses[most * index : most * index + length] for index, length in enumerate(lengths)]

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        warm_up(self)

    def _lay_out(self, rows: Sequence[DraftRow], num_further: int) -> int:
        """Say what is to be computed, and that each row guesses so many tokens beyond one at most.

        Returns:
            How many rows ask.
        """
        base, stride = self._table_at, self._table_bytes
        addresses: list[int] = []
        table, ends = [], []
        for index, row in enumerate(rows):
            first = len(addresses)
            table.append((row.table_row, row.start - _LAG, first, len(row.token_ids), 0))
            addresses.extend([base + token_id * stride for token_id in row.token_ids])
            if row.vision is not None:  # as the target had them
                seen = self.told.seen
                places = np.flatnonzero(row.vision)
                slots = self._slots[row.table_row, row.start + places].tolist()
                for place, slot in zip(places.tolist(), slots, strict=True):
                    addresses[first + place] = seen.data_ptr() + slot * seen.stride(0) * seen.itemsize
            if row.asks:
                ends.append(index)
        num_pairs, num_ends = len(addresses), len(ends)
        if num_pairs > self._num_reserved or num_ends * (num_further + 1) > len(self._guesses):
            self._reserve(num_pairs, num_ends * (num_further + 1))
        self._rows[: len(rows)] = table
        self._ends[:num_ends] = ends
        self._embeddings[:num_pairs] = addresses
        draft = self._draft
        draft.num_rows, draft.num_pairs, draft.num_ends = len(rows), num_pairs, num_ends
        rope = self._rope
        draft.in_order = isinstance(rope, MRope)
        self._rotation = rope.table if not isinstance(rope, MRope) else self._rotations(rope, rows, ends, num_further)
        draft.rotation = self._rotation.data_ptr()
        return num_ends

    def _rotations(self, rope: MRope, rows: Sequence[DraftRow], ends: Sequence[int], num_further: int) -> torch.Tensor:
        """bfloat16 (any, 2, head_dim), in the order of `Draft` in head.h."""
        parts = []
        for row in rows:
            first = row.start - _LAG + row.position_delta
            plain = np.arange(first, first + len(row.token_ids))
            parts.append(np.broadcast_to(plain, (3, len(plain))) if row.positions is None else row.positions)
        last = [rows[end].start - _LAG + len(rows[end].token_ids) - 1 + rows[end].position_delta for end in ends]
        further = np.add.outer(np.arange(1, num_further + 1), np.array(last, np.int64)).reshape(-1)
        parts.append(np.broadcast_to(further, (3, len(further))))
        positions = torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.int64))
        return torch.cat(rope.at(positions), dim=1)

    def _reserve(self, num_pairs: int, num_guesses: int) -> None:
        """Have room for so many pairs and guesses."""
        self._num_reserved = max(num_pairs, self._num_reserved)
        size = self._library.beholder_draft_workspace(self._pointers[0], self._num_reserved)
        self._workspace = torch.empty(size + 64, dtype=torch.uint8)
        self._embeddings = np.empty(self._num_reserved, np.int64)
        self._guesses = torch.empty(max(num_guesses, len(self._guesses)), dtype=torch.int32)
        self._draft.workspace = -(-self._workspace.data_ptr() // 64) * 64  # from a multiple of 64 bytes on
        self._draft.embeddings = self._embeddings.ctypes.data
        self._draft.guesses = self._guesses.data_ptr()
