"""`beholder bench speculation`: what drafting brings, and that it never costs: the engine with and without, in turn.

Streams ask one after the other, each as soon as its last answer is complete; pictures are decoded beforehand, so that
the figures are the engine's. Every round begins with sources that know nothing of the text; how long steps take is
known from a round that does not count, as a running server knows it. Both sides answer the same
requests; where types round (bfloat16), texts may part, and how many are equal is shown. On a CPU with one torch thread
times are processor time of that thread, since shared machines are noisy; otherwise they are ordinary time. An answer's
decode time is that from its first token to its last, and what guesses beside its prompt took before: each such step is
computed once more without them, which no figure counts, and the difference does.

    prose      a placard for a picture, as text; another picture each time, no session
    list       the things in a picture, as JSON (preset list_objects); no session
    form       title, artist, year, medium and text of a placard, as JSON (preset museum_placard); no session
    dictation  long text as it is read from a page: the model computes, but the words are this project's licence
    chat       turns on one picture, with a session
    still      a camera before a scene that does not move (but for its noise): what it shows, as a list
    slow       the scene drifts, and now and then is another
    cuts       another scene each time

    beholder bench speculation [--model FOLDER] [--device cuda] [--draft-model FOLDER | --draft-head FOLDER]
                                 [--streams 1,4,16,64] [--rounds 3] [--workloads …] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from PIL import Image

from preprocess.model_folder import ModelFolder
from preprocess.prepare import Preparer
from preprocess.tokenizer import load_tokenizer
from preprocess.wire import EngineRequest, ImagePart, Message, TextPart, Usage
from server.bench.arguments import count, count_from_0, counts
from server.bench.engine_alone import clock_of, events, pixels_of, prepared
from server.bench.figures import table_line
from server.bench.first_guesses import FirstGuesses
from server.settings import Settings

if TYPE_CHECKING:
    from engine.batch import Flight, Row, Runner, SampledToken
    from engine.core import Engine
    from engine.speculation.controller import Controller

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ("kitchen", "garden", "street", "farm", "desk", "penguins", "fruit", "gallery", "music")
TURNS: Final = (
    "Describe the picture.",
    "List the objects.",
    "What is in the center of the picture?",
    "Describe the picture in detail.",
    "What is the background?",
    "Describe the picture.",
)
PLACARD: Final = "Write a museum placard for this picture."
OBJECTS: Final = "List the objects as JSON."
"""The bundled model was taught these wordings."""


@dataclass
class Figures:
    """One round of one side."""

    elapsed_s: float
    steps: int
    tokens: int
    decode_ms: list[float]
    tokens_each: list[int]
    answers: dict[str, list[int]]
    drafted: int = 0
    accepted: int = 0
    first_guesses_ms: float = 0.0

    @property
    def all_decode_ms(self) -> float:
        """From first tokens to last ones, and for guesses of first tokens."""
        return sum(self.decode_ms) + self.first_guesses_ms

    @property
    def itl_ms(self) -> float:
        """Mean time between tokens."""
        return self.all_decode_ms / max(sum(count - 1 for count in self.tokens_each), 1)


@dataclass
class Stream:
    """What one client asks, in order."""

    requests: list[EngineRequest] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Print the table; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--streams", type=counts, default=[1, 4, 16, 64], help="clients at once (default: 1,4,16,64)")
    parser.add_argument("--rounds", type=count, default=3, help="rounds of both sides (default: 3)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which of them (default: all)")
    parser.add_argument("--draft-model", default="", help="a smaller model that guesses (default: none)")
    parser.add_argument("--draft-head", default="", help="a head that guesses (default: as of beholder serve)")
    parser.add_argument("--mode", default="auto", help="the side that drafts (default: auto)")
    parser.add_argument(
        "--always", type=count_from_0, default=0, help="check so many guesses, whatever pays (default: 0, no)"
    )
    parser.add_argument("--device", default="auto", help="where it runs (default: auto)")
    parser.add_argument("--dtype", default="auto", help="type of the weights (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown workloads {', '.join(sorted(unknown))}; expected some of {', '.join(WORKLOADS)}")
    drafters = {"draft_model": options.draft_model, "draft_head": options.draft_head}
    places = {"model": options.model, "device": options.device, "dtype": options.dtype}
    bench = Bench({"speculation": options.mode, **places, **drafters})
    rows = []
    for name in options.workloads.split(","):
        for streams in options.streams:
            rows.append(bench.compare(name, streams, options.rounds, always=options.always))
            if not options.json:
                print(table_line(rows[-1], header=len(rows) == 1), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


class Bench:
    """One loaded model that both sides use in turn.

    Args:
        options: As in `Settings`.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        from engine.load import load_runner

        self._settings = Settings.load(options).resolve_model()
        config = self._settings.engine_config()
        self._config = msgspec.structs.replace(config, max_waiting=1024, max_waiting_tokens=10**9)
        self._runner = load_runner(self._config)
        self._runner.warm_up()
        self._clock = clock_of(self._runner.slot_table.device.type)
        self._preparer = Preparer(self._settings.preprocess_config(), None)
        gc.freeze()  # as the engine process does
        self._learnt = self._controller()
        self._num_streams = 1
        self._dictation = load_tokenizer(ModelFolder(self._config.model)).encode((ROOT / "LICENSE").read_text()).ids

    def compare(self, workload: str, num_streams: int, rounds: int, *, always: int = 0) -> dict[str, Any]:
        """The figures of both sides, medians of the rounds' ratios. `always`: so many guesses are checked where there
        are as many; 0: what pays is decided as in a server.
        """
        from engine.speculation.lengths import Always

        def adjust(engine: Engine) -> None:
            if always and engine.speculator.is_on:
                engine.speculator.controller = Always(always)

        self._num_streams = num_streams
        self._learnt = self._controller()  # so that no row depends on those before it
        streams = [WORKLOADS[workload](self, index) for index in range(num_streams)]
        script = self._dictation if workload == "dictation" else None
        sides: dict[str, list[Figures]] = {"none": [], self._config.speculation: []}
        self._run(streams, self._config.speculation, script, adjust)
        for number in range(rounds):
            for mode in list(sides)[:: 1 if number % 2 == 0 else -1]:
                sides[mode].append(self._run(streams, mode, script, adjust))
            print(f"{workload} {num_streams}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        plain, drafting = sides.values()

        def ratio(of: Callable[[Figures], float]) -> float:
            return statistics.median(of(one) / of(other) for one, other in zip(plain, drafting, strict=True))

        def middle(figures: list[Figures], of: Callable[[Figures], float]) -> float:
            return statistics.median(of(one) for one in figures)

        first, second = plain[0], drafting[0]
        same = sum(ids == second.answers[name] for name, ids in first.answers.items())
        return {
            "workload": workload,
            "streams": num_streams,
            "tokens/answer": first.tokens / len(first.answers),
            "tokens/step": middle(drafting, lambda one: one.tokens / one.steps / num_streams),
            "steps ÷": ratio(lambda one: one.steps),
            "accepted %": 100 * sum(one.accepted for one in drafting) / max(sum(one.drafted for one in drafting), 1),
            "ITL ms plain": middle(plain, lambda one: one.itl_ms),
            "ITL ms": middle(drafting, lambda one: one.itl_ms),
            "decode time ÷": ratio(lambda one: one.all_decode_ms),
            "tokens/s plain": middle(plain, lambda one: one.tokens / one.elapsed_s),
            "tokens/s": middle(drafting, lambda one: one.tokens / one.elapsed_s),
            "tokens/s ×": 1 / ratio(lambda one: one.tokens / one.elapsed_s),
            "same text": f"{same}/{len(first.answers)}",
        }

    def _controller(self) -> Controller:
        """One that knows nothing yet."""
        from engine.batch import OverlappedRunner
        from engine.speculation.controller import Controller

        drafter, waits = self._runner.drafter, isinstance(self._runner, OverlappedRunner)
        costs = () if drafter is None else (drafter.cost, drafter.late_cost)
        return Controller(*costs, waits=waits)

    # ---- workloads ---------------------------------------------------------------------------------------------------

    def _times(self, most: int) -> range:
        """How often each stream asks: more rarely where there are many, so that a round stays short."""
        return range(max(3, most // max(self._num_streams // 8, 1)))

    def prose(self, index: int) -> Stream:
        """Placards in words."""
        return Stream(
            [
                self._ask(f"{index}-{n}", [(_scene(index + n, seed=index), PLACARD)], max_tokens=96)
                for n in self._times(12)
            ]
        )

    def objects(self, index: int) -> Stream:
        """A short list as JSON."""
        return self._form(index, "list_objects", OBJECTS)

    def form(self, index: int) -> Stream:
        """The placard's five fields as JSON."""
        return self._form(index, "museum_placard", PLACARD)

    def _form(self, index: int, preset: str, question: str) -> Stream:
        schema = json.loads((ROOT / "server" / "presets" / f"{preset}.json").read_text())["response_format"]
        return Stream(
            [
                self._ask(f"{index}-{n}", [(_scene(index + n, seed=index), question)], response_format=schema)
                for n in self._times(15)
            ]
        )

    def dictation(self, index: int) -> Stream:
        """A page's text."""
        asked = [(_scene(index, seed=index), "What is written in the picture?")]
        return Stream([self._ask(f"{index}-0", asked, max_tokens=400, ignore_eos=True, seed=331 * index)])

    def chat(self, index: int) -> Stream:
        """Turns on one picture; the answers before are what the model says alone."""
        picture = _scene(index, seed=index)
        turns: list[tuple[bytes | str, str]] = []
        stream = Stream()
        for number, question in enumerate(TURNS):
            turns.append((picture if not number else "", question))
            request = self._ask(f"{index}-{number}", turns, session=f"chat-{index}", max_tokens=64)
            stream.requests.append(request)
            said = self._run([Stream([request])], "none", None).answers[request.request_id]
            turns[-1] = (turns[-1][0], question)
            turns.append(("answer", self._text(said)))
        return stream

    def still(self, index: int) -> Stream:
        """Nothing but noise changes."""
        return self._camera(index, [(index, 0.0) for _ in self._times(20)])

    def slow(self, index: int) -> Stream:
        """It drifts; another scene after five frames."""
        return self._camera(index, [(index + number // 5, number % 5 * 1.5) for number in self._times(20)])

    def cuts(self, index: int) -> Stream:
        """Another scene each time."""
        return self._camera(index, [(index + number, 0.0) for number in self._times(20)])

    def _camera(self, index: int, frames: Sequence[tuple[int, float]]) -> Stream:
        return Stream(
            [
                self._ask(
                    f"{index}-{number}",
                    [(_scene(scene, seed=100 * index + number, drift=drift), PLACARD)],
                    session=f"camera-{index}",
                    max_tokens=96,
                )
                for number, (scene, drift) in enumerate(frames)
            ]
        )

    def _ask(
        self, name: str, turns: Sequence[tuple[bytes | str, str]], *, session: str = "", **sampling: Any
    ) -> EngineRequest:
        """A request for turns of (picture or "" or "answer", text)."""
        messages = []
        for picture, text in turns:
            parts: list[Any] = [ImagePart(data=picture)] if isinstance(picture, bytes) else []
            messages.append(Message("assistant" if picture == "answer" else "user", [*parts, TextPart(text)]))
        return prepared(self._preparer, name, messages, sampling, session=session)

    def _text(self, ids: Sequence[int]) -> str:
        tokenizer = load_tokenizer(ModelFolder(self._config.model))
        return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    # ---- running -----------------------------------------------------------------------------------------------------

    def _run(
        self,
        streams: Sequence[Stream],
        mode: str,
        script: Sequence[int] | None,
        adjust: Callable[[Engine], None] = lambda engine: None,
    ) -> Figures:
        """One round. `adjust`: what is done to the engine before."""
        from engine.core import Engine

        runner = self._runner if script is None else dictating(self._runner, script)
        guesses = FirstGuesses(runner, self._clock)
        engine = Engine(msgspec.structs.replace(self._config, speculation=mode), guesses.runner, guesses.clock)
        guesses.watch(engine.speculator)
        engine.speculator.controller = self._learnt
        adjust(engine)
        waiting = [iter(stream.requests) for stream in streams]
        owners: dict[str, Iterator[EngineRequest]] = {}
        answers: dict[str, list[int]] = {}
        usages: list[Usage] = []

        def ask(requests: Iterator[EngineRequest]) -> None:
            request = next(requests, None)
            if request is not None:
                owners[request.request_id] = requests
                answers[request.request_id] = []
                engine.submit(request, pixels_of)

        started_s = guesses.clock()
        for requests in waiting:
            ask(requests)
        while engine.has_work:
            for event in events(engine):
                answers[event.request_id] += event.token_ids
                if event.usage is not None:
                    usages.append(event.usage)
                    ask(owners[event.request_id])
        elapsed_s = guesses.clock() - started_s
        stats = engine.stats()
        return Figures(
            elapsed_s,
            stats.num_steps,
            stats.generated_tokens,
            [usage.decode_ms for usage in usages],
            [usage.completion_tokens for usage in usages],
            answers,
            sum(engine.speculator.drafted.values()),
            sum(engine.speculator.accepted.values()),
            1e3 * guesses.taken_s,
        )


WORKLOADS: Final[dict[str, Callable[[Bench, int], Stream]]] = {
    "prose": Bench.prose,
    "list": Bench.objects,
    "form": Bench.form,
    "dictation": Bench.dictation,
    "chat": Bench.chat,
    "still": Bench.still,
    "slow": Bench.slow,
    "cuts": Bench.cuts,
}


class Dictating:
    """A runner that computes everything and then says a given text, each row from a place of its own."""

    def __init__(self, runner: Runner, script: Sequence[int]) -> None:
        self._runner = runner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """See `Runner.step`."""
        return self.told(rows, self._runner.step(rows))

    def told(self, rows: Sequence[Row], sampled: Sequence[SampledToken]) -> list[SampledToken]:
        """The script's tokens in place of what was sampled."""
        from engine.batch import SampledToken
        from engine.speculation.tree import offsets

        script, said = self._script, []
        for row in rows:
            if row.sampling is not None:
                first = row.sampling.params.seed + row.sampling.output_index
                count = 1 + len(row.drafted)
                places = range(count) if row.parents is None else offsets(row.parents, count)
                said += [script[(first + place) % len(script)] for place in places]
        return [
            SampledToken(token_id) if token.logprobs is None else dataclasses.replace(token, token_id=token_id)
            for token, token_id in zip(sampled, said, strict=True)
        ]


class LaunchedDictating(Dictating):
    """The same for a runner whose results come later. What the device goes on with is its own: it takes as long."""

    def launch(self, rows: Sequence[Row]) -> DictatedFlight:
        """See `OverlappedRunner.launch`."""
        return DictatedFlight(self._runner.launch(rows), lambda sampled: self.told(rows, sampled))  # type: ignore[attr-defined]


class DictatedFlight:
    """See `engine.batch.Flight`."""

    def __init__(self, flight: Flight, told: Callable[[list[SampledToken]], list[SampledToken]]) -> None:
        self.is_first = flight.is_first
        self._flight = flight
        self._told = told

    def wait(self) -> None:
        """See `Flight.wait`."""
        self._flight.wait()

    def result(self) -> list[SampledToken]:
        """See `Flight.result`."""
        return self._told(self._flight.result())


def dictating(runner: Runner, script: Sequence[int]) -> Dictating:
    """The runner, as one that says a given text."""
    from engine.batch import OverlappedRunner

    return (LaunchedDictating if isinstance(runner, OverlappedRunner) else Dictating)(runner, script)


def _scene(number: int, *, seed: int, drift: float = 0.0) -> bytes:
    """A picture of the samples as a camera sees it: with noise, and moved by some pixels."""
    name = PICTURES[number % len(PICTURES)]
    with Image.open(ROOT / "samples" / "pictures" / f"{name}.jpg") as opened:
        picture = opened.convert("RGB").resize((640, 480))
    matrix = (1, 0, drift, 0, 1, drift / 2)
    moved = picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=(255, 255, 255))
    noise = np.random.default_rng(seed).normal(0, 2, (480, 640, 1))
    noisy = np.clip(np.asarray(moved, np.float32) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue()
