"""The native step of CPUs: as near to float32 as bfloat16 allows, and each token the same to the bit in any company."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Row, RowSampling, SampledToken, VisionRows
from engine.config import EngineConfig
from engine.cpu.native import INT8, TILED, Vectors, has_tiles, library, why_not
from engine.cpu.runner import CpuRunner
from engine.load import load_runner
from engine.models.decoder import DecoderConfig
from engine.runner import TorchRunner
from engine.sampling import plainly_greedy, sample
from engine.speculation.tree import lineages
from preprocess.blocks.rope import RopeConfig
from preprocess.wire import SamplingParams
from tests.engine.random_decoder import decoder_config, make_runner
from tests.engine.without_amx import without_amx

REASON = why_not(decoder_config(), torch.bfloat16)
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no native step: {REASON}")


@pytest.fixture(autouse=True)
def no_amx() -> Iterator[None]:
    with without_amx():
        yield


SAMPLING = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), 0)

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "the bundled model's heads": {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 64},
    "inputs beyond a block": {"hidden_size": 640, "intermediate_size": 1100, "num_heads": 10, "head_dim": 64},
    "one query head a key head": {"num_heads": 2},
    "seven query heads a key head, biases, M-RoPE": {
        "num_heads": 14,
        "head_dim": 64,
        "qkv_bias": True,
        "rope": RopeConfig(1e6, sections=(8, 12, 12)),
    },
    "biases everywhere, yarn": {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "intermediate_size": 133,
        "rope": RopeConfig(1e4, "yarn", factor=4.0, original_positions=64, scale=1.2),
    },
    "QK-norm, heads of 128, M-RoPE interleaved": {
        "num_heads": 4,
        "head_dim": 128,
        "qk_norm": True,
        "rope": RopeConfig(5e5, sections=(24, 20, 20), interleaved=True),
    },
    "heads of 80": {"head_dim": 80, "num_heads": 4},
    "heads of 96": {"head_dim": 96, "num_heads": 4},
    "heads of 256": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
    "heads of 10, odd sizes everywhere": {
        "vocab_size": 517,
        "hidden_size": 100,
        "intermediate_size": 133,
        "head_dim": 10,
        "num_heads": 9,
        "num_kv_heads": 3,
    },
    "forty query heads a key head": {"num_heads": 40, "num_kv_heads": 1, "head_dim": 16},
}


def _ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _row(index: int, start: int, ids: Sequence[int], *, wanted: int = 1, **fields: Any) -> Row:
    """`wanted`: of how many of its last tokens logits are asked for."""
    return Row(index, start, list(ids), SAMPLING if wanted else None, drafted=[SAMPLING] * (wanted - 1), **fields)


def _all_logits(runner: TorchRunner, ids: Sequence[int], *, cuts: Sequence[int], index: int = 0) -> torch.Tensor:
    """Logits after every id, computed in parts of `cuts` tokens."""
    logits, start = [], 0
    for cut in cuts:
        logits.append(runner.logits([_row(index, start, ids[start : start + cut], wanted=cut)]))
        start += cut
    assert start == len(ids)
    return torch.cat(logits)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(params=["tiles", "AVX-512", "AVX2"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether products of 8 bits and attention are computed in tiles (AMX); all kinds of vectors are used in turn."""
    loaded, kind = library(), request.param
    assert loaded is not None
    if kind == "tiles" and not has_tiles():
        pytest.skip("no tiles (AMX) here")
    if kind == "AVX-512" and loaded.beholder_vectors() < Vectors.AVX512:
        pytest.skip("no AVX-512 (VNNI, BF16) here")
    loaded.beholder_use(Vectors.AVX2 if kind == "AVX2" else Vectors.AVX512)
    monkeypatch.setattr("engine.cpu.native.has_tiles", lambda: kind == "tiles")
    yield kind == "tiles"
    loaded.beholder_use(Vectors.AVX512)


@pytest.mark.parametrize("packed", [True, False], ids=["int8", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("tiles")
def test_it_is_nearer_to_float32_than_torch_is(shape: str, packed: bool) -> None:
    config = decoder_config(**SHAPES[shape])
    ids = _ids(90)
    exact, torchs, native = (
        _all_logits(make_runner(kind, config, dtype, packed=packed), ids, cuts=[37, 1, 1, 16, 5, 30])
        for kind, dtype in ((TorchRunner, torch.float32), (TorchRunner, torch.bfloat16), (CpuRunner, torch.bfloat16))
    )
    assert native.shape == (90, config.vocab_size)
    assert _error(native, exact) < 0.03
    assert _error(native, exact) < _error(torchs, exact)


@pytest.mark.parametrize("packed", [True, False], ids=["int8", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("tiles")
def test_a_token_is_the_same_however_a_sequence_is_cut(shape: str, packed: bool) -> None:
    """Alone, as one of 2 to 16 drafts, in chunks of a prompt: not one bit differs."""
    runner = make_runner(CpuRunner, decoder_config(**SHAPES[shape]), torch.bfloat16, packed=packed)
    ids = _ids(150)
    alone = _all_logits(runner, ids, cuts=[1] * 150)
    assert torch.equal(_all_logits(runner, ids, cuts=[150]), alone)
    assert torch.equal(_all_logits(runner, ids, cuts=[*range(2, 17), 15], index=1), alone)
    assert torch.equal(_all_logits(runner, ids, cuts=[63, 2, 85], index=2), alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["int8", "bfloat16"])
@pytest.mark.usefixtures("tiles")
def test_a_token_is_the_same_in_any_company(packed: bool, threads: int) -> None:
    """64 ragged sequences decode, verify and begin in one step, on any number of threads."""
    config = decoder_config()
    alone = make_runner(CpuRunner, config, torch.bfloat16, packed=packed, rows=64)
    together = make_runner(CpuRunner, config, torch.bfloat16, packed=packed, rows=64)
    assert isinstance(together, CpuRunner)
    together.threads = threads
    prompts = [_row(index, 0, _ids(1 + 3 * index % 140, seed=index)) for index in range(64)]
    expected = [alone.logits([row]) for row in prompts]
    assert torch.equal(together.logits(prompts[:33]), torch.cat(expected[:33]))
    assert torch.equal(together.logits(prompts[33:]), torch.cat(expected[33:]))
    for step in range(3):
        rows = []
        for index, prompt in enumerate(prompts):
            length = 1 + (index + step) % 16
            start = len(prompt.token_ids)
            rows.append(_row(index, start, _ids(length, seed=index), wanted=length if index % 5 else 0))
        separate = torch.cat([alone.logits([row]) for row in rows])
        assert torch.equal(together.logits(rows), separate)
        assert torch.equal(together.logits(rows[::-1]), torch.cat([alone.logits([row]) for row in rows[::-1]]))


@pytest.mark.skipif(not has_tiles(), reason="no tiles (AMX) here")
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_multiply_as_vectors_do(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in steps of any size. (Attention is not: its sums are in another order.)"""
    config, ids = decoder_config(**SHAPES[shape]), _ids(140)
    tiled = make_runner(CpuRunner, config, torch.bfloat16, packed=True)
    monkeypatch.setattr("engine.cpu.native.has_tiles", lambda: False)
    vectors = make_runner(CpuRunner, config, torch.bfloat16, packed=True)
    assert isinstance(tiled, CpuRunner)
    assert isinstance(vectors, CpuRunner)
    tiled.native.model.has_tiles = False
    assert (tiled.native.model.head.form, vectors.native.model.head.form) == (TILED, INT8)
    cuts = [1, 2, 15, 16, 17, 33, 56]
    expected = _all_logits(vectors, ids, cuts=cuts)
    assert torch.equal(_all_logits(tiled, ids, cuts=cuts), expected)
    tiled.threads = 2
    assert torch.equal(_all_logits(tiled, ids, cuts=cuts, index=1), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_kinds_of_vectors_compute_alike(shape: str) -> None:
    """Up to rounding: sums over a vector are in another order, as are pairs of attention's products."""
    loaded = library()
    assert loaded is not None
    if loaded.beholder_vectors() < Vectors.AVX512:
        pytest.skip("no AVX-512 (VNNI, BF16) here")
    config = decoder_config(**SHAPES[shape])
    logits = []
    for vectors in (Vectors.AVX2, Vectors.AVX512):
        loaded.beholder_use(vectors)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("engine.cpu.native.has_tiles", lambda: False)
                runner = make_runner(CpuRunner, config, torch.bfloat16)
                logits.append(torch.cat([runner.logits([_row(0, 0, [token_id])]) for token_id in _ids(20)]))
        finally:
            loaded.beholder_use(Vectors.AVX512)
    assert _error(logits[0], logits[1]) < 1e-3


@pytest.mark.usefixtures("tiles")
def test_thousands_of_tokens_of_context() -> None:
    config = decoder_config(head_dim=64)
    ids = _ids(3000)
    cuts = [500] * 5 + [450, 16, 1, 1, 32]
    exact, native = (
        _all_logits(make_runner(kind, config, dtype, rows=1, positions=3000), ids, cuts=cuts)
        for kind, dtype in ((TorchRunner, torch.float32), (CpuRunner, torch.bfloat16))
    )
    assert _error(native, exact) < 0.02
    assert _error(native[-50:], exact[-50:]) < 0.02


@pytest.mark.usefixtures("tiles")
def test_nobody_elses_slots_are_read_or_written() -> None:
    """Infinities beyond a sequence's end change nothing, and steps write to the slots of their tokens alone."""
    runner = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
    expected = runner.logits([_row(0, 0, _ids(70))]), runner.logits([_row(0, 70, _ids(9), wanted=9)])
    runner.kv_pool[:] = torch.inf
    before = runner.kv_pool.clone()
    assert torch.equal(runner.logits([_row(0, 0, _ids(70))]), expected[0])
    assert torch.equal(runner.logits([_row(0, 70, _ids(9), wanted=9)]), expected[1])
    changed = (runner.kv_pool != before).flatten(2).any(2)  # (layers, slots)
    own = torch.zeros_like(changed)
    own[:, runner.slot_table[0, :79].long()] = True
    assert torch.equal(changed, own)


def test_many_rows_may_share_the_dummy_slot() -> None:
    """As at warm-up: the pool stays finite and empty beside it, whatever the threads do."""
    runner = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
    assert isinstance(runner, CpuRunner)
    runner.threads = 3
    runner.slot_table.zero_()
    assert runner.logits([_row(index, 20, [index], wanted=1) for index in range(8)]).isfinite().all()
    assert runner.logits([_row(0, 0, _ids(100))]).isfinite().all()
    assert not runner.kv_pool[:, 1:].any()
    assert runner.kv_pool[:, 0].isfinite().all()


@pytest.mark.usefixtures("tiles")
def test_what_is_no_number_stays_in_its_row() -> None:
    runner = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
    healthy = _row(1, 0, _ids(30))
    expected = runner.logits([healthy])
    nothing = torch.full((20, 96), torch.nan, dtype=torch.bfloat16)
    logits = runner.logits([_row(0, 0, [0] * 20, vision=[VisionRows(0, 0, 20, nothing)]), healthy])
    assert not logits[0].isfinite().all()
    assert torch.equal(logits[1:], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("tiles")
def test_tokens_that_are_no_numbers_change_none_before_them(shape: str) -> None:
    """Nor in the same step: a prompt's may hold text that others share, and a broken picture behind it."""
    runner = make_runner(CpuRunner, decoder_config(**SHAPES[shape]), torch.bfloat16)
    ids = _ids(100)
    expected = runner.logits([_row(0, 0, ids[:80], wanted=80)])
    nothing = torch.full((20, decoder_config(**SHAPES[shape]).hidden_size), torch.nan, dtype=torch.bfloat16)
    logits = runner.logits([_row(1, 0, ids, wanted=100, vision=[VisionRows(80, 0, 20, nothing)])])
    assert logits[80:].isnan().all()
    assert torch.equal(logits[:80], expected)


@pytest.mark.parametrize("packed", [True, False], ids=["int8", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("tiles")
def test_what_is_no_number_makes_none(shape: str, packed: bool) -> None:
    """One input too large, or none, among others that are small, wherever it stands in a block of 8-bit products."""
    config = decoder_config(**SHAPES[shape])
    runner = make_runner(CpuRunner, config, torch.bfloat16, packed=packed)
    for value in (torch.inf, torch.nan):
        for place in (0, 17, config.hidden_size - 1):
            picture = torch.full((1, config.hidden_size), 0.1, dtype=torch.bfloat16)
            picture[0, place] = value
            assert not runner.logits([_row(0, 0, [0], vision=[VisionRows(0, 0, 1, picture)])]).isfinite().any()


@pytest.mark.parametrize("shape", ["llama", "QK-norm, heads of 128, M-RoPE interleaved"])
@pytest.mark.usefixtures("tiles")
def test_pictures_stand_in_for_ids_and_add_their_taps(shape: str) -> None:
    """DeepStack's features, M-RoPE's positions, and embeddings that begin anywhere."""
    config = decoder_config(**SHAPES[shape])
    embeddings = torch.randn(12, 3 * config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = np.stack([np.arange(40), np.arange(40) // 4, np.arange(40) % 7]).astype(np.int32)
    ids = _ids(40)
    ids[20:30] = [10**17 + index for index in range(10)]
    answers = []
    for kind, dtype in ((TorchRunner, torch.float32), (TorchRunner, torch.bfloat16), (CpuRunner, torch.bfloat16)):
        runner = make_runner(kind, config, dtype, num_taps=2)
        fields: dict[str, Any] = {"vision": [VisionRows(20, 1, 10, embeddings.to(dtype))]}
        if config.rope.sections:
            fields["positions"] = positions
        answers.append(
            torch.cat(
                [
                    runner.logits([_row(3, 0, ids, wanted=30, **fields), _row(4, 0, _ids(5))]),
                    runner.logits([_row(3, 40, _ids(4), wanted=4, position_delta=5)]),
                ]
            )
        )
    exact, torchs, native = answers
    assert _error(native, exact) < 0.03
    assert _error(native, exact) < _error(torchs, exact)


def test_long_chunks_are_torchs_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, and weights of 16 bits. Decoding and drafts beside such a chunk stay what they are without it."""
    loaded = library()
    assert loaded is not None
    plain = make_runner(CpuRunner, decoder_config(), torch.bfloat16, packed=False)
    monkeypatch.setattr(loaded, "beholder_has_amx", lambda: 1)
    split = make_runner(CpuRunner, decoder_config(), torch.bfloat16, packed=False)
    by_torch = make_runner(TorchRunner, decoder_config(), torch.bfloat16, packed=False)
    chunk, other = _row(1, 0, _ids(50)), _row(3, 0, _ids(17), wanted=0)
    short = [_row(0, 0, _ids(12), wanted=3), _row(2, 0, _ids(16))]
    first = plain.logits(short)
    chunks = by_torch.logits([chunk, other])
    assert torch.equal(split.logits([short[0], chunk, other, short[1]]), torch.cat([first[:3], chunks, first[3:]]))
    assert torch.equal(split.logits([chunk, other]), chunks)
    assert torch.equal(split.logits(short), first)
    guesses = _ids(70)[50:]
    after = split.logits([_row(1, 50, guesses, wanted=20)])
    both = split.logits([short[0], _row(1, 0, [*_ids(50), *guesses], wanted=21), other, short[1]])
    assert torch.equal(both, torch.cat([first[:3], chunks, after, first[3:]]))
    assert torch.equal(split.logits([_row(1, 0, [*_ids(50), *guesses], wanted=21)]), torch.cat([chunks, after]))
    few = [*_ids(12), *guesses[:10]]
    assert torch.equal(split.logits([_row(5, 0, few, wanted=13)]), plain.logits([_row(5, 0, few, wanted=13)]))


def test_long_chunks_are_native_where_weights_lie_in_tiles(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, and weights of 8 bits: if the operating system lets it be used, and else they are torch's as well."""
    loaded = library()
    assert loaded is not None
    plain = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
    monkeypatch.setattr(loaded, "beholder_has_amx", lambda: 1)
    beside = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
    chunks = (plain if tiles else make_runner(TorchRunner, decoder_config(), torch.bfloat16)).logits(
        [_row(1, 0, _ids(50))]
    )
    assert torch.equal(beside.logits([_row(1, 0, _ids(50))]), chunks)


class _Mask:
    """A grammar's: only these ids."""

    def __init__(self, vocab: int, ids: Sequence[int], *, words: int) -> None:
        bits = np.zeros(32 * words, np.uint8)
        bits[[token_id for token_id in ids if token_id < vocab]] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def words(self) -> Any:
        return self._words


@pytest.mark.usefixtures("tiles")
def test_tokens_are_drawn_as_torch_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows, those of grammars among them, are compared natively, the others beside them by torch: the first of
    equal logits, whatever is no number.
    """
    vocab = 517
    runner = make_runner(CpuRunner, decoder_config(vocab_size=vocab), torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-40, 40, (24, vocab), generator=generator).float()  # many are equal
    logits[3], logits[4], logits[5] = torch.nan, torch.inf, -torch.inf
    logits[6, ::3], logits[7, 5:], logits[8, 100:] = torch.nan, torch.inf, -torch.inf
    logits[9, 40:60], logits[10, 516] = 3e38, 1e31
    greedy, drawn = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1, temperature=0.8, seed=5)
    biased = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={7: 100.0})
    told = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
    some = [1, 2, 5, 31, 32, 77, 400, 511, 512, 516]
    asked = [RowSampling(greedy, index) for index in range(24)]
    for index in (11, 12, 6, 9):
        asked[index] = RowSampling(greedy, index, allowed=_Mask(vocab, some, words=17))
    asked[13] = RowSampling(greedy, 13, allowed=_Mask(vocab, [], words=17))
    assert plainly_greedy(asked) == list(range(24))

    def drawn_by_step() -> list[SampledToken]:
        row = Row(0, 30, [0] * 24, asked[0], drafted=asked[1:])
        monkeypatch.setattr(runner, "logits", lambda rows: logits.clone())
        return runner.step([row])

    assert drawn_by_step() == sample(logits, asked)
    asked[2], asked[14] = RowSampling(drawn, 2), RowSampling(drawn, 14, allowed=_Mask(vocab, some, words=17))
    asked[15], asked[16] = RowSampling(biased, 15), RowSampling(told, 16)
    asked[17] = RowSampling(greedy, 17, banned_ids=(int(logits[17].argmax()),))
    assert drawn_by_step() == sample(logits, asked)
    asked = [RowSampling(drawn, index) for index in range(24)]
    assert drawn_by_step() == sample(logits, asked)


@pytest.mark.parametrize("count", [1, 2, 4, 7, 10, 15])
@pytest.mark.parametrize("shape", ["the bundled model's heads", "heads of 10, odd sizes everywhere", "heads of 80"])
@pytest.mark.usefixtures("tiles")
def test_guesses_of_a_tree_share_what_precedes_them(shape: str, count: int) -> None:
    """To the bit what each way through the tree has as a chain, before and behind blocks of positions."""
    runner = make_runner(CpuRunner, decoder_config(**SHAPES[shape]), torch.bfloat16, rows=20)
    generator = np.random.default_rng(count)
    for start in (3, 63, 64, 120, 128, 150):
        prompt = _ids(start + 1, seed=start)
        drafts = _ids(count, seed=count)
        parents = [int(generator.integers(0, index + 1)) for index in range(count)]
        expected = []
        for index, own in enumerate([[], *lineages(drafts, parents)]):
            runner.logits([_row(1 + index, 0, prompt[:start])])
            way = [prompt[start], *own]
            expected.append(runner.logits([_row(1 + index, start, way, wanted=len(way))])[-1:])
        runner.logits([_row(0, 0, prompt[:start])])
        others = _row(17, 0, _ids(5)), _row(18, 0, _ids(2))
        tree = Row(0, start, [prompt[start], *drafts], SAMPLING, drafted=[SAMPLING] * count, parents=parents)
        logits = runner.logits([others[0], tree, others[1]])
        assert torch.equal(logits[1:-1], torch.cat(expected))


def test_it_tells_of_progress_in_long_steps() -> None:
    runner = make_runner(CpuRunner, decoder_config(num_layers=3), torch.bfloat16)
    calls: list[int] = []
    runner.report_to(lambda: calls.append(1))
    runner.logits([_row(0, 0, _ids(200))])
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("fields", "dtype", "words"),
    [({}, torch.float32, "the type is float32"), ({"head_dim": 512}, torch.bfloat16, "larger than native takes")],
)
def test_what_it_does_not_cover_is_torchs(fields: dict[str, Any], dtype: torch.dtype, words: str) -> None:
    config: DecoderConfig = decoder_config(**fields)
    assert words in why_not(config, dtype)


def test_a_model_folder_runs_on_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(tiny_model), dtype="bfloat16", threads=1, kv_tokens=200, max_running=2)
    runner = load_runner(config)
    assert isinstance(runner, CpuRunner)
    assert runner.facts()["kernel"] == "native"
    monkeypatch.setattr("engine.cpu.native.library", lambda: None)
    runner = load_runner(config)
    assert type(runner) is TorchRunner
    assert "for lack of a C++ compiler" in str(runner.facts()["kernel"])


def test_the_bundled_model_says_what_it_says_in_float32() -> None:
    """Greedy answers to questions about random pictures, by the same vision embeddings, and how likely they were."""
    folder = str(Path(__file__).parents[2] / "samples/model")
    load = {"max_running": 2, "kv_tokens": 2000, "threads": 1}
    exact, native = (
        load_runner(EngineConfig(folder, dtype=dtype, **load))  # type: ignore[arg-type]
        for dtype in ("float32", "bfloat16")
    )
    assert isinstance(native, CpuRunner)
    assert isinstance(exact, TorchRunner)
    for content in range(8):
        generator = torch.Generator().manual_seed(content)
        coarse = torch.rand((1, 3, 4, 4), generator=generator) * 255
        picture = torch.nn.functional.interpolate(coarse, 256, mode="bicubic").clamp(0, 255).byte().permute(0, 2, 3, 1)
        embeddings = native.encode([picture])[0]
        question = torch.randint(10, 6000, (3 + 4 * content,), generator=generator).tolist()
        prompt = [1, *[3] * len(embeddings), *question]
        said: list[list[int]] = []
        likely: list[torch.Tensor] = []
        for runner in (exact, native):
            runner.slot_table[0] = torch.arange(1, 1 + runner.max_positions)
            vision = [VisionRows(1, 0, len(embeddings), embeddings.to(runner.dtype))]
            logits = [runner.logits([_row(0, 0, prompt, vision=vision)])]
            ids = said[0] if said else []  # the native step is asked after float32's words
            for index in range(16):
                if len(ids) == index:
                    ids = [*ids, int(logits[-1].argmax())]
                logits.append(runner.logits([_row(0, len(prompt) + index, [ids[index]])]))
            said.append(torch.cat(logits[:-1]).argmax(-1).tolist())
            likely.append(torch.cat(logits).log_softmax(-1))
        clear = likely[0][:-1].topk(2).values.diff().abs().squeeze(1) > 0.1  # else float32 itself nearly says another
        assert [a for a, sure in zip(said[0], clear, strict=True) if sure] == [
            a for a, sure in zip(said[1], clear, strict=True) if sure
        ]
        assert (likely[0] - likely[1]).abs().mean() < 0.05


_FORKS = """
import os, torch
from engine.cpu.runner import CpuRunner
from tests.engine.random_decoder import decoder_config, make_runner
from tests.engine.test_cpu_step import _ids, _row

runner = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
runner.threads = 2
expected = runner.logits([_row(0, 0, _ids(16))])
child = os.fork()
if not child:
    os._exit(0 if torch.equal(runner.logits([_row(0, 0, _ids(16))]), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(runner.logits([_row(0, 0, _ids(16))]), expected)
"""


def test_its_threads_survive_a_fork() -> None:
    subprocess.run([sys.executable, "-c", _FORKS], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_runners_of_other_counts_take_no_new_threads_at_every_step() -> None:
    one, other = (make_runner(CpuRunner, decoder_config(), torch.bfloat16) for _ in range(2))
    assert isinstance(one, CpuRunner)
    assert isinstance(other, CpuRunner)
    one.threads, other.threads = 2, 3
    expected = one.logits([_row(0, 0, _ids(9))])
    other.logits([_row(0, 0, _ids(9))])
    before = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(5):
        assert torch.equal(other.logits([_row(0, 0, _ids(9))]), expected)
        assert torch.equal(one.logits([_row(0, 0, _ids(9))]), expected)
    assert len(list(Path("/proc/self/task").iterdir())) == before


_ASKS = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

def handle_signals_on(size):
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, size)), None) == 0

from engine.cpu.native import has_tiles
room = ctypes.create_string_buffer(1 << 20)
handle_signals_on(4096)
first = has_tiles()
handle_signals_on(1 << 20)
assert has_tiles() == first
"""


def test_whether_there_are_tiles_does_not_change() -> None:
    """A small stack for signals forbids them as long as it is there: models would be laid out half this way."""
    subprocess.run([sys.executable, "-c", _ASKS], check=True, timeout=120, cwd=Path(__file__).parents[2])


_IDLES = """
import os, time, torch
from engine.cpu.runner import CpuRunner
from tests.engine.random_decoder import decoder_config, make_runner
from tests.engine.test_cpu_step import _ids, _row

torch.set_num_threads(1)
runner = make_runner(CpuRunner, decoder_config(), torch.bfloat16)
runner.threads = 4
runner.logits([_row(0, 0, _ids(40))])
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
"""


def test_its_threads_sleep_between_steps() -> None:
    """By processor time, so a busy machine makes no difference: three spinning threads would take some of a second."""
    done = subprocess.run(
        [sys.executable, "-c", _IDLES], check=True, timeout=120, cwd=Path(__file__).parents[2], capture_output=True
    )
    assert float(done.stdout) < 0.1


def test_where_both_layouts_are_held_memory_counts_them(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX: what does not fit is torch's, and what fits leaves less for keys and values."""
    loaded = library()
    assert loaded is not None
    config = EngineConfig(str(tiny_model), dtype="bfloat16", threads=1, max_running=2)
    monkeypatch.setattr("engine.load.free_memory", lambda device: 4 << 20)
    alone = load_runner(config)
    monkeypatch.setattr(loaded, "beholder_has_amx", lambda: 1)
    beside = load_runner(config)
    assert beside.facts()["kernel"] == "native"
    assert beside.num_slots < alone.num_slots
    monkeypatch.setattr("engine.load.free_memory", lambda device: 1 << 14)
    assert "native would take" in str(load_runner(config).facts()["kernel"])
