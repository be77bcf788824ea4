"""Heads beside native steps: nearer to float32 than torch's are, the same to the bit in any company, and answers that
are what they are without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tiny_heads import tiny_head
from tiny_models import FAMILIES
from tiny_smolvlm import tiny_smolvlm

from engine.batch import Row, RowSampling, VisionRows
from engine.config import EngineConfig
from engine.core import Engine
from engine.cpu.head import NativeHead
from engine.cpu.runner import CpuRunner
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.speculation.drafter import DraftRow
from engine.speculation.lengths import Always
from engine.speculation.torch_drafters import Head, Told
from preprocess.wire import EngineRequest, SamplingParams, TextOptions
from tests.engine.family_parity import CASES, Checked, pixels_of
from tests.engine.family_parity import run as answer
from tests.engine.speculation.test_same_text import every_kind, run, said_plainly
from tests.engine.test_cpu_step import REASON
from tests.engine.test_eagle3 import LAYERS, SPELLINGS, Prompt
from tests.engine.without_amx import without_amx

pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no native step: {REASON}")

MODEL = Path(__file__).parents[3] / "samples" / "model"
GREEDY = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), 0)


@pytest.fixture(autouse=True)
def no_amx() -> Iterator[None]:
    with without_amx():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_smolvlm(tmp_path_factory.mktemp("model"), text={"num_hidden_layers": LAYERS})


def load(folder: Path, dtype: str = "bfloat16", **options: Any) -> TorchRunner:
    with without_amx():
        given = {"threads": 1, "kv_tokens": 900, "max_running": 8} | options
        runner = load_runner(EngineConfig(str(folder), dtype=dtype, **given))  # type: ignore[arg-type]
    assert isinstance(runner, TorchRunner)
    return runner


def rounded(folder: Path) -> Path:
    """A folder whose weights are what bfloat16 makes of them."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: own.bfloat16().float() if own.is_floating_point() else own for name, own in weights.items()}
    save_file(kept, folder / "model.safetensors")
    return folder


def native_head(runner: TorchRunner) -> NativeHead:
    assert isinstance(runner, CpuRunner)
    assert isinstance(runner.drafter, NativeHead)
    return runner.drafter


def told_of(runner: TorchRunner) -> Told:
    assert runner.drafter is not None
    assert runner.drafter.told is not None
    return runner.drafter.told


def prompts_on(runner: TorchRunner) -> list[Prompt]:
    """Three, with no picture, two and one, which the model has computed."""
    prompts = [Prompt(runner, row, pictures) for row, pictures in enumerate((0, 2, 1))]
    runner.step([prompt.row(0, len(prompt.ids) - 1) for prompt in prompts])
    return prompts


def whole(prompts: Sequence[Prompt]) -> list[DraftRow]:
    return [prompt.draft_row(1, len(prompt.ids)) for prompt in prompts]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_is_nearer_to_float32_than_torch_is(
    folder: Path, tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts with pictures, and after guesses; of weights that both types can hold."""
    model = rounded(shutil.copytree(folder, tmp_path / "model"))
    options = {"draft_head": str(rounded(tiny_head(tmp_path / "head", folder, **SPELLINGS[spelling])))}
    exact, native = load(model, "float32", **options), load(model, **options)
    native_head(native)
    assert native.facts()["kernel"] == "native"
    monkeypatch.setattr("engine.cpu.native.library", lambda: None)
    torchs = load(model, **options)
    assert isinstance(exact.drafter, Head)
    assert isinstance(torchs.drafter, Head)
    said = []
    for runner in (exact, native, torchs):
        prompts = prompts_on(runner)
        assert runner.drafter is not None
        told, its = told_of(runner), told_of(exact)
        told.features.copy_(its.features.bfloat16())  # the same for all: what the head makes of it is to be compared
        told.seen.copy_(its.seen.bfloat16())
        logits = [runner.drafter.forward(whole(prompts), guessed=False)]
        for step in range(3):
            rows = [DraftRow(prompt.table_row, len(prompt.ids) + step, [70 + step]) for prompt in prompts]
            logits.append(runner.drafter.forward(rows, guessed=True))
        said.append(torch.cat(logits))
    known = said[0].isfinite()
    assert torch.equal(known, said[1].isfinite())
    errors = [float((own - said[0])[known].norm() / said[0][known].norm()) for own in said]
    assert errors[1] < 0.03
    assert errors[1] < errors[2]


def test_a_step_tells_what_its_layers_make(folder: Path, tmp_path: Path) -> None:
    """As torch does in float32, of every token, and embeddings of vision tokens; nothing of anybody else's slots."""
    options = {"draft_head": str(tiny_head(tmp_path / "head", folder))}
    exact, native = load(folder, "float32", **options), load(folder, **options)
    for runner in (exact, native):
        prompts_on(runner)
    for ours, theirs in zip(
        (told_of(native).features, told_of(native).seen), (told_of(exact).features, told_of(exact).seen), strict=True
    ):
        assert torch.equal(ours.any(1), theirs.any(1))
        assert (ours - theirs).norm() / theirs.norm() < 0.03


def test_a_head_turned_on_changes_no_bit_of_a_step(folder: Path, tmp_path: Path) -> None:
    head = tiny_head(tmp_path / "head", folder)
    logits = []
    for options in ({}, {"draft_head": str(head)}):
        runner = load(folder, **options)
        prompts = [Prompt(runner, row, pictures) for row, pictures in enumerate((0, 2, 1))]
        parts = [runner.logits([prompt.row(0, 9) for prompt in prompts])]
        parts.append(runner.logits([prompt.row(9, len(prompt.ids)) for prompt in prompts]))
        logits.append(torch.cat(parts))
    assert torch.equal(*logits)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("spelling", ["as published", "names with a prefix, a part of the vocabulary"])
def test_guesses_are_the_same_in_any_company(folder: Path, tmp_path: Path, spelling: str, threads: int) -> None:
    """Alone and together, catching up at once or in pieces, in one call or one after the other: not one bit differs."""
    runner = load(folder, draft_head=str(tiny_head(tmp_path / "head", folder, **SPELLINGS[spelling])))
    drafter = native_head(runner)
    prompts = prompts_on(runner)
    lengths = [5, 1, 3]
    alone, logits = [], []
    for prompt, length in zip(prompts, lengths, strict=True):
        alone += drafter.guess(whole([prompt]), [length], [GREEDY])
        logits.append(drafter.forward(whole([prompt]), guessed=False))
    assert [len(guesses) for guesses in alone] == lengths
    drafter.threads = threads
    assert drafter.guess(whole(prompts), lengths, [GREEDY] * 3) == alone
    assert torch.equal(drafter.forward(whole(prompts), guessed=False), torch.cat(logits))
    for cut in (2, 9):
        drafter.forward([prompt.draft_row(1, cut, asks=False) for prompt in prompts], guessed=False)
        rows = [prompt.draft_row(cut, len(prompt.ids)) for prompt in prompts]
        assert drafter.guess(rows, lengths, [GREEDY] * 3) == alone
    step = drafter.forward(whole(prompts), guessed=False)
    for index in range(5):
        asked = [row for row in range(3) if lengths[row] > index]
        assert step.argmax(1).tolist() == [alone[row][index] for row in asked]
        following = [row for row in asked if lengths[row] > index + 1]
        if following:
            rows = [DraftRow(row, len(prompts[row].ids) + index, [alone[row][index]]) for row in following]
            step = drafter.forward(rows, guessed=True)


def masked_draw(words: NDArray[np.int32]) -> RowSampling:
    """A greedy draw among some ids."""
    return replace(GREEDY, allowed=SimpleNamespace(words=lambda: words))  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["as published", "names with a prefix, a part of the vocabulary"])
def test_a_first_guess_is_one_that_may_come(folder: Path, tmp_path: Path, spelling: str) -> None:
    runner = load(folder, draft_head=str(tiny_head(tmp_path / "head", folder, **SPELLINGS[spelling])))
    drafter = native_head(runner)
    prompts = prompts_on(runner)
    logits = drafter.forward(whole(prompts), guessed=False)
    known = logits[0].isfinite().nonzero().flatten()
    allowed = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:9]]
    bits = np.zeros(32 * -(-runner.vocab_size // 32), np.uint8)
    bits[allowed.numpy()] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)
    masked = logits.new_full(logits.shape, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    guesses = drafter.guess(whole(prompts), [1, 2, 1], [masked_draw(words), GREEDY, masked_draw(words)])
    assert [own[0] for own in guesses] == [int(masked[0].argmax()), int(logits[1].argmax()), int(masked[2].argmax())]


def test_guesses_write_to_their_own_slots_alone(folder: Path, tmp_path: Path) -> None:
    """A row that guesses less than its neighbour has no slots beyond."""
    runner = load(folder, draft_head=str(tiny_head(tmp_path / "head", folder)))
    drafter = native_head(runner)
    prompts = prompts_on(runner)
    lengths = [4, 1, 2]
    before = drafter.pool.clone()
    drafter.guess(whole(prompts), lengths, [GREEDY] * 3)
    changed = (drafter.pool != before).flatten(1).any(1)
    own = torch.zeros_like(changed)
    for prompt, length in zip(prompts, lengths, strict=True):
        own[runner.slot_table[prompt.table_row, 1 : len(prompt.ids) + length - 1].long()] = True
    assert torch.equal(changed, own)


@pytest.fixture(scope="module")
def requests(tiny_model: Path) -> list[EngineRequest]:
    return every_kind(load(tiny_model))


@pytest.mark.parametrize("length", [1, 3, 15])
@pytest.mark.parametrize("retract_every", [0, 5], ids=["straight", "retracted"])
@pytest.mark.parametrize("chunk", [10, 64])
def test_no_answer_changes(
    tiny_model: Path, tmp_path: Path, requests: list[EngineRequest], length: int, retract_every: int, chunk: int
) -> None:
    """Greedy, drawn, penalised, shaped; with pictures and without; all sources, and the head by itself."""
    plain = said_plainly(load(tiny_model, kv_tokens=2500), tiny_model, requests)
    fields = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = tiny_head(tmp_path / "head", tiny_model, fields=fields)
    runner = load(tiny_model, kv_tokens=2500, draft_head=str(head))
    native_head(runner)
    for mode in ("head", "auto"):
        options: dict[str, Any] = {"speculation": mode, "max_running": 8, "max_batched_tokens": chunk, "check": True}
        engine = Engine(EngineConfig(str(tiny_model), **options), runner)
        engine.speculator.controller = Always(length)
        heard = run(engine, requests, retract_every=retract_every)
        assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
        assert engine.speculator.drafted["head"] > 20
        assert engine.speculator.model is not None
        assert not engine.speculator.model.is_broken


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_positions_of_three_axes(tmp_path: Path, family: str) -> None:
    """The same text as without, and logits that are torch's in float32."""
    checked = Checked(FAMILIES[family](tmp_path / "model"))
    text = json.loads((checked.folder / "config.json").read_text())["text_config"]
    rope, count = text["rope_parameters"], text["num_hidden_layers"]
    axes = {name: rope[name] for name in ("mrope_section", "mrope_interleaved") if name in rope}
    fields = {
        "eagle_aux_hidden_state_layer_ids": [count - 1, count // 2, count],
        "rope_scaling": {"rope_type": "default", **axes},
        "head_dim": 2 * sum(rope["mrope_section"]),
    }
    head = str(tiny_head(tmp_path / "head", checked.folder, fields=fields))
    requests = [checked.request(case, max_tokens=12) for case in CASES if checked.shows(case)]
    said, drafted = [], []
    for mode in ("none", "head"):
        runner = load(checked.folder, kv_tokens=8192, draft_head=head)
        native_head(runner)
        engine = Engine(EngineConfig("", max_running=8, speculation=mode, check=True), runner)  # type: ignore[arg-type]
        engine.speculator.controller = Always(3)
        for request in requests:
            engine.submit(request, pixels_of)
        said.append(answer(engine))
        drafted.append(sum(engine.speculator.drafted.values()))
    assert said[0] == said[1]
    assert drafted[1] > 2 * len(requests)

    positions = np.stack([np.arange(30), np.arange(30) // 4, np.arange(30) % 7]).astype(np.int32)
    ids = [(31 * index) % 90 + 5 for index in range(31)]
    logits = []
    for dtype in ("float32", "bfloat16"):
        runner = load(checked.folder, dtype, kv_tokens=200, draft_head=head)
        runner.slot_table[0, :60] = torch.arange(1, 61)
        runner.step([Row(0, 0, ids[:30], GREEDY, positions=positions)])
        assert runner.drafter is not None
        rows = [DraftRow(0, 1, ids[1:], positions=positions, position_delta=-9)]
        own = [runner.drafter.forward(rows, guessed=False)]
        for step in range(3):
            own.append(runner.drafter.forward([DraftRow(0, 31 + step, [40 + step], position_delta=-9)], guessed=True))
        logits.append(torch.cat(own))
        if isinstance(runner.drafter, NativeHead):
            best = own[0].argmax(1).tolist()
            guesses = runner.drafter.guess(rows, [2], [GREEDY])[0]
            runner.drafter.forward(rows, guessed=False)
            following = [DraftRow(0, 31, best, position_delta=-9)]
            assert guesses == [*best, int(runner.drafter.forward(following, guessed=True)[0].argmax())]
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.03


def talk(number: int) -> EngineRequest:
    """Words about a picture that is none, as one of the bundled model's."""
    ids = torch.tensor([1, 4, *range(300 + 7 * number, 320 + 9 * number)], dtype=torch.int64)
    params = SamplingParams(max_tokens=32, temperature=0.0)
    return EngineRequest(f"{number}", ids.numpy().tobytes(), [], params, TextOptions(), 0.0)


def test_the_bundled_head_is_right_as_often_in_a_batch_as_alone() -> None:
    runner = load(MODEL, speculation="head", kv_tokens=2000)
    native_head(runner)
    counts = []
    for together in (1, 8):
        engine = Engine(EngineConfig(str(MODEL), speculation="head", max_running=8), runner)
        engine.speculator.controller = Always(3)
        answers: dict[str, list[int]] = {}
        for first in range(0, 8, together):
            heard = run(engine, [talk(number) for number in range(first, first + together)])
            answers |= {name: own.ids for name, own in heard.items()}
        counts.append((answers, engine.speculator.drafted["head"], engine.speculator.accepted["head"]))
    assert counts[0] == counts[1]
    assert counts[0][2] > 20


def test_the_bundled_head_guesses_what_it_guesses_in_float32() -> None:
    """About a picture, after each word of a text; where float32 itself is sure."""
    ids = [1, *[3] * 64, *[(97 * index) % 5000 + 300 for index in range(40)]]
    vision = np.array([token_id == 3 for token_id in ids])
    said = []
    for dtype in ("float32", "bfloat16"):
        runner = load(MODEL, dtype, speculation="head", kv_tokens=600, max_running=2)
        side = runner.encoder.image_size
        pixels = torch.randint(
            0, 256, (1, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        embeddings = runner.encode([pixels])[0]
        runner.slot_table[0, :200] = torch.arange(1, 201)
        runner.step([Row(0, 0, ids[:-1], GREEDY, [VisionRows(1, 0, 64, embeddings)])])
        assert runner.drafter is not None
        logits = [runner.drafter.forward([DraftRow(0, 1, ids[1:66], vision[1:66])], guessed=False)]
        for at in range(66, len(ids)):
            logits.append(runner.drafter.forward([DraftRow(0, at, [ids[at]])], guessed=False))
        said.append(torch.cat(logits))
    exact, native = said
    assert (exact - native).norm() / exact.norm() < 0.02
    clear = exact.topk(2).values.diff().abs().squeeze(1) > 0.1
    assert int(clear.sum()) > 20
    assert torch.equal(exact.argmax(1)[clear], native.argmax(1)[clear])


def test_it_is_there_when_asked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In native calls where steps are, in torch where they are not or its sizes are none that native takes."""
    model = tiny_smolvlm(tmp_path / "model", text={"num_hidden_layers": LAYERS})
    head = tiny_head(model / "head", model)
    assert load(model).drafter is None
    native_head(load(model, speculation="head"))
    native_head(load(model, draft_head=str(head)))
    wide = load(model, draft_head=str(tiny_head(tmp_path / "wide", model, fields={"head_dim": 258})))
    assert isinstance(wide.drafter, Head)
    assert wide.facts()["kernel"] == "torch: the draft head's heads are larger than native takes"
    monkeypatch.setattr("engine.cpu.native.library", lambda: None)
    assert isinstance(load(model).drafter, Head)
    assert isinstance(load(model, speculation="head").drafter, Head)
