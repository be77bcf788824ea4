"""A runner whose every token depends on all KV that attention could see, and the answer computed without batch or
cache.

It stores, for each slot, a hash of what was computed there: the token (or the vision embedding), its position, and the
whole history read back through `slot_table`. A wrong slot, stale or foreign KV, a remap, a wrong position or a wrong
embedding changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Row, SampledToken
from preprocess.wire import EngineRequest, MediaItem, Pixels, SamplingParams, TextOptions

MASK = (1 << 63) - 1
HIDDEN = 2


def mix(*values: int) -> int:
    """A 63-bit hash of small and large integers."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 29
    return state & MASK


def embed(pixels: torch.Tensor) -> torch.Tensor:
    """(num_tokens, HIDDEN) int64: a picture of `num_tokens` tiles has one token a tile, told by its content and
    place.
    """
    flat = pixels.reshape(pixels.shape[0], -1).tolist()
    whole = mix(*[value for tile in flat for value in tile])
    return torch.tensor([[mix(whole, index), index] for index in range(len(flat))], dtype=torch.int64)


def absorb(history: int, position: int, content: int) -> int:
    """The KV of a position: a hash of its content and of the KV before it."""
    return mix(history, position, content)


def draw(kv: int, params: SamplingParams, output_index: int, banned: Sequence[int], vocab_size: int) -> int:
    """The next token: the best of a few candidates by hash of KV, seed and output index."""
    for attempt in range(1000):
        token = mix(kv, params.seed, output_index, attempt) % vocab_size
        if token not in banned:
            return token
    raise AssertionError("everything is banned")


class FakeRunner:
    """A `Runner` that hashes. `failing` makes the next step or encode raise; `steps` and `encoded` record what it was
    asked.
    """

    embedding_bytes = HIDDEN * 8

    def __init__(
        self,
        num_slots: int = 257,
        max_positions: int = 128,
        max_rows: int = 8,
        vocab_size: int = 50,
        budget: int = 10**9,
    ) -> None:
        self.num_slots = num_slots
        self.max_positions = max_positions
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.budget = budget
        self.slot_table = torch.zeros((max_rows, max_positions), dtype=torch.int32)
        self.kv = np.zeros(num_slots, dtype=object)
        self.steps: list[list[tuple[int, int, int]]] = []
        self.encoded: list[int] = []
        self.fail_steps: set[int] = set()
        self.fail_encode = False

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.fail_encode:
            raise RuntimeError("encoder broke")
        self.encoded.append(len(pixels))
        return [embed(picture) for picture in pixels]

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        self.steps.append([(row.table_row, row.start, len(row.token_ids)) for row in rows])
        assert rows, "an empty batch"
        assert sum(len(row.token_ids) for row in rows) <= self.budget, "more tokens than the budget"
        assert len({row.table_row for row in rows}) == len(rows), "two rows of one sequence"
        written = [int(slot) for row in rows for slot in self._slots(row)[row.start :]]
        assert len(set(written)) == len(written), "a slot is written twice"
        assert 0 not in written, "the dummy slot is written"
        if len(self.steps) in self.fail_steps:
            for slot in written:
                self.kv[slot] = -1  # half-written rubbish
            raise RuntimeError("device broke")
        sampled = []
        for row in rows:
            slots = self._slots(row)
            contents = list(row.token_ids)
            for part in row.vision:
                marks = part.embeddings[part.first : part.first + part.count].tolist()
                contents[part.start : part.start + part.count] = [mix(*mark) for mark in marks]
            history = mix(*[int(self.kv[slot]) for slot in slots[: row.start]])
            for offset, content in enumerate(contents):
                assert part_of_vocabulary(content, row, offset, self.vocab_size)
                kv = absorb(history, row.start + offset, content)
                self.kv[slots[row.start + offset]] = kv
                history = mix(*[int(self.kv[slot]) for slot in slots[: row.start + offset + 1]])
            if row.sampling is not None:
                sampling = row.sampling
                sampled.append(
                    SampledToken(
                        draw(history, sampling.params, sampling.output_index, sampling.banned_ids, self.vocab_size)
                    )
                )
        return sampled

    def _slots(self, row: Row) -> list[int]:
        slots: list[int] = self.slot_table[row.table_row, : row.start + len(row.token_ids)].tolist()
        return slots


def part_of_vocabulary(content: int, row: Row, offset: int, vocab_size: int) -> bool:
    """Text ids are below the vocabulary; positions under a picture carry embeddings."""
    return 0 <= content < vocab_size or any(part.start <= offset < part.start + part.count for part in row.vision)


def load(pixels: Pixels) -> torch.Tensor:
    """Pixels that ride inline, as a tensor."""
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).reshape(pixels.shape)


def picture(start: int, num_tokens: int, content: int) -> MediaItem:
    """A picture of `num_tokens` vision tokens at prompt position `start`, told apart by `content`."""
    data = bytes((content + tile) % 251 for tile in range(num_tokens) for _ in range(3))
    digest = content.to_bytes(16, "little") + num_tokens.to_bytes(16, "little")
    return MediaItem(digest, Pixels((num_tokens, 1, 1, 3), 0, data), [(start, num_tokens)])


def request(
    request_id: str,
    prompt: Sequence[int],
    media: Sequence[MediaItem] = (),
    *,
    max_tokens: int = 8,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    priority: int = 0,
) -> EngineRequest:
    """A request for the engine."""
    return EngineRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, dtype="<i8").tobytes(),
        media=list(media),
        sampling=SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, stop_token_ids=list(stop_token_ids)
        ),
        text=TextOptions(),
        arrival_s=0.0,
        priority=priority,
    )


def reference(wanted: EngineRequest, *, vocab_size: int = 50, max_context: int = 128) -> tuple[list[int], str]:
    """What the request must give: one token at a time, alone, no cache, no slots."""
    contents: list[int] = np.frombuffer(wanted.prompt_ids, dtype="<i8").tolist()
    for item in wanted.media:
        marks = iter(embed(load(item.pixels)).tolist())
        for start, count in item.spans:
            contents[start : start + count] = [mix(*next(marks)) for _ in range(count)]
    params = wanted.sampling
    kv: list[int] = []
    outputs: list[int] = []
    while True:
        for position in range(len(kv), len(contents)):
            kv.append(absorb(mix(*kv), position, contents[position]))
        banned = params.stop_token_ids if len(outputs) < params.min_tokens else ()
        token = draw(mix(*kv), params, len(outputs), banned, vocab_size)
        outputs.append(token)
        contents.append(token)
        if token in params.stop_token_ids and len(outputs) > params.min_tokens:
            return outputs, "stop"
        if len(outputs) >= params.max_tokens or len(contents) >= max_context:
            return outputs, "length"
