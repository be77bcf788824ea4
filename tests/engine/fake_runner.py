"""A runner whose every token depends on all KV that attention could see, and the answer worked out without batch or
cache.

The KV of a position is a hash of its content (token or vision embedding), its position, its rotary positions, and the
KV before it as read back through `slot_table`. A wrong slot, stale or foreign KV, a remap, a wrong position or a wrong
embedding changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import Row, SampledToken
from engine.speculation.drafter import Drafter
from engine.start_times import Lap, no_lap
from preprocess.wire import EngineRequest, Pixels, SamplingParams
from tests.engine.late_results import LateFlight, LateResults

VOCAB_SIZE = 50
MAX_POSITIONS = 96
HIDDEN = 2
SEED = 0x9E3779B97F4A7C15


def fold(state: int, *values: int) -> int:
    """Fold values into a 63-bit hash, one after the other."""
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
        state = (state ^ (state >> 29)) & ((1 << 63) - 1)
    return state


def embed(pixels: torch.Tensor) -> torch.Tensor:
    """(num_tokens, HIDDEN) int64: a picture of n tiles has n tokens, told apart by the whole picture and their
    place.
    """
    whole = fold(SEED, *pixels.flatten().tolist())
    return torch.tensor([[fold(whole, index), index] for index in range(pixels.shape[0])], dtype=torch.int64)


def draw(history: int, params: SamplingParams, output_index: int, banned: Sequence[int]) -> int:
    """The next token, by KV, seed and output index; the first candidate that is not banned."""
    candidates = (fold(history, params.seed, output_index, attempt) % VOCAB_SIZE for attempt in range(1000))
    return next(token for token in candidates if token not in banned)


class FakeRunner:
    """A `Runner` that hashes, and refuses batches that no runner should get. Drafts of a tree see what leads to them.

    `steps` holds (table row, start, tokens) of every row of every step, `encoded` the pictures of every encoder call,
    `sliced` the slices of every other. `before_step` is called first in each step: it may raise, or call the engine.
    `slices_of_picture`: in how many slices pictures can be encoded.
    """

    vocab_size = VOCAB_SIZE
    embedding_bytes = HIDDEN * 8
    max_drafts = 15
    max_first_drafts = 63
    drafter: Drafter | None = None
    drafts_beside_prompts = True
    picture_side = 1

    def __init__(
        self, *, num_slots: int = 513, max_rows: int = 8, max_positions: int = MAX_POSITIONS, budget: int = 10**9
    ) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.max_rows = max_rows
        self.slot_table = torch.zeros((max_rows, max_positions), dtype=torch.int32)
        self.budget = budget
        self.kv = [-1] * num_slots
        self.steps: list[list[tuple[int, int, int]]] = []
        self.encoded: list[int] = []
        self.sliced: list[int] = []
        self.slices_of_picture = 1
        self.complaints: list[AssertionError] = []
        self.before_step: Callable[[], None] = lambda: None
        self.before_encode: Callable[[], None] = lambda: None

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings of pictures."""
        self.encoded.append(len(pixels))
        self.before_encode()
        return [embed(picture) for picture in pixels]

    def num_slices(self, shape: Sequence[int]) -> int:
        """As told."""
        return self.slices_of_picture

    def added_s(self, rows: int, tokens: int) -> float | None:
        """See `Runner.added_s`."""
        return None

    def begin(self, pixels: torch.Tensor) -> FakeEncoding:
        """One picture, slice by slice."""
        return FakeEncoding(self, pixels)

    def device_bytes(self) -> int:
        """There is no device."""
        return 0

    def report_to(self, progress: Callable[[], None]) -> None:
        """Nothing takes long."""

    def warm_up(self, lap: Lap = no_lap) -> None:
        """Nothing to warm."""

    def idle(self) -> bool:
        """Nothing to do."""
        return False

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """Hash all rows, having proved that they make a batch; `complaints` keeps what the engine takes for our
        failure.
        """
        try:
            return self._step(rows)
        except AssertionError as error:
            self.complaints.append(error)
            raise

    def _step(self, rows: Sequence[Row]) -> list[SampledToken]:
        self.steps.append([(row.table_row, row.start, len(row.token_ids)) for row in rows])
        slots = [self.slot_table[row.table_row, : row.start + len(row.token_ids)].tolist() for row in rows]
        written = [slot for row, own in zip(rows, slots, strict=True) for slot in own[row.start :]]
        assert written, "an empty batch"
        assert len(written) <= self.budget, f"{len(written)} tokens exceed the budget of {self.budget}"
        assert len(set(written)) == len(written), "two positions write one slot"
        assert all(0 not in own and len(set(own)) == len(own) for own in slots), "a position without a slot of its own"
        assert len({row.table_row for row in rows}) == len(rows), "two rows of one sequence"
        for slot in written:
            self.kv[slot] = -1  # until it is computed, and if the step breaks, it holds rubbish
        self.before_step()
        return [token for row, own in zip(rows, slots, strict=True) for token in self._compute(row, own)]

    def _compute(self, row: Row, slots: list[int]) -> list[SampledToken]:
        contents = list(row.token_ids)
        is_vision = [False] * len(contents)
        for part in row.vision:
            marks = part.embeddings[part.first : part.first + part.count].tolist()
            contents[part.start : part.start + part.count] = [fold(SEED, *mark) for mark in marks]
            is_vision[part.start : part.start + part.count] = [True] * part.count
        assert len(contents) == len(row.token_ids), "embeddings beyond the row"
        assert row.positions is None or row.positions.shape == (3, len(contents)), "positions of other tokens"
        assert all(seen or 0 <= content < VOCAB_SIZE for content, seen in zip(contents, is_vision, strict=True))
        wanted = [] if row.sampling is None else [row.sampling, *row.drafted]
        assert len(wanted) <= len(contents)
        is_first = row.sampling is not None and row.sampling.output_index == 0
        assert len(row.drafted) <= (self.max_first_drafts if is_first else self.max_drafts)
        assert row.parents is None or len(row.parents) == len(row.drafted)
        sampled = []
        num_given = len(contents) - len(row.drafted)
        history = fold(SEED, *[self.kv[slot] for slot in slots[: row.start]])
        histories: list[int] = []  # behind each token, and how many positions that are from the row's first
        depths: list[int] = []
        for offset, content in enumerate(contents):
            depth = offset
            if row.parents is not None and offset >= num_given:
                parent = row.parents[offset - num_given]
                assert num_given - 1 <= parent < offset, "a draft that follows no token before it"
                history, depth = histories[parent], depths[parent] + 1
            position = row.start + depth
            axes = (position + row.position_delta,) * 3
            if row.positions is not None:
                axes = tuple(row.positions[:, offset].tolist())
            kv = fold(history, position, *axes, content)
            self.kv[slots[row.start + offset]] = kv
            history = fold(history, kv)
            histories.append(history)
            depths.append(depth)
            if offset >= len(contents) - len(wanted):
                asked = wanted[offset - len(contents)]
                sampled.append(SampledToken(draw(history, asked.params, asked.output_index, asked.banned_ids)))
        return sampled


class FakeEncoding:
    """See `engine.batch.PictureEncoding`."""

    num_bytes = 100

    def __init__(self, runner: FakeRunner, pixels: torch.Tensor) -> None:
        self._runner = runner
        self._embeddings = embed(pixels)
        self._left = runner.slices_of_picture

    def run(self, num_slices: int) -> None:
        """Counts."""
        self._runner.sliced.append(num_slices)
        self._runner.before_encode()
        assert 0 < num_slices <= self._left, "slices that are not there"
        self._left -= num_slices

    def result(self) -> torch.Tensor:
        """See `embed`."""
        assert not self._left, "slices were left out"
        return self._embeddings


class LateRunner(FakeRunner):
    """A `FakeRunner` that launches. Drafts beside prompts would have to be waited for."""

    max_first_drafts = 0

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.late = LateResults(self._step, self.max_rows)

    def launch(self, rows: Sequence[Row]) -> LateFlight:
        """See `engine.batch.OverlappedRunner.launch`."""
        try:
            return self.late.launch(rows)
        except AssertionError as error:
            self.complaints.append(error)
            raise


def load(pixels: Pixels) -> torch.Tensor:
    """Pixels that ride inline, as a tensor."""
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).reshape(pixels.shape)


def reference(
    request: EngineRequest, *, max_context: int = MAX_POSITIONS, answers: dict[int, int] | None = None
) -> tuple[list[int], str]:
    """Output ids and finish reason of a request alone: one position at a time, no slots, no cache. `answers` gets the
    token that follows each text, by the text's hash.
    """
    contents: list[int] = np.frombuffer(request.prompt_ids, dtype="<i8").tolist()
    for item in request.media:
        marks = iter(embed(load(item.pixels)).tolist())
        for start, count in item.spans:
            contents[start : start + count] = [fold(SEED, *next(marks)) for _ in range(count)]
    known = np.frombuffer(request.positions, dtype="<i4").reshape(3, -1)
    delta = int(known.max()) + 1 - known.shape[1] if known.size else 0
    params = request.sampling
    outputs: list[int] = []
    history = SEED
    for position in range(max_context):
        axes = known[:, position].tolist() if position < known.shape[1] else [position + delta] * 3
        history = fold(history, fold(history, position, *axes, contents[position]))
        if position + 1 < len(contents):
            continue
        is_early = len(outputs) < params.min_tokens
        token = draw(history, params, len(outputs), params.stop_token_ids if is_early else ())
        if answers is not None:
            answers[history] = token
        outputs.append(token)
        contents.append(token)
        if token in params.stop_token_ids and not is_early:
            return outputs, "stop"
        if len(outputs) >= params.max_tokens or len(contents) >= max_context:
            return outputs, "length"
    raise AssertionError("the prompt does not fit the context")
