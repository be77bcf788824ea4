"""What the scheduler hands to the runner each step, and what comes back. This is the one border between them.

A native decode step, CUDA graphs or another device live behind `Runner`; the scheduler knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from engine.start_times import Lap, no_lap

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from engine.speculation.drafter import Drafter
    from preprocess.wire import SamplingParams, TokenLogprobs


FUTURE_TOKEN: Final = -1
"""In a row of one token: the token that the batch in flight draws for the same table row."""


@dataclass(frozen=True, slots=True)
class VisionRows:
    """Vision embeddings in place of token embeddings: `count` of `embeddings` from `first`, at `start` of the row.

    `embeddings` is on the runner's device, owned by the vision cache: (num_tokens, hidden), or (num_tokens, hidden ×
    (1 + taps)) where the model adds features of inner encoder layers (DeepStack), those behind the main ones.
    """

    start: int
    first: int
    count: int
    embeddings: torch.Tensor


class TokenMask(Protocol):
    """Which ids a grammar lets come next in one row; it is being computed while the model runs."""

    def words(self) -> NDArray[np.int32]:
        """(words,): id 32 w + b is allowed when bit b of word w is set; ids beyond are not. Waits until it is known."""
        ...


class TokenMasks(Protocol):
    """The masks of a row's `sampling` and `drafted` together."""

    def words(self) -> NDArray[np.int32]:
        """(1 + drafts, words), side by side, as of each `TokenMask`. Waits until they are known."""
        ...


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Asks for a token after the row's last position.

    `output_index` is the index of the token to be sampled (0 for the first): with the seed it determines the noise.
    `prompt_ids` and `output_ids` are ids inside the vocabulary only, and are read only where a penalty is on.
    `banned_ids` may not be sampled now (stop ids while fewer than `min_tokens` are out). `allowed` holds for rows that
    follow a grammar: nothing else may be sampled.
    """

    params: SamplingParams
    output_index: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: Sequence[int] = ()
    allowed: TokenMask | None = None


class DraftedAlike(Sequence[RowSampling]):
    """How tokens after drafts are drawn that ask for nothing but what the row's `sampling` does, each behind the drafts
    that lead to it. To be read before more of the answer is known.
    """


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: `token_ids` are computed at positions `start`, `start + 1`, …

    `token_ids` are plain ids for text; positions covered by `vision` hold any id (the embedding replaces it).
    Keys and values of position p go to slot `slot_table[table_row, p]`, already filled in by the scheduler;
    attention covers positions 0 … p. `sampling` is None for a chunk whose prompt is not complete.

    Rotary positions are `positions` (3, len(token_ids)): time, row, column; or, where that is None, `position_delta`
    more than the position in the sequence, on all axes.

    Drafts: the last `len(drafted)` of `token_ids` are guesses. `sampling` then asks for the token before the first of
    them, and `drafted` for the one after each, as if the guesses up to there were output. A runner samples all of them;
    whoever asked keeps those whose guesses were right. `masks`: what grammars allow all of them, if there is one.

    Without `parents` each guess follows the token before it. With, they are a tree: `parents[i]` is the index among
    `token_ids` of the token that guess i follows, the last one before the guesses or an earlier guess. A guess then
    sees the tokens that lead to it and those before the guesses, and is rotated for the position that it would have in
    the text, one more than its parent's; its keys and values still go to the slot of its place in `token_ids`.
    """

    table_row: int
    start: int
    token_ids: Sequence[int]
    sampling: RowSampling | None
    vision: Sequence[VisionRows] = field(default=())
    positions: NDArray[np.int32] | None = None
    position_delta: int = 0
    drafted: Sequence[RowSampling] = field(default=())
    parents: Sequence[int] | None = None
    masks: TokenMasks | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token drawn for a row with `sampling`, and its log probabilities when asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class PictureEncoding(Protocol):
    """One picture on its way through the encoder, slice by slice.

    Attributes:
        num_bytes: What it keeps until the next slice.
    """

    @property
    def num_bytes(self) -> int: ...

    def run(self, num_slices: int) -> None:
        """The next slices."""
        ...

    def result(self) -> torch.Tensor:
        """After the last slice: as of `Runner.encode` for this picture alone."""
        ...


class Runner(Protocol):
    """A loaded model on one device.

    Attributes:
        num_slots: KV slots, one token each; slot 0 is the dummy that padding writes to and is never handed out.
        max_positions: Longest sequence in tokens.
        max_rows: Most rows in a step.
        vocab_size: Ids below it are text; ids at or above never reach the runner's embedding table.
        slot_table: (max_rows, max_positions) int32 on the device; the scheduler writes it, attention reads it.
        embedding_bytes: Bytes of one vision token's embedding.
        max_drafts: Most guesses in a row that decodes; 0: rows with `drafted` are not understood, and never sent.
        max_first_drafts: Most behind the last tokens of a prompt, where a step may have both.
        drafter: A model that guesses, loaded beside this one; its entries share the slots.
        drafts_beside_prompts: Whether a step may have both and be one pass over the weights; if not, nothing is guessed
            while prompts are being computed.
        picture_side: Of a picture that the encoder takes whatever its model, in pixels.
    """

    num_slots: int
    max_positions: int
    max_rows: int
    vocab_size: int
    slot_table: torch.Tensor
    embedding_bytes: int
    max_drafts: int
    max_first_drafts: int
    drafter: Drafter | None
    drafts_beside_prompts: bool
    picture_side: int

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Vision embeddings of items: each uint8 (tiles or frames, height, width, 3) → as in `VisionRows`."""
        ...

    def num_slices(self, shape: Sequence[int]) -> int:
        """In how many slices of about the same work an item of this shape can be encoded; 1: only as a whole, by
        `encode`.
        """
        ...

    def begin(self, pixels: torch.Tensor) -> PictureEncoding:
        """Encode an item in slices, where `num_slices` says so. `pixels` stay as they are until the first has run."""
        ...

    def added_s(self, rows: int, tokens: int) -> float | None:
        """Seconds that so many tokens of prompts add to a step in which so many rows decode, where that follows sizes
        that steps are filled up to; without the keys that they read. None: nothing is filled up. Never falls as tokens
        grow.
        """
        ...

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """One forward over all rows, decode and prefill mixed.

        Tokens in the order of the rows: for each row with `sampling` one, and one more for each of its `drafted`.
        """
        ...

    def facts(self) -> dict[str, object]:
        """What the table at start says of it: device, dtype, threads, kernel, kv_bytes, model_context."""
        ...

    def device_bytes(self) -> int:
        """Memory of a GPU that tensors take; 0 on a CPU."""
        ...

    def report_to(self, progress: Callable[[], None]) -> None:
        """Call `progress` at every layer from now on: a step with a large picture can take a CPU minutes, and whoever
        watches must not take that for a hang.
        """
        ...

    def warm_up(self, lap: Lap = no_lap) -> None:
        """Run every kind of work once on nobody's data, so that no request pays for the first use of a kernel.

        `lap` is told of each part.
        """
        ...

    def idle(self) -> bool:
        """Called while there is nothing to do: makes later steps faster, for less than a tenth of a second. Whether
        there is more to do at once; without, there may be later.
        """
        ...


class Flight(Protocol):
    """A batch that has been launched.

    Attributes:
        is_first: Whether something was made ready for it that the next of its shape finds ready: what it took says
            nothing of those.
    """

    @property
    def is_first(self) -> bool: ...

    def wait(self) -> None:
        """Until the batch is done."""
        ...

    def result(self) -> list[SampledToken]:
        """Waits for the batch; then as `Runner.step`. To be asked for once."""
        ...


@runtime_checkable
class OverlappedRunner(Protocol):
    """A `Runner` whose batches run one after the other on a device that the host need not wait for.

    A batch sees everything that earlier ones wrote, so slots and table rows may be given to others at once. A row may
    ask for `FUTURE_TOKEN` while the batch that draws it is in flight.
    """

    def launch(self, rows: Sequence[Row]) -> Flight:
        """Send a batch to the device. What cannot be sent raises here."""
        ...


def is_awaited(runner: Runner) -> bool:
    """Whether a call returns when its work is done. A GPU's encodings go on behind it, whether steps overlap or not."""
    return runner.slot_table.device.type == "cpu" and not isinstance(runner, OverlappedRunner)
