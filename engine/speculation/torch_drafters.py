"""Draft models and heads on one device with torch. See `engine.speculation.drafter`; `load_drafter` makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchAttention, TorchPlan
from engine.models.decoder import Decoder, DecoderConfig
from engine.models.eagle3 import Eagle3, Eagle3Config
from engine.speculation.drafter import MOST_LATE, Drafter, DraftRow
from engine.speculation.drafting import Kind

if TYPE_CHECKING:
    from engine.gpu.graph import GraphMemory
    from preprocess.blocks.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Pools:
    """The target's slots, and where they are.

    Attributes:
        slot_table: (rows, positions) int32 on the device.
        num_slots: With the dummy.
        dtype: Of weights and entries.
        graphs: What the target's graphs keep their tensors in, where its steps are graphs: the table then has one row
            more, of dummies.
    """

    slot_table: torch.Tensor
    num_slots: int
    dtype: torch.dtype
    graphs: GraphMemory | None = None

    def zeros(self, *shape: int) -> torch.Tensor:
        """Of this shape. Pages of a CPU take memory only once they are written."""
        device = self.slot_table.device
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        return torch.from_numpy(np.zeros(math.prod(shape) * self.dtype.itemsize, np.uint8)).view(self.dtype).view(shape)


class Told:
    """What some of the target's layers make of tokens, and the embeddings of its vision tokens, by slot: a head makes
    its entries of that, later, when somebody drafts.

    Args:
        layers: After so many layers each.
        hidden_size: The target's.
        pools: Its slots.

    Attributes:
        features: (num_slots, layers * hidden).
        seen: (num_slots, hidden).
    """

    def __init__(self, layers: Sequence[int], hidden_size: int, pools: Pools) -> None:
        self.layers = tuple(layers)
        self.features = pools.zeros(pools.num_slots, len(layers) * hidden_size)
        self.seen = pools.zeros(pools.num_slots, hidden_size)

    def remember(
        self, slots: torch.Tensor, features: dict[int, torch.Tensor], vision: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """A step of the target: the slots of its tokens, its hidden states after `layers`, and the embeddings of its
        vision tokens as (first token, (count, hidden)).
        """
        self.features.index_copy_(0, slots, torch.cat([features[index] for index in self.layers], dim=1))
        for at, embeddings in vision:
            self.see(slots[at : at + len(embeddings)], embeddings)

    def wants(self, num_layers: int) -> bool:
        """Whether hidden states after so many layers are to be written down."""
        return num_layers in self.layers

    def write(self, num_layers: int, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Hidden states (tokens, hidden) after so many layers, of tokens at these slots, int64."""
        by_layer = self.features.view(len(self.features), len(self.layers), -1)
        for place, wanted in enumerate(self.layers):
            if wanted == num_layers:
                by_layer[:, place].index_copy_(0, slots, hidden)

    def see(self, slots: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Embeddings (tokens, hidden) of vision tokens at these slots, int64."""
        self.seen.index_copy_(0, slots, embeddings)


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens of a call, laid out as attention wants them.

    Attributes:
        token_ids: As the rows say.
        table_rows: (tokens,) int64, of each token.
        places: (tokens,) int64, positions of the tokens.
        rotary: (tokens,) or (3, tokens).
        plan: None where no row asks, and entries need no attention.
        ends: (rows that ask,) int64: the last token of each, in the order asked for.
    """

    token_ids: list[int]
    table_rows: torch.Tensor
    places: torch.Tensor
    rotary: torch.Tensor
    plan: TorchPlan | None
    ends: torch.Tensor
    vision: torch.Tensor | None


class _Layout:
    """Lays out calls of one drafter whose positions below `lag` have no entries: its sequences begin there."""

    def __init__(self, pool: torch.Tensor, slot_table: torch.Tensor, rope: RopeConfig, lag: int) -> None:
        self._attention = TorchAttention(pool, slot_table[:, lag:])
        self._device = slot_table.device
        self._has_axes = rope.sections is not None
        self._lag = lag

    def step(self, rows: Sequence[DraftRow], *, is_planned: bool = True) -> _Step:
        order = sorted(range(len(rows)), key=lambda index: (len(rows[index].token_ids), -rows[index].start))
        laid_out = [rows[index] for index in order]
        segments = [Segment(row.table_row, row.start - self._lag, len(row.token_ids)) for row in laid_out]
        token_ids: list[int] = []
        last = [0] * len(rows)
        for index, row in zip(order, laid_out, strict=True):
            token_ids.extend(row.token_ids)
            last[index] = len(token_ids) - 1
        lengths = [len(row.token_ids) for row in laid_out]
        starts = np.repeat([row.start for row in laid_out], lengths)
        firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = self._send(starts + np.arange(len(token_ids)) - firsts)
        vision = None
        if any(row.vision is not None for row in rows):
            vision = self._send(np.concatenate([_mask(row) for row in laid_out]))
        return _Step(
            token_ids,
            self._send(np.repeat([row.table_row for row in laid_out], lengths)),
            places,
            self._rotary(laid_out, places - self._lag),
            self._attention.plan(segments, places - self._lag) if is_planned else None,
            torch.tensor(
                [end for row, end in zip(rows, last, strict=True) if row.asks], dtype=torch.long, device=self._device
            ),
            vision,
        )

    def _rotary(self, rows: Sequence[DraftRow], positions: torch.Tensor) -> torch.Tensor:
        if not self._has_axes:
            return positions
        if all(row.positions is None for row in rows):
            deltas = np.repeat([row.position_delta for row in rows], [len(row.token_ids) for row in rows])
            return positions + self._send(deltas)
        parts = []
        for row in rows:
            own = row.positions
            if own is None:
                first = row.start - self._lag + row.position_delta
                own = np.broadcast_to(
                    np.arange(first, first + len(row.token_ids), dtype=np.int32), (3, len(row.token_ids))
                )
            parts.append(own)
        return self._send(np.concatenate(parts, axis=1, dtype=np.int64))

    def _send(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _mask(row: DraftRow) -> NDArray[np.bool_]:
    return np.zeros(len(row.token_ids), np.bool_) if row.vision is None else row.vision


class DraftModel:
    """A smaller language model of the same vocabulary. Where the target sees a picture it sees placeholders.

    Args:
        model: Its weights.
        pools: The target's slots.
        vocab_size: The target's. The draft model's may be padded to another size.
        cost: See `Drafter.cost`; `late_cost` is the same.

    Attributes:
        pool: (layers, slots, 2, kv_heads, head_dim): its entries.
    """

    kind = Kind.DRAFT_MODEL
    lag = 0
    keeps_guesses = True
    most_late = MOST_LATE
    told: Told | None = None

    def __init__(self, model: Decoder, pools: Pools, *, vocab_size: int, cost: float) -> None:
        config = model.config
        self.model = model
        self.cost = self.late_cost = cost
        has_axes = config.rope.sections is not None  # then positions are angles, which no table bounds
        self.max_positions = pools.slot_table.shape[1] if has_axes else config.max_positions
        self.token_bytes = entry_bytes(config, pools.dtype)
        self.pool = pools.zeros(config.num_layers, pools.num_slots, 2, config.num_kv_heads, config.head_dim)
        self._layout = _Layout(self.pool, pools.slot_table, config.rope, self.lag)
        self._vocab_size = vocab_size
        self._device = pools.slot_table.device

    @torch.inference_mode()
    def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        """See `Drafter.forward`."""
        step = self._layout.step(rows)
        assert step.plan is not None
        known = self.model.config.vocab_size
        token_ids = [token_id if token_id < known else 0 for token_id in step.token_ids]  # padding, never said
        embedded = self.model.embed(torch.tensor(token_ids, device=self._device))
        hidden = self.model.forward(embedded, step.rotary, step.plan)
        if not any(row.asks for row in rows):
            finish(self._device)
        return widened(self.model.logits(hidden.index_select(0, step.ends)), self._vocab_size)

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        warm_up(self)


class Head:
    """A head in the layout of EAGLE-3, which reads what some of the target's layers make of a token.

    Args:
        model: Its weights.
        target: The model that it was trained for: embeds tokens, and gives logits where the head has none of its own.
        pools: The target's slots.
        cost: See `Drafter.cost`; `late_cost` is the same.

    Attributes:
        pool: (1, slots, 2, kv_heads, head_dim): its entries.
    """

    kind = Kind.HEAD
    lag = 1
    keeps_guesses = False
    most_late = MOST_LATE

    def __init__(self, model: Eagle3, target: Decoder, pools: Pools, *, cost: float) -> None:
        config = model.config
        self.model = model
        self.cost = self.late_cost = cost
        self.told = Told(config.layers, config.hidden_size, pools)
        has_axes = config.rope.sections is not None
        self.max_positions = pools.slot_table.shape[1] if has_axes else config.max_positions
        self.token_bytes = head_entry_bytes(config, pools.dtype)
        self._target = target
        self._slot_table = pools.slot_table
        self._device = pools.slot_table.device
        # Its own guess of what the target makes of each row's last token.
        self._ahead = pools.zeros(pools.slot_table.shape[0], config.hidden_size)
        self.pool = pools.zeros(1, pools.num_slots, 2, config.num_kv_heads, config.head_dim)
        self._layout = _Layout(self.pool, pools.slot_table, config.rope, self.lag)

    @torch.inference_mode()
    def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        """See `Drafter.forward`."""
        step = self._layout.step(rows, is_planned=any(row.asks for row in rows))
        embedded = self._embed(step)
        if guessed:
            features = self._ahead.index_select(0, step.table_rows)
        else:
            before = self._slot_table[step.table_rows, step.places - 1].long()
            features = self.model.fuse(self.told.features.index_select(0, before))
        if step.plan is None:
            slots = self._slot_table[step.table_rows, step.places].long()
            self.pool[0].index_copy_(0, slots, self.model.entries(embedded, features, step.rotary))
            finish(self._device)
            return torch.empty((0, self.model.config.vocab_size), device=self._device)
        hidden = self.model.forward(embedded, features, step.rotary, step.plan).index_select(0, step.ends)
        self._ahead.index_copy_(0, step.table_rows.index_select(0, step.ends), hidden)
        return self.model.logits(hidden, self._target)

    def warm_up(self) -> None:
        """See `Drafter.warm_up`."""
        warm_up(self)

    def _embed(self, step: _Step) -> torch.Tensor:
        """(tokens, hidden): of text by id, of vision tokens as the target had it, for every row of the call."""
        embedding = self.model.embedding or self._target.embedding
        if step.vision is None:
            return embedding(torch.tensor(step.token_ids, device=self._device))
        ids = torch.tensor(step.token_ids, device=self._device).masked_fill(step.vision, 0)  # may be beyond the table
        slots = self._slot_table[step.table_rows, step.places].long()
        return torch.where(step.vision.unsqueeze(1), self.told.seen.index_select(0, slots), embedding(ids))


def finish(device: torch.device) -> None:
    """Wait until all that was sent to a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def entry_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in a draft model."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def head_entry_bytes(config: Eagle3Config, dtype: torch.dtype) -> int:
    """Keys, values and what the target said of one token, in a head."""
    values = 2 * config.num_kv_heads * config.head_dim + (len(config.layers) + 1) * config.hidden_size
    return values * dtype.itemsize


def widened(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits (rows, any number of ids) as (rows, vocab_size)."""
    if logits.shape[1] >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)


def warm_up(drafter: Drafter) -> None:
    """A prompt that it only catches up with, since the first time would else be measured with what it makes ready; one
    that it guesses behind; and a guess. Rows of the fresh slot table point at the dummy slot.
    """
    length = min(32, drafter.max_positions - drafter.lag - 1)
    if length > 0:
        drafter.forward([DraftRow(0, drafter.lag, [0] * length, asks=False)], guessed=False)
        drafter.forward([DraftRow(0, drafter.lag, [0] * length)], guessed=False)
        drafter.forward([DraftRow(0, drafter.lag + length, [0])], guessed=True)
