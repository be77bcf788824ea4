"""Runs the model on one device with torch: lays a step's rows out as tensors, forwards, samples.

The scheduler decides what runs and owns the slots; this file owns the weights, the KV pool and the slot table's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchAttention
from engine.batch import PictureEncoding, Row, RowSampling, SampledToken, VisionRows
from engine.models.decoder import Decoder, DeepStack
from engine.sampling import sample
from engine.speculation.drafter import Drafter
from engine.speculation.torch_drafters import Pools, Told
from engine.speculation.tree import offsets
from engine.start_times import Lap, no_lap
from preprocess.blocks.norm import Pair
from preprocess.vision.slices import EncoderState, SlicedEncoder, SlicedEncoding, num_slices
from preprocess.wire import SamplingParams

DUMMY_SLOT: Final = 0
MAX_DRAFTS: Final = 15
MAX_FIRST_DRAFTS: Final = 63
"""Beside a prompt a step has many tokens already: so many more change little of what it needs."""


class VisionEncoder(SlicedEncoder, Protocol):
    """A vision encoder.

    Attributes:
        image_size: Side of a picture that it takes, in pixels.
        progress: Called at every layer.
        num_taps: Features of inner layers behind each vision token's own, for the model's first layers (DeepStack).
    """

    image_size: int
    progress: Callable[[], None]
    num_taps: int

    def __call__(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """uint8 (tiles or frames, height, width, 3) → vision tokens (num_tokens, hidden * (1 + num_taps)) of each."""
        ...

    def run(self, state: EncoderState, num_layers: int, out: Pair | None = None) -> bool:
        """See `SlicedEncoder.run`. With `out` what comes out and the norm of it that comes next are written there, and
        what they were made of is not changed: so the same layers may run again.
        """
        ...


class TorchRunner:
    """See `engine.batch.Runner`.

    Args:
        model: The language model.
        encoder: The vision encoder.
        num_slots: Slots of the KV pool, the dummy included.
        max_positions: Longest sequence in tokens.
        max_rows: Most sequences that hold slots at once.
        dtype: Type of weights and KV.
        device: Where all of it lives.
        padding_rows: Rows of the slot table behind `max_rows`, at the dummy slot until a subclass writes there.

    Attributes:
        kernel: What computes a step of a CPU, and why where it is not the quickest; for the table at start.
    """

    def __init__(
        self,
        model: Decoder,
        encoder: VisionEncoder,
        *,
        num_slots: int,
        max_positions: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        padding_rows: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        self.encoder = encoder
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.max_rows = max_rows
        self.max_drafts = MAX_DRAFTS
        self.max_first_drafts = MAX_FIRST_DRAFTS
        self.drafter: Drafter | None = None
        self._told: Told | None = None
        self.drafts_beside_prompts = True
        self.vocab_size = config.vocab_size
        self.dtype = dtype
        self.device = device
        self.kernel = "torch"
        self.embedding_bytes = config.hidden_size * (1 + encoder.num_taps) * dtype.itemsize
        self.picture_side = encoder.image_size
        assert DUMMY_SLOT == 0
        self.padded_table = _zeros((max_rows + padding_rows, max_positions), dtype=torch.int32, device=device)
        self.slot_table = self.padded_table[:max_rows]
        # Zeros, not garbage: masked values are multiplied by 0, which does not help against what is no number.
        self.kv_pool = _zeros(
            (config.num_layers, num_slots, 2, config.num_kv_heads, config.head_dim), dtype=dtype, device=device
        )
        self.attention = TorchAttention(self.kv_pool, self.slot_table)

    def pools(self) -> Pools:
        """The slots, for a drafter that shares them."""
        return Pools(self.padded_table, self.num_slots, self.dtype)

    def guess_with(self, drafter: Drafter) -> None:
        """Let a draft model or head guess, that shares this runner's slots. Call before the first step."""
        self.drafter = drafter
        self._told = drafter.told

    @torch.inference_mode()
    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Runner.encode`."""
        if not pixels:
            return []
        encoded = self.encoder([picture.to(self.device) for picture in pixels])
        return [embeddings.to(self.dtype) for embeddings in encoded]

    def num_slices(self, shape: Sequence[int]) -> int:
        """See `Runner.num_slices`."""
        return num_slices(self.encoder, shape)

    def begin(self, pixels: torch.Tensor) -> PictureEncoding:
        """See `Runner.begin`."""
        return SlicedEncoding(self.encoder, pixels.to(self.device), self.dtype)

    def added_s(self, rows: int, tokens: int) -> float | None:
        """See `Runner.added_s`: nothing is filled up."""
        return None

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """See `Runner.step`."""
        sampled = [sampling for row in rows if row.sampling is not None for sampling in (row.sampling, *row.drafted)]
        logits = self.logits(rows)
        return sample(logits, sampled) if sampled else []

    def facts(self) -> dict[str, object]:
        """See `Runner.facts`."""
        return {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "kernel": self.kernel,
            "kv_bytes": self.kv_pool.nbytes + self.num_slots * (self.drafter.token_bytes if self.drafter else 0),
            "model_context": self.model.config.max_positions,
        }

    def device_bytes(self) -> int:
        """See `Runner.device_bytes`."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def report_to(self, progress: Callable[[], None]) -> None:
        """See `Runner.report_to`."""
        self.encoder.progress = self.model.progress = progress

    def idle(self) -> bool:
        """See `Runner.idle`."""
        return False

    def warm_up(self, lap: Lap = no_lap) -> None:
        """See `Runner.warm_up`. Rows of the fresh slot table point at the dummy slot."""
        side = self.encoder.image_size
        embeddings = self.encode([torch.zeros((1, side, side, 3), dtype=torch.uint8)])[0]
        length = min(len(embeddings) + 32, self.max_positions - 1)
        sampling = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
        picture = VisionRows(0, 0, min(len(embeddings), length), embeddings)
        self.step([Row(0, 0, [0] * length, sampling, [picture])])
        for rows in {1, min(8, self.max_rows)}:
            self.step([Row(row, length, [0], sampling) for row in range(rows)])
        if self.drafter is not None:
            self.drafter.warm_up()
        lap("first steps")

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Runs the forward of a step: float32 logits (tokens to sample, vocab), in the order of `rows`."""
        # Rows of one token come first, longest first, as attention wants them; results go back to the order asked for.
        order = sorted(range(len(rows)), key=lambda index: _layout_key(rows[index]))
        laid_out = [rows[index] for index in order]
        segments = [Segment(row.table_row, row.start, len(row.token_ids), row.parents) for row in laid_out]

        token_ids: list[int] = []
        positions: list[int] = []
        last_token = [0] * len(rows)  # of each row, in the order asked for
        pictures: list[tuple[int, torch.Tensor]] = []  # (first token, embeddings)
        for index, row in zip(order, laid_out, strict=True):
            first = len(token_ids)
            token_ids.extend(row.token_ids)
            positions.extend(range(row.start, row.start + len(row.token_ids)))
            last_token[index] = len(token_ids) - 1
            for part in row.vision:
                at = first + part.start
                token_ids[at : at + part.count] = [0] * part.count  # may be ids above the vocabulary
                pictures.append((at, part.embeddings[part.first : part.first + part.count]))

        hidden = self.model.embed(torch.tensor(token_ids, device=self.device))  # (tokens, hidden)
        width = hidden.shape[1]
        seen = [(at, embeddings.view(len(embeddings), -1)[:, :width]) for at, embeddings in pictures]
        for at, embeddings in seen:
            hidden[at : at + len(embeddings)] = embeddings
        at_positions = torch.tensor(positions, device=self.device)
        plan = self.attention.plan(segments, at_positions)
        rotary = self._rotary(laid_out, at_positions)
        features = None if self._told is None else dict.fromkeys(self._told.layers, hidden)
        hidden = self.model.forward(hidden, rotary, plan, self._deepstack(pictures), features)
        if self._told is not None and features is not None:
            self._told.remember(plan.write_slots, features, seen)
        ends = [
            token
            for index, row in enumerate(rows)
            if row.sampling is not None
            for token in range(last_token[index] - len(row.drafted), last_token[index] + 1)
        ]
        if not ends:
            return torch.empty((0, self.vocab_size), device=self.device)
        if ends != list(range(len(hidden))):
            hidden = hidden[torch.tensor(ends, dtype=torch.long, device=self.device)]
        return self.model.logits(hidden)

    def _rotary(self, rows: Sequence[Row], positions: torch.Tensor) -> torch.Tensor:
        """int64 (3, tokens), or (tokens,) where all axes are equal: rotary positions of tokens whose slots are at
        `positions` of the table.
        """
        if any(row.parents is not None for row in rows):
            in_text = np.concatenate([text_positions(row) for row in rows])
            positions = torch.from_numpy(in_text).to(self.device)
        if self.model.config.rope.sections is None:
            return positions
        if all(row.positions is None for row in rows):
            if not any(row.position_delta for row in rows):
                return positions
            deltas = np.repeat([row.position_delta for row in rows], [len(row.token_ids) for row in rows])
            return positions + torch.from_numpy(deltas).to(self.device)
        parts = []
        for row in rows:
            own = row.positions
            if own is None:
                own = np.broadcast_to(text_positions(row) + row.position_delta, (3, len(row.token_ids)))
            parts.append(own)
        return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.int64)).to(self.device)

    def _deepstack(self, pictures: Sequence[tuple[int, torch.Tensor]]) -> DeepStack | None:
        """What the model's first layers add at vision tokens, given as (first token, embeddings)."""
        if not pictures or not self.encoder.num_taps:
            return None
        tokens = torch.cat([torch.arange(at, at + len(part), device=self.device) for at, part in pictures])
        width = self.model.config.hidden_size
        taps = torch.cat([part.view(len(part), -1, width)[:, 1:] for _, part in pictures])  # (n, taps, hidden)
        return DeepStack(tokens, taps.transpose(0, 1))


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, but pages of a CPU take memory only once they are written: numpy leaves zeroing to the kernel."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def text_positions(row: Row) -> NDArray[np.int64]:
    """Where in the text each of a row's tokens stands, (tokens,): drafts of a tree stand beside each other."""
    if row.parents is None:
        return np.arange(row.start, row.start + len(row.token_ids))
    return row.start + np.array(offsets(row.parents, len(row.token_ids)))


def _layout_key(row: Row) -> tuple[int, int]:
    return (len(row.token_ids), -row.start)
