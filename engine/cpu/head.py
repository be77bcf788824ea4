"""A head in the layout of EAGLE-3 beside native steps: what it guesses is one call of `head.h`, whatever rows it has.

`CpuRunner` has the library write down what its layers make of each token; `engine.speculation.torch_drafters` holds the
same head for steps that torch computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
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
    """See `engine.speculation.drafter.Drafter`.

    Args:
        model: Its weights, which are taken out of it.
        target: The model that it was trained for: embeds tokens.
        native: The same in the library's layout: gives logits where the head has none of its own.
        pools: The target's slots.
        cost: See `Drafter.cost`.
    """

    kind = Kind.HEAD
    lag = _LAG
    keeps_guesses = False

    def __init__(self, model: Eagle3, target: Decoder, native: NativeModel, pools: Pools, *, cost: float) -> None:
        config = model.config
        loaded = library()
        assert loaded is not None
        self.cost = cost
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
        self._embedding = (model.embedding or target.embedding).table
        table = self._embedding
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._draft = _Draft(
            table=table.data_ptr(),
            features=self.told.features.data_ptr(),
            ahead=self._ahead.data_ptr(),
            slot_table=self._slot_table.data_ptr(),
            kv_pool=self._pool.data_ptr(),
            num_slots=pools.num_slots,
            table_width=pools.slot_table.shape[1],
            table_stride=table.stride(0),
        )

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
        logits, _ = self._run(rows, None, guessed)
        if self._targets is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(1, self._targets, logits)

    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], allowed: Sequence[NDArray[np.int32] | None]
    ) -> list[list[int]]:
        """See `Drafter.guess`."""
        masks = None
        if any(words is not None for words in allowed):
            masks = np.array([0 if words is None else words.ctypes.data for words in allowed], np.uint64)
        self._draft.allowed = None if masks is None else masks.ctypes.data
        _, guesses = self._run(rows, np.array(lengths, np.int32), False)
        return [guesses[index, :length].tolist() for index, length in enumerate(lengths)]

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        warm_up(self)

    def _run(
        self, rows: Sequence[DraftRow], lengths: NDArray[np.int32] | None, is_guessed: bool
    ) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """Logits of the head's own ids after the ends of rows that ask, or guesses (ends, most of `lengths`)."""
        table = np.empty((len(rows), 4), np.int32)  # `Row` of step.cpp
        num_pairs = 0
        for index, row in enumerate(rows):
            table[index] = row.table_row, row.start - _LAG, num_pairs, len(row.token_ids)
            num_pairs += len(row.token_ids)
        ends = np.array([index for index, row in enumerate(rows) if row.asks], np.int32)
        num_further = 0 if lengths is None else int(lengths.max(initial=1)) - 1
        embeddings = self._embeddings(rows, table, num_pairs)
        rotation = self._rotations(rows, ends, num_further)
        logits = torch.empty((len(ends), self._head.head.outputs))
        guesses = np.empty((len(ends), num_further + 1), np.int32)

        draft, head = self._draft, ctypes.byref(self._head)
        draft.rows, draft.num_rows = table.ctypes.data, len(rows)
        draft.ends, draft.num_ends = ends.ctypes.data, len(ends)
        draft.lengths = None if lengths is None else lengths.ctypes.data
        draft.embeddings, draft.num_pairs = embeddings.ctypes.data, num_pairs
        draft.rotation, draft.in_order = rotation.data_ptr(), rotation is not self._rope.table
        draft.logits, draft.guesses, draft.is_guessed = logits.data_ptr(), guesses.ctypes.data, is_guessed
        self._reserve(num_pairs)
        self._library.beholder_draft(head, ctypes.byref(draft), self.threads)
        return logits, guesses

    def _embeddings(
        self, rows: Sequence[DraftRow], table: NDArray[np.int32], num_pairs: int
    ) -> NDArray[np.uint64]:
        """Of each token the address of its embedding: of text by id, of vision tokens as the target had it."""
        stride = self._embedding.stride(0) * self._embedding.itemsize
        ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_pairs)
        addresses = self._embedding.data_ptr() + ids * stride
        seen = self.told.seen
        for row, first in zip(rows, table[:, 2].tolist(), strict=True):
            if row.vision is not None:
                places = np.flatnonzero(row.vision)
                slots = self._slots[row.table_row, row.start + places].astype(np.int64)
                addresses[first + places] = seen.data_ptr() + slots * seen.stride(0) * seen.itemsize
        return addresses.view(np.uint64)

    def _rotations(self, rows: Sequence[DraftRow], ends: NDArray[np.int32], num_further: int) -> torch.Tensor:
        """bfloat16 (any, 2, head_dim) of `Rope`: by position, or in the order of `Draft` in head.h."""
        if not isinstance(self._rope, MRope):
            return self._rope.table
        parts = []
        for row in rows:
            first = row.start - _LAG + row.position_delta
            plain = np.arange(first, first + len(row.token_ids))
            parts.append(np.broadcast_to(plain, (3, len(plain))) if row.positions is None else row.positions)
        last = [rows[end].start - _LAG + len(rows[end].token_ids) - 1 + rows[end].position_delta for end in ends]
        further = np.add.outer(np.arange(1, num_further + 1), np.array(last, np.int64)).reshape(-1)
        parts.append(np.broadcast_to(further, (3, len(further))))
        positions = torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.int64))
        return torch.cat(self._rope.at(positions), dim=1)

    def _reserve(self, num_pairs: int) -> None:
        """Have a workspace for so many pairs, which begins at a multiple of 64 bytes."""
        size = self._library.beholder_draft_workspace(ctypes.byref(self._head), num_pairs)
        if size + 64 > len(self._workspace):
            self._workspace = torch.empty(size + 64, dtype=torch.uint8)
            self._draft.workspace = -(-self._workspace.data_ptr() // 64) * 64
