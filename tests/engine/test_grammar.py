"""Answers stay inside their grammars: alone, batched with free rows, retracted, early, late, and when they cannot."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import engine.grammar
from engine.batch import Runner
from engine.config import EngineConfig
from engine.core import Engine
from engine.grammar import Grammars, Wanted, bits_of
from engine.load import load_runner
from preprocess.grammar import GrammarCompiler
from preprocess.wire import EngineRequest, Grammar, Pixels, SamplingParams, TextOptions, TokenEvent, TokenEvents

ENDS = [2, 6]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "year": {"type": ["integer", "null"], "maximum": 9999, "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
TEXT = [(17 * index) % 400 + 30 for index in range(24)]


def compiled(kind: Any, text: object) -> str:
    return GrammarCompiler().compile(Grammar(kind, text if isinstance(text, str) else json.dumps(text), "g")).text


JSON = compiled("json_schema", SCHEMA)
DIGITS = compiled("regex", "[0-9]{3}")
WORDS = compiled("choice", ["yes", "yesterday", "no"])


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> Runner:
    return load_runner(EngineConfig(str(tiny_model), dtype="float32", threads=1, kv_tokens=900, max_running=8))


@pytest.fixture
def engine_of(tiny_model: Path, runner: Runner) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        config = EngineConfig(str(tiny_model), **{"check": True, "max_running": 8, "max_batched_tokens": 64} | options)
        return Engine(config, runner)

    return make


def request(name: str, grammar: str, *, seed: int = 0, ends: list[int] = ENDS, **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 120} | params, grammar=grammar, seed=seed, stop_token_ids=ends)
    prompt = torch.tensor([*TEXT, 30 + seed], dtype=torch.int64).numpy().tobytes()
    return EngineRequest(name, prompt, [], sampling, TextOptions(), 0.0)


def load(pixels: Pixels) -> torch.Tensor:
    raise AssertionError("no pictures here")


def run(engine: Engine, *requests: EngineRequest, retract_every: int = 0) -> dict[str, tuple[list[int], TokenEvent]]:
    """Ids without the end's, and the last event, by request."""
    for wanted in requests:
        engine.submit(wanted, load)
    ids: dict[str, list[int]] = {}
    last: dict[str, TokenEvent] = {}
    steps = 0
    while engine.has_work:
        steps += 1
        assert steps < 5000
        running = [sequence for sequence in engine.scheduler.running if sequence.num_retracted < 2]
        if retract_every and running and steps % retract_every == 0:
            engine.scheduler.retract(running[-1])
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                shown = event.token_ids if event.stop_token_id is None else event.token_ids[:-1]
                ids.setdefault(event.request_id, []).extend(shown)
                if event.finish_reason is not None:
                    last[event.request_id] = event
    return {name: (ids.get(name, []), event) for name, event in last.items()}


def mixed() -> list[EngineRequest]:
    """JSON, digits, words and free text, greedy and not, with penalties, bias, logprobs and filters."""
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 5, "logprobs": 3},
        {"top_p": 0.7, "repetition_penalty": 1.3},
        {"min_p": 0.1, "presence_penalty": 1.0, "logit_bias": {40: 100.0}},
        {},
    ]
    grammars = [JSON, DIGITS, WORDS, ""]
    return [
        request(f"{row}-{column}", grammar, seed=5 * row + column, **own)
        for row, grammar in enumerate(grammars)
        for column, own in enumerate(params)
    ]


def fits(name: str, text: str) -> bool:
    if name.startswith("0-"):
        answer = json.loads(text)
        return list(answer) == ["title", "year", "tags"] and set(answer["tags"]) <= {"red", "green", "blue"}
    if name.startswith("1-"):
        return re.fullmatch("[0-9]{3}", text) is not None
    return text in ("yes", "yesterday", "no") if name.startswith("2-") else True


@pytest.fixture(scope="module")
def alone(tiny_model: Path, runner: Runner) -> dict[str, list[int]]:
    config = EngineConfig(str(tiny_model), max_batched_tokens=512, prefix_cache=False, check=True)
    return {wanted.request_id: run(Engine(config, runner), wanted)[wanted.request_id][0] for wanted in mixed()}


@pytest.mark.parametrize("retract_every", [0, 7], ids=["straight", "retracted"])
@pytest.mark.parametrize("chunk", [9, 512])
def test_mixed_batches_say_what_each_says_alone_and_stay_in_shape(
    engine_of: Callable[..., Engine],
    alone: dict[str, list[int]],
    tokenizer: Tokenizer,
    chunk: int,
    retract_every: int,
) -> None:
    engine = engine_of(max_batched_tokens=chunk)
    for name, (ids, last) in run(engine, *mixed(), retract_every=retract_every).items():
        assert ids == alone[name], name
        if last.finish_reason == "stop":
            assert fits(name, tokenizer.decode(ids, skip_special_tokens=False)), name
        else:
            assert (last.finish_reason, len(ids)) == ("length", 120), name
    assert bool(retract_every) == bool(engine.stats().num_retracted)


def test_most_shaped_answers_finish(alone: dict[str, list[int]], tokenizer: Tokenizer) -> None:
    finished = [name for name, ids in alone.items() if len(ids) < 120 and not name.startswith("3-")]
    assert len(finished) >= 13
    assert all(fits(name, tokenizer.decode(alone[name], skip_special_tokens=False)) for name in finished)


@pytest.mark.parametrize("ends", [ENDS, []], ids=["eos", "ignore-eos"])
@pytest.mark.parametrize("min_tokens", [0, 60])
def test_a_complete_answer_ends_whatever_else_was_asked(
    engine_of: Callable[..., Engine], tokenizer: Tokenizer, ends: list[int], min_tokens: int
) -> None:
    ids, last = run(engine_of(), request("r", DIGITS, ends=ends, min_tokens=min_tokens))["r"]
    assert (last.finish_reason, last.stop_token_id) == ("stop", None)
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(ids))


def test_ends_wait_for_min_tokens_where_the_grammar_can_go_on(engine_of: Callable[..., Engine]) -> None:
    digits = compiled("regex", "[0-9]+")
    short = run(engine_of(), *(request(f"r{seed}", digits, seed=seed) for seed in range(6)))
    assert min(len(ids) for ids, _ in short.values()) < 20
    long = run(engine_of(), *(request(f"r{seed}", digits, seed=seed, min_tokens=20) for seed in range(6)))
    assert min(len(ids) for ids, _ in long.values()) >= 20
    forever = run(engine_of(), request("r", digits, ends=[]))["r"]
    assert (len(forever[0]), forever[1].finish_reason) == (120, "length")


def test_max_tokens_says_length(engine_of: Callable[..., Engine]) -> None:
    ids, last = run(engine_of(), request("r", JSON, max_tokens=4))["r"]
    assert (len(ids), last.finish_reason) == (4, "length")


def test_special_tokens_pass_only_as_an_end(tiny_model: Path, tokenizer: Tokenizer) -> None:
    grammars = Grammars(str(tiny_model), tokenizer.get_vocab_size())
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for text in (compiled("regex", "(.|\n)*"), compiled("json_schema", {"type": "string"}), "start: <[0-6]>"):
        state = grammars.begin(text)
        bits = np.unpackbits(grammars.masks([Wanted(state, ENDS, 0)])[0][0].words().view(np.uint8), bitorder="little")
        allowed = set(np.nonzero(bits)[0].tolist())
        if state.failure is None:
            assert allowed & special <= set(ENDS)
            assert max(allowed) < tokenizer.get_vocab_size()


def test_a_vocabulary_wider_than_the_tokenizer_keeps_its_padding_out(tiny_model: Path, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    grammars = Grammars(str(tiny_model), size + 77)
    words = grammars.masks([Wanted(grammars.begin(compiled("regex", "(.|\n)*")), ENDS, 0)])[0][0].words()
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert len(bits) >= size + 77
    assert bits[:size].sum() > 400
    assert not bits[size:].any()


def test_a_grammar_that_cannot_go_on_fails_alone(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_end = "start: <[3]>"  # only a special token could come, and none may
    free = next(wanted for wanted in mixed() if wanted.request_id == "3-4")
    answers = run(engine_of(), request("bad", dead_end), free)
    assert answers["bad"][1].finish_reason == "error"
    assert answers["bad"][1].error is not None
    assert (answers["bad"][1].error.status, answers["bad"][1].error.code) == (400, "grammar_failed")
    assert answers["3-4"][0] == alone["3-4"]

    monkeypatch.setattr(engine.grammar, "PATIENCE_S", 0.0)
    monkeypatch.setattr(engine.grammar, "FREE_S", 0.0)
    answers = run(engine_of(), request("slow", JSON), free)
    assert answers["slow"][1].finish_reason == "error"
    assert answers["3-4"][0] == alone["3-4"]


def test_a_used_up_grammar_starts_over(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's copies of one grammar share a budget of states; who finds it used up takes a new one."""
    used_up = engine_of()
    num_masks, compiled_texts = 0, []
    mask, compile_ = used_up.grammars._mask, used_up.grammars._compile

    def sometimes(row: Any, matcher: Any) -> str:
        nonlocal num_masks
        num_masks += 1
        return "too many states" if num_masks % 5 == 0 else mask(row, matcher)

    monkeypatch.setattr(used_up.grammars, "_mask", sometimes)
    monkeypatch.setattr(used_up.grammars, "_compile", lambda text: compiled_texts.append(text) or compile_(text))
    answers = run(used_up, *mixed())
    assert len(compiled_texts) > 50
    assert {name: ids for name, (ids, _) in answers.items()} == alone


def test_a_slow_compiler_holds_nobody_else_up(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine_of()
    go_on = threading.Event()
    original = busy.grammars._compile
    monkeypatch.setattr(busy.grammars, "_compile", lambda text: go_on.wait(90) and original(text))
    shaped, free = (next(w for w in mixed() if w.request_id == name) for name in ("0-0", "3-4"))
    busy.submit(shaped, load)
    busy.submit(free, load)
    told: list[str] = []
    for _ in range(400):
        for message in busy.step():
            told += [event.request_id for event in message.events] if isinstance(message, TokenEvents) else []
        if not busy.scheduler.running and "3-4" in told:
            break
    assert set(told) == {"3-4"}
    assert busy.has_work
    for _ in range(50):
        busy.step()  # more steps than a stalled request would be given
    go_on.set()
    assert run(busy)["0-0"][0] == alone["0-0"]


def test_a_request_can_leave_while_its_grammar_compiles(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine_of()
    go_on = threading.Event()
    original = busy.grammars._compile
    monkeypatch.setattr(busy.grammars, "_compile", lambda text: go_on.wait(90) and original(text))
    busy.submit(request("r", JSON), load)
    busy.step()
    busy.abort("r")
    assert [
        event.finish_reason for message in busy.step() if isinstance(message, TokenEvents) for event in message.events
    ] == ["abort"]
    assert not busy.has_work
    go_on.set()


def test_bits() -> None:
    words = bits_of([0, 33, 31, 1000], 2)
    assert words.tolist() == [1 - (1 << 31), 2]


def test_a_row_s_masks_are_those_of_its_tokens_side_by_side(tiny_model: Path, tokenizer: Tokenizer) -> None:
    grammars = Grammars(str(tiny_model), tokenizer.get_vocab_size())
    digits = tokenizer.encode("123", add_special_tokens=False).ids
    wanted = [Wanted(grammars.begin(DIGITS), ENDS, 0, digits[:count]) for count in (0, 1)]
    for asked, masks in zip(wanted, grammars.masks(wanted), strict=True):
        assert len(masks) == 1 + len(asked.drafts)
        assert np.array_equal(masks.words(), np.stack([mask.words() for mask in masks]))
        assert np.array_equal(masks[-1].words(), masks[len(masks) - 1].words())
        assert [mask.row for mask in masks[:1]] == [masks[0].row]
