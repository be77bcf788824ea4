"""A GPU that computes nothing and takes the time that was measured on an H200: the engine over it, in made-up time.

    host     │ schedule, launch n + 1 │ waits │ takes results of n │ …        `Time.now_s` is the host's clock
    device   │ slices of n │ step n ────────────│ slices of n + 1 │ …        works on behind it

Times are those of an H200. What the engine learns of them it learns as on a GPU: by the clock, from when results come.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from engine.batch import Row, Runner, SampledToken
from engine.config import EngineConfig
from engine.core import Engine
from engine.gpu.size_table import SizeTable
from engine.gpu.step_sizes import Size, decode_sizes, prompt_sizes
from engine.speculation.drafter import Drafter
from engine.step_measure import measure
from preprocess.wire import EngineRequest, MediaItem, Pixels, SamplingParams, TextOptions, TokenEvents
from server.bench.figures import percentile

MS: Final = 1e-3
MOST_TOKENS: Final = 4096
"""Of chunks in a captured step."""
SHAPE: Final = (1, 768, 1024, 3)
VISION_TOKENS: Final = 768
PROMPT_TOKENS: Final = 800
TOLD: Final = 5
"""Every token that is said."""
BEFORE_S: Final = 14 * MS
"""From a client's sending to the engine: JPEG decoding, tokenising."""
AFTER_S: Final = 2 * MS
"""From the engine's event to the client."""


@dataclass(frozen=True)
class Shape:
    """What a model takes on the device. Products of a step take the longer of reading weights and multiplying."""

    weights_s: float
    token_s: float
    fixed_s: float
    context_s: float
    """Attention of a row that decodes, a thousand tokens of context."""
    chunk_s: float
    """Attention and elementwise work of a token in a chunk."""
    picture_s: float
    """The encoder, 1024 × 768."""
    slices: int
    chunks_s: float = 0.0
    """What a step takes for having chunks at all."""
    pair_s: float = 0.0
    """What it takes a chunk's token to read one that was computed in an earlier step."""

    def step_s(self, contexts: Sequence[int], prompt: int, padded_rows: int) -> float:
        """A step of rows with these contexts and so many tokens of prompts, both as captured."""
        products_s = (self.weights_s**6 + ((padded_rows + prompt) * self.token_s) ** 6) ** (1 / 6)
        chunks_s = self.chunks_s * (prompt > 0) + prompt * self.chunk_s
        return products_s + self.fixed_s + sum(contexts) / 1000 * self.context_s + chunks_s


@dataclass(frozen=True)
class Measured(Shape):
    """Chunks beside 33 rows take what was measured, by their size; products by tiles are no straight line."""

    chunks: tuple[tuple[int, float], ...] = ()

    def step_s(self, contexts: Sequence[int], prompt: int, padded_rows: int) -> float:
        """See `Shape.step_s`."""
        sizes, times_s = zip(*self.chunks, strict=True)
        chunk_s = float(np.interp(prompt, sizes, times_s)) if prompt else 0.0
        return self.weights_s + self.fixed_s + sum(contexts) / 1000 * self.context_s + chunk_s

    def slower(self, times: float) -> Measured:
        """At pictures and prompts."""
        chunks = tuple((size, times * time_s) for size, time_s in self.chunks)
        return replace(self, picture_s=times * self.picture_s, chunks=chunks)


QWEN3_VL_2B: Final = Shape(1.36 * MS, 0.0046 * MS, 0.36 * MS, 0.034 * MS, 0.0026 * MS, 5.8 * MS, 12)
QWEN3_VL_8B: Final = Shape(4.2 * MS, 0.0195 * MS, 0.45 * MS, 0.041 * MS, 0.003 * MS, 8.6 * MS, 14)
QWEN2_5_VL_3B: Final = Shape(1.95 * MS, 0.0086 * MS, 0.42 * MS, 0.0165 * MS, 0.0016 * MS, 11.0 * MS, 16)
_SIZES: Final = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 832, 1024)
_SIZES_MS: Final = (0.8, 1.25, 1.65, 2.1, 2.3, 2.5, 3.1, 3.7, 4.7, 5.9, 7.2, 8.4, 13.6, 17.5)
QWEN3_VL_8B_BESIDE: Final = Measured(
    4.2 * MS,
    0.0,
    0.37 * MS,
    0.0403 * MS,
    0.0,
    9.24 * MS,
    14,
    chunks=tuple((size, ms * MS) for size, ms in zip(_SIZES, _SIZES_MS, strict=True)),
)
"""64, 128, 192 and 512 tokens and slices as measured beside 33 rows; the others between."""


class Time:
    """Where host and device stand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy_until_s = 0.0

    def clock(self) -> float:
        """The host's."""
        return self.now_s

    def work(self, seconds: float) -> float:
        """Sends the device work; when that will be done."""
        self.busy_until_s = max(self.busy_until_s, self.now_s) + seconds
        return self.busy_until_s


@dataclass
class TimedFlight:
    """See `engine.batch.Flight`."""

    time: Time
    done_s: float
    tokens: list[SampledToken]
    is_first: bool = False

    def wait(self) -> None:
        """On the device."""
        self.time.now_s = max(self.time.now_s, self.done_s)

    def result(self) -> list[SampledToken]:
        """Waits."""
        self.wait()
        return self.tokens


class TimedEncoding:
    """See `engine.batch.PictureEncoding`."""

    num_bytes = 100

    def __init__(self, runner: TimedRunner) -> None:
        self._runner = runner

    def run(self, num_slices: int) -> None:
        """On the device."""
        runner = self._runner
        runner.time.now_s += 0.01 * MS * num_slices
        runner.time.work(runner.shape.picture_s / runner.shape.slices * num_slices)

    def result(self) -> torch.Tensor:
        """Something."""
        return torch.empty(VISION_TOKENS, 1)


class TimedRunner:
    """An `OverlappedRunner` of a shape.

    Args:
        noise: Of what a step takes, the standard deviation as a part of it.
        draft_s: What a draft adds to a step of the device.
        max_drafts: Most that a row may have.
        host: How many times as long a launch takes the host as it did there.
    """

    vocab_size = 50
    embedding_bytes = 4
    max_first_drafts = 0
    drafter: Drafter | None = None
    drafts_beside_prompts = False
    picture_side = 256
    max_positions = 4096

    def __init__(
        self,
        shape: Shape,
        time: Time,
        max_rows: int = 64,
        noise: float = 0.0,
        draft_s: float = 0.0,
        max_drafts: int = 0,
        host: float = 1.0,
    ) -> None:
        self.shape = shape
        self._host = host
        self.max_drafts = max_drafts
        self._draft_s = draft_s
        self._noise = noise
        self._random, self._random_of_readers = random.Random(1), random.Random(2)
        self.time = time
        self.max_rows = max_rows
        self.num_slots = 300_000
        self.slot_table = torch.zeros((max_rows, self.max_positions), dtype=torch.int32)
        self.sizes = SizeTable(lambda size, splits: True)
        for size in [*prompt_sizes(max_rows, MOST_TOKENS), *(Size(size, 0) for size in decode_sizes(max_rows))]:
            self.sizes.add(size, shape.step_s([0], size.prompt, size.decode))

    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole pictures."""
        for _ in pixels:
            TimedEncoding(self).run(self.shape.slices)
        return [torch.empty(VISION_TOKENS, 1) for _ in pixels]

    def num_slices(self, shape: Sequence[int]) -> int:
        """As the shape says."""
        return self.shape.slices

    def begin(self, pixels: torch.Tensor) -> TimedEncoding:
        """A picture."""
        return TimedEncoding(self)

    def added_s(self, rows: int, tokens: int) -> float:
        """See `Runner.added_s`."""
        return self.sizes.added_s(rows, tokens)

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """At once."""
        return self.launch(rows).result()

    def launch(self, rows: Sequence[Row]) -> TimedFlight:
        """Takes the host's time, and the device's behind it."""
        decodes = [
            row.start + 1 for row in rows if len(row.token_ids) == 1 + len(row.drafted) and row.sampling is not None
        ]
        drafts = sum(len(row.drafted) for row in rows)
        prompt = sum(len(row.token_ids) for row in rows) - len(decodes) - drafts
        size = self.sizes.choose(Size(len(decodes), prompt))
        self.time.now_s += self._host * (0.6 + 0.016 * len(decodes)) * MS
        pairs = sum(row.start * len(row.token_ids) for row in rows if row.sampling is None or len(row.token_ids) > 1)
        step_s = self.shape.step_s(decodes, size.prompt, size.decode) + drafts * self._draft_s
        step_s += (pairs if not drafts else 0) * self.shape.pair_s
        chance = self._random_of_readers if pairs else self._random
        done_s = self.time.work(step_s * chance.gauss(1.0, self._noise))
        sampled = sum(1 + len(row.drafted) for row in rows if row.sampling is not None)
        return TimedFlight(self.time, done_s, self.says(sampled))

    def says(self, count: int) -> list[SampledToken]:
        """So many tokens that are drawn."""
        return [SampledToken(TOLD)] * count


@dataclass
class Seen:
    """What a client saw of one request, in ms of the clock."""

    sent_s: float
    events_s: list[float] = field(default_factory=list)


class Server:
    """An engine over a device, and its clients.

    Args:
        runner: The device's, with a model.
        time: Of host and device.
        options: Of the engine.
        pixels: Of every picture.
    """

    def __init__(
        self, runner: Runner, time: Time, options: Mapping[str, float] | None = None, pixels: torch.Tensor | None = None
    ) -> None:
        self.time = time
        room = 1000 * VISION_TOKENS * runner.embedding_bytes
        config = EngineConfig(model="", vision_cache_bytes=room, **options or {})  # type: ignore[arg-type]
        num_slots = runner.num_slots
        if isinstance(runner, TimedRunner) and not runner.shape.pair_s:
            runner.num_slots = 1  # what takes nothing is not measured: luck and time are as without
        costs = measure(runner, 4096, time.clock) if config.ttft_target_ms else None
        runner.num_slots = num_slots
        self.engine = Engine(config, runner, time.clock, costs)
        self._pixels = torch.empty(0) if pixels is None else pixels
        self.seen: dict[str, Seen] = {}
        self.ended: Callable[[str], None] = lambda name: None
        self._coming: list[tuple[float, int, EngineRequest]] = []
        self._numbers = itertools.count()
        self._lengths: dict[str, int] = {}

    @classmethod
    def of(cls, shape: Shape, *, noise: float = 0.0, **options: float) -> Server:
        """A server of a model of this shape, by default as `beholder serve` runs it."""
        time = Time()
        return cls(TimedRunner(shape, time, noise=noise), time, options)

    def send(
        self, name: str, max_tokens: int, *, text: int = 0, delay_s: float = 0.0, stop_id: int | None = None
    ) -> None:
        """A client sends a picture, or so much text, some time from now."""
        number = next(self._numbers)
        length = text or PROMPT_TOKENS
        ids = np.full(length, 3, "<i8")
        ids[:3] = number % 50, number // 50 % 50, number // 2500
        media = []
        if not text:
            media = [MediaItem(number.to_bytes(32, "little"), Pixels(SHAPE), [(6, VISION_TOKENS)])]
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=[] if stop_id is None else [stop_id])
        request = EngineRequest(name, ids.tobytes(), media, sampling, TextOptions(), 0.0)
        sent_s = self.time.now_s + delay_s
        self.seen[name] = Seen(sent_s)
        self._lengths[name] = max_tokens
        heapq.heappush(self._coming, (sent_s + (0.5 * MS if text else BEFORE_S), number, request))

    def run_until(self, until_s: float = float("inf")) -> None:
        """Until then, or until everything is answered."""
        engine, time = self.engine, self.time
        while time.now_s < until_s and (engine.has_work or self._coming):
            if not engine.has_work:
                time.now_s = max(time.now_s, min(self._coming[0][0], until_s))
            while self._coming and self._coming[0][0] <= time.now_s:
                engine.submit(heapq.heappop(self._coming)[2], lambda pixels: self._pixels)
            for message in engine.step():
                for event in message.events if isinstance(message, TokenEvents) else ():
                    assert event.error is None
                    seen = self.seen[event.request_id]
                    seen.events_s += [time.now_s] * len(event.token_ids)
                    if event.finish_reason is not None:
                        self.ended(event.request_id)
        if until_s < float("inf"):
            time.now_s = max(time.now_s, until_s)


@dataclass(frozen=True)
class Interference:
    """ITL of streams beside pictures as parts of the median alone; TTFT of pictures in ms."""

    alone_ms: float
    p50: float
    p99: float
    slowest: float
    ttft_p50_ms: float
    ttft_p90_ms: float


def interference(server: Server, *, streams: int = 32, every_s: float = 0.1, seconds: float = 2.0) -> Interference:
    """Streams that decode alone, then with a picture every so often, then alone, as `beholder bench interference`."""
    for index in range(streams):
        server.send(f"stream{index}", 3000, text=500)
    server.run_until(server.time.now_s + 0.5)
    quiet_s = server.time.now_s
    server.run_until(quiet_s + seconds)
    beside_s = server.time.now_s
    for index in range(round(seconds / every_s)):
        server.send(f"p{index}", 16, delay_s=index * every_s)
    server.run_until(beside_s + seconds)
    end_s = server.time.now_s
    after_pictures_s = end_s + 1.0
    server.run_until(after_pictures_s + seconds)
    quiet: list[float] = []
    beside: list[float] = []
    for name, seen in server.seen.items():
        for before_s, after_s in itertools.pairwise(seen.events_s) if name.startswith("stream") else ():
            is_quiet = quiet_s < before_s < beside_s or before_s > after_pictures_s
            gaps = quiet if is_quiet else beside if beside_s <= before_s < end_s else []
            gaps.append(after_s - before_s)
    alone_s = percentile(quiet, 50)
    ttft = [
        (seen.events_s[0] - seen.sent_s + AFTER_S) / MS
        for name, seen in server.seen.items()
        if name.startswith("p") and seen.events_s
    ]
    assert len(ttft) == round(seconds / every_s)
    relative = [percentile(beside, q) / alone_s for q in (50, 99, 100)]
    return Interference(alone_s / MS, relative[0], relative[1], relative[2], percentile(ttft, 50), percentile(ttft, 90))


@dataclass(frozen=True)
class Closed:
    """A closed loop."""

    requests_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    itl_p50_ms: float


def closed_loop(
    server: Server, clients: int, *, rounds: int = 8, tokens: int = 128, media_s: tuple[float, float] = (0.0, 0.0)
) -> Closed:
    """So many clients, each with a new picture as soon as it is answered, as `beholder bench load`. `media_s`: what
    preparing one takes longer than `BEFORE_S`, at least and at most.
    """
    left = dict.fromkeys(range(clients), rounds)
    chance = random.Random(1)

    def ask(client: int) -> None:
        if left[client]:
            left[client] -= 1
            server.send(f"{client}.{left[client]}", tokens, delay_s=AFTER_S + chance.uniform(*media_s))

    server.ended = lambda name: ask(int(name.split(".")[0]))
    started_s = server.time.now_s
    for client in range(clients):
        ask(client)
    server.run_until()
    elapsed_s = server.time.now_s - started_s
    ttft = [(seen.events_s[0] - seen.sent_s + AFTER_S) / MS for seen in server.seen.values()]
    itl = [(seen.events_s[-1] - seen.events_s[0]) / (tokens - 1) / MS for seen in server.seen.values()]
    return Closed(clients * rounds / elapsed_s, percentile(ttft, 50), percentile(ttft, 90), percentile(itl, 50))
