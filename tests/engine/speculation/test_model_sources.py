"""A draft model or a head, good or bad, changes nothing that a (tiny, random, float32) model says, and is asked as it
should be: what it guesses hangs on the text alone, whoever else is served, and a draft model that is the model itself
is always right.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import tiny_head

from engine.batch import Row, RowSampling, Runner, SampledToken
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.sequence import Sequence
from engine.speculation.drafter import Drafter, DraftRow
from engine.speculation.lengths import Always
from preprocess.wire import EngineRequest, SamplingParams, TextOptions
from tests.engine.driving import Sometimes
from tests.engine.late_results import Late
from tests.engine.speculation.test_same_text import TEXT, Heard, every_kind, run, said_plainly

LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
DRAFTERS = ["same model", "another model", "random head", "trained head"]
DRAWS = 1000


def load(folder: Path, **options: Any) -> Runner:
    return load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=2500, max_running=8, **options))


@pytest.fixture(scope="module")
def requests(tiny_model: Path) -> list[EngineRequest]:
    return every_kind(load(tiny_model))


@pytest.fixture(scope="module")
def plain(tiny_model: Path, requests: list[EngineRequest]) -> dict[str, Heard]:
    return said_plainly(load(tiny_model), tiny_model, requests)


def another_model(tiny_model: Path, folder: Path) -> Path:
    """The same weights with noise, so that it is right sometimes."""
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: tensor + 0.15 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 2
        else tensor
        for name, tensor in weights.items()
    }
    save_file(noisy, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def train(tiny_model: Path, head: Path, requests: Ordered[EngineRequest], plain: Mapping[str, Heard]) -> Path:
    """Fit the output layer of a random head to what was said: the least squares of its hidden states, which follow from
    its logits.
    """
    runner = load(tiny_model, draft_head=str(head))
    assert runner.drafter is not None
    weights = load_file(head / "model.safetensors")
    inverse = torch.linalg.pinv(weights["lm_head.weight"])
    runner.slot_table[0, :200] = torch.arange(1, 201)
    states, said = [], []
    for one in requests:
        if one.media:
            continue
        prompt = torch.frombuffer(bytearray(one.prompt_ids), dtype=torch.int64).tolist()
        text = [*prompt, *plain[one.request_id].ids]
        runner.step([Row(0, 0, text[:-1], RowSampling(SamplingParams(max_tokens=1), 0))])
        for at in range(1, len(text) - 1):
            logits = runner.drafter.forward([DraftRow(0, at, [text[at]])], guessed=False)
            if at >= len(prompt) - 1:
                states.append(inverse @ logits[0])
                said.append(text[at + 1])
    x = torch.stack(states)
    y = torch.nn.functional.one_hot(torch.tensor(said), runner.vocab_size).float()
    fitted = torch.linalg.solve(x.T @ x + 0.01 * torch.eye(x.shape[1]), x.T @ y).T
    fitted = 12 * fitted  # sure enough to be drawn, too
    save_file({**weights, "lm_head.weight": fitted.contiguous()}, head / "model.safetensors")
    return head


@pytest.fixture(scope="module")
def runners(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, requests: list[EngineRequest], plain: dict[str, Heard]
) -> dict[str, Runner]:
    folder = tmp_path_factory.mktemp("drafters")
    heads = [tiny_head(folder / f"head{seed}", tiny_model, seed=seed, fields=LAYERS) for seed in range(2)]
    train(tiny_model, heads[1], requests, plain)
    return {
        "same model": load(tiny_model, draft_model=str(tiny_model)),
        "another model": load(tiny_model, draft_model=str(another_model(tiny_model, folder / "another"))),
        "random head": load(tiny_model, draft_head=str(heads[0])),
        "trained head": load(tiny_model, draft_head=str(heads[1])),
    }


EngineOf = Callable[..., Engine]


@pytest.fixture
def engine_of(runners: dict[str, Runner], tiny_model: Path) -> EngineOf:
    def make(drafter: str, length: int = 7, *, late: bool = False, **options: Any) -> Engine:
        runner = runners[drafter]
        assert runner.drafter is not None
        mode = runner.drafter.kind.source
        config = EngineConfig(str(tiny_model), **{"check": True, "max_running": 8, "speculation": mode} | options)
        engine = Engine(config, Late(runner) if late else runner)
        engine.speculator.controller = Always(length)
        return engine

    return make


def differing(heard: Mapping[str, Heard], plain: Mapping[str, Heard]) -> list[str]:
    return [name for name, own in heard.items() if not own.same_as(plain[name])]


def predictions(heard: Mapping[str, Heard]) -> tuple[int, int]:
    """All that were right, and all that were wrong."""
    return tuple(sum(own.predictions[side] for own in heard.values()) for side in (0, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk", [10, 64])
@pytest.mark.parametrize("retract_every", [0, 5], ids=["straight", "retracted"])
@pytest.mark.parametrize("length", [2, 15])
@pytest.mark.parametrize("drafter", ["another model", "trained head"])
def test_no_drafter_changes_anything(
    engine_of: EngineOf,
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    drafter: str,
    prefix_cache: bool,
    chunk: int,
    retract_every: int,
    length: int,
) -> None:
    engine = engine_of(drafter, length, prefix_cache=prefix_cache, max_batched_tokens=chunk)
    heard = run(engine, requests, retract_every=retract_every)
    assert differing(heard, plain) == []
    right, wrong = predictions(heard)
    assert min(right, wrong) > 10
    assert bool(retract_every) == bool(engine.stats().num_retracted)


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_all_sources_together_change_nothing(
    engine_of: EngineOf, requests: list[EngineRequest], plain: dict[str, Heard], drafter: str, late: bool
) -> None:
    engine = engine_of(drafter, 7, late=late, speculation="auto")
    for _ in range(2):
        assert differing(run(engine, requests), plain) == []
    stats = engine.stats()
    own = "head" if "head" in drafter else "draft_model"
    assert getattr(stats, f"drafted_{own}") > 20
    assert min(stats.drafted_echo, stats.drafted_ngram, stats.drafted_grammar, stats.drafted_habit) > 0
    drafted = sum(getattr(stats, name) for name in stats.__struct_fields__ if name.startswith("drafted"))
    assert drafted == sum(engine.speculator.drafted.values())


@pytest.mark.parametrize("length", [1, 3, 15])
def test_the_model_itself_is_always_right(
    engine_of: EngineOf, requests: list[EngineRequest], plain: dict[str, Heard], length: int
) -> None:
    """Also where tokens are drawn: it draws with the same noise, under the same penalties and masks."""
    text_only = [one for one in requests if not one.media]
    for wanted in (text_only, *[[one] for one in text_only]):
        heard = run(engine_of("same model", length), wanted)
        for one in wanted:
            own = heard[one.request_id]
            assert own.same_as(plain[one.request_id])
            if not one.sampling.grammar:  # what ends one may stand before a draft's last token
                assert own.predictions[1] == 0
                assert own.num_events == 1 + -(-(len(own.ids) - 1) // (1 + length))


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("retract_every", [0, 4], ids=["straight", "retracted"])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_is_asked_now_and_then_knows_the_whole_text(
    engine_of: EngineOf,
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    seed: int,
    prefix_cache: bool,
    retract_every: int,
) -> None:
    """Were an entry missing or another text's, the model itself would be wrong sometimes."""
    text_only = [one for one in requests if not one.media and not one.sampling.grammar]
    engine = engine_of("same model", 4, prefix_cache=prefix_cache, max_batched_tokens=24)
    engine.speculator.controller = Sometimes(4, seed)
    wanted = [renamed(one, f"{one.request_id}-{copy}") for copy in range(3) for one in text_only]
    heard = run(engine, wanted, retract_every=retract_every)
    assert [name for name, own in heard.items() if not own.same_as(plain[name.partition("-")[0]])] == []
    right, wrong = predictions(heard)
    assert wrong == 0
    assert right > 20


def renamed(request: EngineRequest, name: str) -> EngineRequest:
    import msgspec

    return msgspec.structs.replace(request, request_id=name)


def guesses_of(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Fills with what the drafter guesses, by request and number of tokens that were out."""
    assert engine.speculator.model is not None
    draft = engine.speculator.model.draft
    guessed: dict[tuple[str, int], list[int]] = {}

    def record(wanted: Ordered[tuple[Sequence, int]], most_late: int) -> list[list[int]]:
        result = draft(wanted, most_late)
        for (sequence, _), token_ids in zip(wanted, result, strict=True):
            guessed[sequence.request_id, len(sequence.output_ids)] = token_ids
        return result

    engine.speculator.model.draft = record  # type: ignore[method-assign]
    return guessed


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_eight_together_are_guessed_as_each_alone(
    engine_of: EngineOf, requests: list[EngineRequest], drafter: str
) -> None:
    """The same guesses, so the same acceptance; pictures and all. Were rows, slots or the embeddings of vision tokens
    mixed up, those of a batch would differ.
    """
    eight = requests[:8]
    together = engine_of(drafter, 3)
    guessed = guesses_of(together)
    heard = run(together, eight)
    for one in eight:
        engine = engine_of(drafter, 3)
        alone = guesses_of(engine)
        assert run(engine, [one])[one.request_id].predictions == heard[one.request_id].predictions
        assert alone == {key: own for key, own in guessed.items() if key[0] == one.request_id}
    assert len(guessed) > 30


def test_abort_and_stop_in_the_middle_of_a_verifying_step(
    engine_of: EngineOf, requests: list[EngineRequest], plain: dict[str, Heard], runners: dict[str, Runner]
) -> None:
    for drafter in DRAFTERS:
        engine, runner = engine_of(drafter, 3), runners[drafter]
        step = runner.step

        def interrupted(rows: Ordered[Row], engine: Engine = engine, step: Any = step) -> list[SampledToken]:
            if any(row.drafted for row in rows):
                engine.abort("r0")
                engine.stop("r2", 3)
            result: list[SampledToken] = step(rows)
            return result

        runner.step = interrupted  # type: ignore[method-assign]
        try:
            heard = run(engine, requests[:5])
        finally:
            runner.step = step  # type: ignore[method-assign]
        assert (heard["r0"].end, heard["r2"].end) == (("abort", None), ("stop", None))
        assert differing({name: heard[name] for name in ("r1", "r3", "r4")}, plain) == []
        engine.check()
        assert engine.stats().kv_slots_used == 0


@pytest.mark.parametrize("drafter", ["same model", "trained head"])
def test_the_next_turn_is_guessed_as_if_nobody_had_drafted_before(
    engine_of: EngineOf, requests: list[EngineRequest], plain: dict[str, Heard], drafter: str
) -> None:
    """Entries of a prefix serve the next request, with or without what drafts made of them; the rest is made up for."""
    first = requests[1]  # with a picture
    said = plain[first.request_id].ids
    prompt = torch.frombuffer(bytearray(first.prompt_ids), dtype=torch.int64).tolist()
    ids = torch.tensor([*prompt, *said, *TEXT], dtype=torch.int64).numpy().tobytes()
    params = SamplingParams(max_tokens=12, temperature=0.0)
    second = EngineRequest("second", ids, first.media, params, TextOptions(), 0.0)
    results = []
    for length in (0, 5):
        engine = engine_of(drafter, length)
        run(engine, [first])
        engine.speculator.controller = Always(3)
        guessed = guesses_of(engine)
        heard = run(engine, [second])["second"]
        assert engine.stats().prefix_hit_tokens > len(prompt)
        results.append((heard.ids, heard.predictions, guessed))
    assert results[0] == results[1]
    assert results[0][2]


def test_of_two_that_share_a_prompt_one_computes_it(
    engine_of: EngineOf, requests: list[EngineRequest], runners: dict[str, Runner]
) -> None:
    drafter = runners["same model"].drafter
    assert drafter is not None
    computed: list[int] = []
    forward = drafter.forward

    def counted(rows: Ordered[DraftRow], *, guessed: bool) -> torch.Tensor:
        computed.extend(len(row.token_ids) for row in rows if not guessed)
        return forward(rows, guessed=guessed)

    engine = engine_of("same model", 1)
    drafter.forward = counted  # type: ignore[method-assign]
    try:
        run(engine, [requests[0]])
        run(engine, [renamed(requests[0], name) for name in ("a", "b")])
    finally:
        drafter.forward = forward  # type: ignore[method-assign]
    assert sorted(computed, reverse=True)[:2] == [26, 2]  # the prompt and a token; later only what came since


@pytest.mark.parametrize("drafter", ["same model", "trained head"])
def test_a_long_text_is_caught_up_with_in_pieces(
    engine_of: EngineOf,
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    drafter: str,
    runners: dict[str, Runner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners[drafter].drafter, "most_late", 7)
    heard = run(engine_of(drafter, 3), requests)
    assert differing(heard, plain) == []
    assert sum(predictions(heard)) > 20


def test_a_drafter_that_fails_is_not_asked_again_and_nobody_notices(
    engine_of: EngineOf, requests: list[EngineRequest], plain: dict[str, Heard], runners: dict[str, Runner]
) -> None:
    drafter = runners["same model"].drafter
    assert drafter is not None
    engine = engine_of("same model", 3)
    forward, calls = drafter.forward, itertools.count()

    def breaking(rows: Ordered[DraftRow], *, guessed: bool) -> torch.Tensor:
        if next(calls) == 6:
            raise RuntimeError("the drafter broke")
        return forward(rows, guessed=guessed)

    drafter.forward = breaking  # type: ignore[method-assign]
    try:
        heard = run(engine, requests)
    finally:
        drafter.forward = forward  # type: ignore[method-assign]
    assert differing(heard, plain) == []
    assert next(calls) == 7
    assert 0 < engine.stats().drafted_draft_model < 100


@pytest.mark.parametrize("drafter", ["same model", "random head"])
def test_nothing_is_cold_when_it_first_catches_up_or_guesses(
    drafter: str, runners: dict[str, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either is measured by itself, and kernels are made ready when they first run."""
    warm = runners[drafter].drafter
    assert warm is not None
    forward, calls = warm.forward, set()

    def watched(rows: Ordered[DraftRow], *, guessed: bool) -> torch.Tensor:
        calls.add((len(rows[0].token_ids) > 1, rows[0].asks, guessed))
        return forward(rows, guessed=guessed)

    monkeypatch.setattr(warm, "forward", watched)
    warm.warm_up()
    assert calls == {(True, False, False), (True, True, False), (False, True, True)}


def test_it_is_a_drafter(runners: dict[str, Runner]) -> None:
    """As the protocol says, which nothing else holds it to."""
    for name in DRAFTERS:
        drafter: Drafter | None = runners[name].drafter
        assert drafter is not None
        assert 0 < drafter.cost < 2
        assert drafter.max_positions == 1024


@pytest.mark.parametrize("drafter", ["another model", "trained head"])
@pytest.mark.parametrize("params", [{"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.7}])
def test_what_is_drawn_is_distributed_as_without(
    runners: dict[str, Runner], tiny_model: Path, drafter: str, params: dict[str, Any]
) -> None:
    """Third tokens of many seeds, those with drafts others than those without: chi-square."""

    def third(mode: str, first_seed: int) -> Counter[int]:
        options: dict[str, Any] = {"max_running": 8, "speculation": mode}
        engine = Engine(EngineConfig(str(tiny_model), **options), runners[drafter])
        engine.speculator.controller = Always(2)
        ids = torch.tensor(TEXT, dtype=torch.int64).numpy().tobytes()
        wanted = [
            EngineRequest(
                f"{seed}", ids, [], SamplingParams(max_tokens=3, seed=first_seed + seed, **params), TextOptions(), 0.0
            )
            for seed in range(DRAWS)
        ]
        counts: Counter[int] = Counter()
        for first in range(0, DRAWS, 200):
            counts.update(heard.ids[2] for heard in run(engine, wanted[first : first + 200]).values())
        if mode != "none":
            assert sum(engine.speculator.accepted.values()) > (0 if drafter == "trained head" else DRAWS / 10)
        return counts

    source = runners[drafter].drafter
    assert source is not None
    ours, plain = third(source.kind.source, 0), third("none", 1_000_000)
    common = [token for token, count in (ours + plain).items() if count >= 20]
    cells = [(ours[token], plain[token]) for token in common]
    cells.append((DRAWS - sum(a for a, _ in cells), DRAWS - sum(b for _, b in cells)))
    assert len(cells) > 2
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    degrees = len(cells) - 1
    assert chi_square < degrees + 3.3 * (2 * degrees) ** 0.5, (chi_square, degrees)
