"""`beholder bench replay`: what checking drafts costs and brings, at any acceptance: the text and its drafts are
scripted.

The model computes every step, and what it says is replaced by a known text, so that guesses are right as often as
`--accuracy` says: each with that probability, given that those before it are right. Trees guess the first `--branches`
tokens a second time, and such a guess is right with probability `--second` where the first is wrong; they hold as many
tokens as chains do. Nothing here hangs on what the weights say, so random ones will do, on any device that checks
drafts. Everything goes through the engine's own loop.

    chain   `--length` drafts in a row, always
    tree    the likeliest `--length` drafts of a tree, always, where the device checks trees
    auto    as the controller decides, from both, once four rounds that do not count have taught it what checks bring
            here; a look at it takes some 10 µs a stream, ten times as long as at sources in native code
    model   `--length` guesses of `--draft-head` or `--draft-model`, always: it makes them, and they are replaced by the
            script's, so that what guessing costs is the model's, and how often guesses are right is not
    asked   the same, as the controller decides

Machines are noisy, the host of a GPU too, on which short steps wait: so each round of a row comes right after a plain
one. `step ×` (what a step takes by a plain one) and `time ÷` (what a plain token takes by one here) are medians of the
rounds, with the quartiles of `time ÷`. Steps that compute prompts or in which a stream has ended do not count; first
tokens, which come with a prompt, are not guessed. Every size of step is run once before anything is timed, so that no
graph is captured later; on a GPU times are ordinary time, from one step's results to the next one's.

    beholder bench replay [--model FOLDER] [--device cuda] [--draft-model FOLDER | --draft-head FOLDER]
                            [--streams 1,4,16] [--accuracy 0,0.5,0.8,1] [--length 1,3,7]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from preprocess.wire import TokenEvents
from server.bench.arguments import count, counts, probabilities, probability
from server.bench.figures import table_line
from server.bench.speculation import Bench, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Ordered

    from engine.core import Engine
    from engine.sequence import Sequence
    from engine.speculation.ahead import Ahead
    from engine.speculation.beliefs import Beliefs
    from engine.speculation.lengths import Lengths
    from engine.speculation.model_drafting import ModelDrafting
    from engine.speculation.replay import Replay
    from preprocess.wire import OutputStart

SHAPES: Final = ("chain", "tree", "auto", "model", "asked")
OF_MODELS: Final = ("model", "asked")
DECIDED: Final = ("auto", "asked")
"""Shapes for which a model guesses, and those in which the controller says how much."""
TEACHING: Final = 4
"""Rounds of the latter that do not count, of the others one: a server has served for longer, and a host that has no
time to spare learns by and by.
"""


OUTLIER: Final = 3.0
"""What a machine adds to a step beyond so many times the median is not the drafts' doing; waits in vain are."""


@dataclasses.dataclass(frozen=True)
class Script:
    """How text is guessed: see the options of the same names."""

    lengths: list[int]
    branches: int
    second: float


def main(arguments: list[str]) -> int:
    """Print the table; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--streams", type=counts, default=[1, 4, 16], help="clients at once (default: 1,4,16)")
    parser.add_argument(
        "--accuracy",
        type=probabilities,
        default=[0.0, 0.5, 0.8, 1.0],
        help="how often guesses are right (default: 0,0.5,0.8,1)",
    )
    parser.add_argument("--length", type=counts, default=[7], help="drafts that a step checks (default: 7)")
    parser.add_argument("--branches", type=count, default=2, help="tokens that trees guess twice (default: 2)")
    parser.add_argument(
        "--second", type=probability, default=0.5, help="how often the second guess is right (default: 0.5)"
    )
    parser.add_argument("--tokens", type=count, default=200, help="tokens of each answer (default: 200)")
    parser.add_argument("--rounds", type=count, default=5, help="rounds of every row (default: 5)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which of them (default: all)")
    parser.add_argument("--draft-model", default="", help="a smaller model that guesses (default: none)")
    parser.add_argument("--draft-head", default="", help="a head that guesses (default: none)")
    parser.add_argument("--device", default="auto", help="where it runs (default: auto)")
    parser.add_argument("--dtype", default="auto", help="type of the weights (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    unknown = set(options.shapes.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"unknown shapes {', '.join(sorted(unknown))}; expected some of {', '.join(SHAPES)}")
    if options.tokens < 2:
        parser.error("--tokens must be at least 2")
    places = {"model": options.model, "device": options.device, "dtype": options.dtype}
    places |= {"draft_model": options.draft_model, "draft_head": options.draft_head}
    bench = ReplayBench(places, Script(options.length, options.branches, options.second))
    shapes = [shape for shape in options.shapes.split(",") if shape in bench.shapes]
    if not shapes:
        print(f"beholder: {options.shapes}: there is nothing to measure, expected {bench.shapes}", file=sys.stderr)
        return 2
    rows = []
    for num_streams in options.streams:
        for row in bench.table(num_streams, options.accuracy, shapes, options.tokens, options.rounds):
            rows.append(row)
            if not options.json:
                print(table_line(row, header=len(rows) == 1), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


class ReplayBench(Bench):
    """One loaded model that answers with a text it is given.

    Attributes:
        shapes: What there is to measure: guesses of a model where there is one.
    """

    def __init__(self, options: Mapping[str, object], script: Script) -> None:
        super().__init__({"speculation": "auto", **options})
        has_model = self._runner.drafter is not None
        self.shapes = [shape for shape in SHAPES if has_model or shape not in OF_MODELS]
        self._guesses = script
        self._taught: dict[tuple[str, float], tuple[Lengths, Beliefs, Ahead]] = {}

    def table(
        self, num_streams: int, accuracies: list[float], shapes: list[str], tokens: int, rounds: int
    ) -> list[dict[str, Any]]:
        """The figures of each shape and length at each accuracy.

        Raises:
            RuntimeError: There are more streams than sequences may run at once.
        """
        if num_streams > self._config.max_running:
            raise RuntimeError(f"{num_streams} streams, but at most {self._config.max_running} sequences run at once")
        self._taught.clear()
        asked = [("", "What is written in the picture?")]
        streams = [
            Stream([self._ask(f"{index}", asked, max_tokens=tokens, ignore_eos=True, seed=331 * index)])
            for index in range(num_streams)
        ]
        lengths = self._guesses.lengths
        wanted = [
            (shape, length, accuracy)
            for accuracy in accuracies
            for shape in shapes
            for length in (lengths if shape not in DECIDED else [max(lengths)])
        ]
        found: dict[tuple[str, int, float], list[tuple[_Steps, _Steps]]] = {key: [] for key in wanted}
        self._run_sizes(num_streams)
        for number in range(1 - TEACHING, rounds + 1):
            for key in wanted:
                if number < 0 and key[0] not in DECIDED:
                    continue
                plain = self._plain(streams)
                steps = self._replay(streams, *key, number)
                if number > 0:
                    found[key].append((plain, steps))
            told = f"round {number} of {rounds}" if number > 0 else "learning"
            print(f"{num_streams} streams: {told}", file=sys.stderr, flush=True)
        return [_row(num_streams, shape, length, accuracy, pairs) for (shape, length, accuracy), pairs in found.items()]

    def _run_sizes(self, num_streams: int) -> None:
        """Steps of so many rows, of every width that drafts give them: on nobody's data, with no engine around."""
        from engine.batch import Row, RowSampling
        from engine.speculation.chains import LENGTHS
        from preprocess.wire import SamplingParams

        how = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
        for length in (0, *(length for length in LENGTHS if length <= self._runner.max_drafts)):
            guesses = [how] * length
            rows = [Row(row, 1, [0] * (1 + length), how, drafted=guesses) for row in range(num_streams)]
            for _ in range(2):
                self._runner.step(rows)

    def _plain(self, streams: list[Stream]) -> _Steps:
        steps = _Steps(len(streams))
        self._run(streams, "none", self._dictation, lambda engine: steps.watch(engine, self._clock))
        return steps

    def _replay(self, streams: list[Stream], shape: str, length: int, accuracy: float, seed: int) -> _Steps:
        """One round of one row."""
        steps = _Steps(len(streams))
        text, guesses = self._dictation, self._guesses
        answers = {}
        for request in (request for stream in streams for request in stream.requests):
            params = request.sampling
            answers[request.request_id] = [text[(params.seed + n) % len(text)] for n in range(params.max_tokens)]

        def adjust(engine: Engine) -> None:
            from engine.speculation.ahead import Ahead
            from engine.speculation.beliefs import Beliefs
            from engine.speculation.lengths import Always
            from engine.speculation.replay import Replay

            steps.watch(engine, self._clock)
            vocab, branches = self._runner.vocab_size, 0 if shape == "chain" else guesses.branches
            source = Replay(answers, accuracy, vocab, seed, branches=branches, second=guesses.second)
            if shape in OF_MODELS:
                assert engine.speculator.model is not None
                _replace_guesses(engine.speculator.model, source)
            else:
                engine.speculator.model = None
            engine.speculator.sources = [source] if shape not in OF_MODELS else []
            engine.speculator.max_first_drafts = 0  # else short answers may be whole with their first step
            if shape in DECIDED:
                learnt = self._taught.setdefault((shape, accuracy), (self._controller(), Beliefs(), Ahead()))
                engine.speculator.controller, engine.speculator.beliefs, engine.speculator.ahead = learnt
            else:
                engine.speculator.controller = Always(length)

        self._run(streams, "auto", text, adjust)
        return steps


class _Steps:
    """What the steps of one round took, and gave: of those in which all streams decode and nothing else is done."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._times_ms: dict[int, list[float]] = {}  # by about how many drafts were checked
        self._until_s = 0.0
        self.tokens = 0
        self.drafted = 0

    def watch(self, engine: Engine, clock: Callable[[], float]) -> None:
        """Look at each step of an engine."""
        from engine.step_costs import size_class

        step = engine.step
        self._until_s = clock()

        def watched() -> list[OutputStart | TokenEvents]:
            running = engine.scheduler.running
            # All have begun: first tokens come with prompts.
            decodes = len(running) == self._num_streams and all(sequence.output_ids for sequence in running)
            drafted = sum(engine.speculator.drafted.values())
            told = step()
            events = [event for message in told if isinstance(message, TokenEvents) for event in message.events]
            tokens = sum(len(event.token_ids) for event in events)
            if decodes and not tokens:  # a step was sent whose results the next call brings
                return told
            now_s = clock()
            elapsed_ms, self._until_s = 1000 * (now_s - self._until_s), now_s
            if decodes:
                drafted = sum(engine.speculator.drafted.values()) - drafted
                self._times_ms.setdefault(size_class(drafted) if drafted else 0, []).append(elapsed_ms)
                self.tokens += tokens
                self.drafted += drafted
            return told

        engine.step = watched  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        """Of these steps."""
        return sum(len(times_ms) for times_ms in self._times_ms.values())

    @property
    def step_ms(self) -> float:
        """The mean; of one that took more than `OUTLIER` times what those take that check about as many drafts, no more
        counts. Raises RuntimeError where there was no step.
        """
        if not self.count:
            raise RuntimeError(
                f"{self._num_streams} streams never decoded side by side; expected fewer of them, or more --tokens"
            )
        return sum(map(_without_hiccups, self._times_ms.values())) / self.count

    @property
    def rate(self) -> float:
        """Tokens a millisecond, if all steps were such."""
        return self.tokens / self.count / self.step_ms


def _without_hiccups(times_ms: list[float]) -> float:
    """The sum, but for what `OUTLIER` leaves out."""
    most_ms = OUTLIER * statistics.median(times_ms)
    return sum(min(time_ms, most_ms) for time_ms in times_ms)


def _replace_guesses(model: ModelDrafting, source: Replay) -> None:
    """Have a model guess, and say the script's guesses."""
    from engine.speculation.drafting import Drafting

    draft = model.draft

    def scripted(wanted: Ordered[tuple[Sequence, int]], most_late: int) -> list[list[int]]:
        guessed = []
        for (sequence, _), token_ids in zip(wanted, draft(wanted, most_late), strict=True):
            proposal = source.propose(sequence, Drafting(), len(token_ids)) if token_ids else None
            guessed.append([] if proposal is None else list(proposal.token_ids))
        return guessed

    model.draft = scripted  # type: ignore[method-assign]


def _row(
    num_streams: int, shape: str, length: int, accuracy: float, pairs: list[tuple[_Steps, _Steps]]
) -> dict[str, Any]:
    count = sum(steps.count for _, steps in pairs)
    costs = [steps.step_ms / plain.step_ms for plain, steps in pairs]
    speeds = [steps.rate / plain.rate for plain, steps in pairs]
    low, middle, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
    return {
        "streams": num_streams,
        "accuracy": accuracy,
        "drafts": shape,
        "length": length,
        "drafted/step": sum(steps.drafted for _, steps in pairs) / count / num_streams,
        "tokens/step": sum(steps.tokens for _, steps in pairs) / count / num_streams,
        "plain step ms": statistics.median(plain.step_ms for plain, _ in pairs),
        "step ×": statistics.median(costs),
        "time ÷": middle,
        "from": low,
        "to": high,
    }
