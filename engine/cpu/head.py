"""A head in the layout of EAGLE-3 beside native steps: what it guesses is one call of `head.h`, whatever rows it has.

`CpuRunner` has the library write down what its layers make of each token; `engine.speculation.torch_drafters` holds the
same head for steps that torch computes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from engine.batch import RowSampling
from engine.cpu.native import Matrix, NativeModel, Weights, address, library, padded
from engine.models.decoder import Decoder
from engine.models.eagle3 import Eagle3
from engine.sampling import COLDEST, is_changed
from engine.speculation.drafter import MOST_LATE, DraftRow
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

    Attributes:
        pool: (num_slots, 2, kv_heads, head_dim), entries.
    """

    kind = Kind.HEAD
    lag = _LAG
    keeps_guesses = False
    most_late = MOST_LATE

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
        self.pool = pools.zeros(pools.num_slots, 2, config.num_kv_heads, config.head_dim)
        self._ahead = torch.zeros(pools.slot_table.shape[0], padded(config.hidden_size))
        self._table = table = (model.embedding or target.embedding).table
        self._table_at, self._table_bytes = table.data_ptr(), table.stride(0) * table.itemsize
        self._num_reserved = 0
        self._draft = _Draft(
            table=table.data_ptr(),
            features=self.told.features.data_ptr(),
            ahead=self._ahead.data_ptr(),
            slot_table=self._slot_table.data_ptr(),
            kv_pool=self.pool.data_ptr(),
            num_slots=pools.num_slots,
            table_width=pools.slot_table.shape[1],
            table_stride=table.stride(0),
        )
        self._pointers = ctypes.addressof(self._head), ctypes.addressof(self._draft)
        self._logits = torch.empty((pools.slot_table.shape[0], self._head.head.outputs))
        self._logits_at = self._logits.data_ptr()
        if not isinstance(self._rope, MRope):
            self._draft.rotation = self._rope.table.data_ptr()

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

    def draws(self, how: RowSampling) -> bool:
        """See `ChainDrafter.draws`: the likeliest token, of those that a grammar allows."""
        return how.params.temperature < COLDEST and not is_changed(how)

    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[list[int]]:
        """See `ChainDrafter.guess`."""
        allowed = [None if how.allowed is None else how.allowed.words() for how in sampling]
        draft, most = self._draft, max(lengths)
        num_ends = self._lay_out(rows, most - 1)
        asked = array("i", lengths)
        masks = None
        if any(words is not None for words in allowed):
            masks = array("Q", [0 if words is None else words.ctypes.data for words in allowed])
        guesses = array("i", bytes(4 * most * num_ends))
        draft.lengths, draft.guesses = address(asked), address(guesses)
        draft.allowed = None if masks is None else address(masks)
        draft.logits, draft.is_guessed = self._logits_at, False
        self._library.beholder_draft(*self._pointers, self.threads)
        return [guesses[most * index : most * index + length].tolist() for index, length in enumerate(lengths)]

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        warm_up(self)

    def _lay_out(self, rows: Sequence[DraftRow], num_further: int) -> int:
        """Say what is to be computed, and that each row guesses so many tokens beyond one at most.

        Returns:
            How many rows ask.
        """
        base, stride = self._table_at, self._table_bytes
        addresses = array("Q")
        table, ends = array("i"), array("i")  # `Row` of layout.h
        for index, row in enumerate(rows):
            first = len(addresses)
            table.extend((row.table_row, row.start - _LAG, first, len(row.token_ids), 0))
            addresses.extend([base + token_id * stride for token_id in row.token_ids])
            if row.vision is not None:  # as the target had them
                seen = self.told.seen
                seen_at, size = seen.data_ptr(), seen.stride(0) * seen.itemsize
                places = np.flatnonzero(row.vision)
                slots = self._slots[row.table_row, row.start + places].tolist()
                for place, slot in zip(places.tolist(), slots, strict=True):
                    addresses[first + place] = seen_at + slot * size
            if row.asks:
                ends.append(index)
        draft = self._draft
        draft.rows, draft.num_rows = address(table), len(rows)
        draft.ends, draft.num_ends = address(ends), len(ends)
        draft.embeddings, draft.num_pairs = address(addresses), len(addresses)
        if isinstance(self._rope, MRope):
            self._rotation = self._rotations(self._rope, rows, ends, num_further)
            draft.rotation, draft.in_order = self._rotation.data_ptr(), True
        self._laid_out_in = table, ends, addresses  # as long as they are pointed to
        self._reserve(len(addresses))
        return len(ends)

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

    def _reserve(self, num_pairs: int) -> None:
        """Have a workspace for so many pairs, which begins at a multiple of 64 bytes."""
        if num_pairs <= self._num_reserved:
            return
        size = self._library.beholder_draft_workspace(self._pointers[0], num_pairs)
        self._workspace = torch.empty(size + 64, dtype=torch.uint8)
        self._draft.workspace = -(-self._workspace.data_ptr() // 64) * 64
        self._num_reserved = num_pairs
