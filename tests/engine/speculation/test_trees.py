"""Trees of drafts: each guess is computed as if what leads to it were the text, and what stands is what plain decoding
says, whatever the shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_qwen3_vl import tiny_qwen3_vl

from engine.batch import Row, RowSampling, SampledToken
from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.grammar import Grammars, Wanted
from engine.kv.cache import KVCache
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.speculation.tree import hidden, lineages, offsets, path, seen_bits
from engine.speculation.verify import standing
from preprocess.wire import SamplingParams
from tests.engine.speculation.random_trees import shapes
from tests.engine.test_grammar import DIGITS, JSON, WORDS

PROMPT = [(17 * index) % 400 + 30 for index in range(11)]
DELTA = -3
"""How far a picture's rows and columns have moved the text behind it."""


def sampling(index: int, seed: int = 0, temperature: float = 1.0) -> RowSampling:
    return RowSampling(SamplingParams(max_tokens=99, seed=seed, temperature=temperature), index)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@given(shapes(), st.integers(1, 4))
def test_a_token_sees_itself_and_what_leads_to_it(parents: tuple[int, ...], num_given: int) -> None:
    num_tokens = num_given + len(parents)
    shifted = [num_given - 1 + parent for parent in parents]
    unseen, known = hidden(shifted, num_tokens), offsets(shifted, num_tokens)
    bits = seen_bits(shifted, num_tokens)
    for index in range(num_tokens):
        seen, last = {index}, index
        while last:
            last = last - 1 if last < num_given else shifted[last - num_given]
            seen.add(last)
        assert set(np.flatnonzero(~unseen[index]).tolist()) == seen
        assert bits[index] == sum(1 << token for token in seen)
        assert known[index] == len(seen) - 1


@given(st.integers(1, 15), st.integers(1, 3))
def test_a_chain_is_a_tree_too(length: int, num_given: int) -> None:
    parents = range(num_given - 1, num_given - 1 + length)
    assert offsets(parents, num_given + length) == list(range(num_given + length))
    assert (hidden(parents, num_given + length) == ~np.tri(num_given + length, dtype=bool)).all()
    assert lineages((7,) * length, None) == lineages((7,) * length, tuple(range(length)))


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="follows token"):
        offsets(parents, 1 + len(parents))


@given(shapes(), st.data())
def test_what_stands_is_what_plain_decoding_says(parents: tuple[int, ...], data: st.DataObject) -> None:
    """The text is a function of what was said before. Each draft guesses right or wrong; siblings may guess alike."""
    drafts = tuple(data.draw(st.integers(0, 2)) for _ in parents)

    def said_after(text: Ordered[int]) -> int:
        return hash(("text", *text)) % 3

    sampled = [SampledToken(said_after(lineage)) for lineage in [(), *lineages(drafts, parents)]]
    kept = [token.token_id for token in standing(drafts, sampled, None, parents)]
    assert kept == [said_after(kept[:index]) for index in range(len(kept))]
    nodes = path(drafts, parents, kept[:-1])
    assert len(nodes) == len(kept) - 1
    assert [drafts[node - 1] for node in nodes] == kept[:-1]
    is_twin = len(set(zip(drafts, parents, strict=True))) < len(drafts)
    assert is_twin or tuple(kept) not in lineages(drafts, parents)  # nobody guessed more of it


@pytest.mark.parametrize("parents", [None, (0, 1, 2, 0)], ids=["chain", "tree"])
def test_what_was_drawn_under_a_wrong_mask_does_not_stand(tiny_model: Path, parents: tuple[int, ...] | None) -> None:
    grammar = Grammars(str(tiny_model), 512).begin(DIGITS)
    drafts, sampled = (5, 6, 7, 8), [SampledToken(token_id) for token_id in (5, 6, 7, 8, 9)]
    for num_right in range(1, 5):
        grammar.right_masks = [True] * num_right + [False] * (5 - num_right)
        assert standing(drafts, sampled, grammar, parents) == sampled[:num_right]


# ---- computing -------------------------------------------------------------------------------------------------------


def on_native(folder: Path) -> CpuRunner | None:
    """A runner whose steps are C++, where the processor has what that takes."""
    loaded = load_runner(EngineConfig(str(folder), dtype="bfloat16", threads=1, kv_tokens=600, max_running=8))
    return loaded if isinstance(loaded, CpuRunner) else None


@pytest.mark.parametrize("family", ["plain positions", "three axes"])
def test_native_steps_compute_a_guess_as_if_what_leads_to_it_were_the_text(
    family: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Not one bit differs, beside chains, and behind a prompt that is computed or that is not (short rows only where
    torch has the others).
    """
    runner = on_native(tiny_model if family == "plain positions" else tiny_qwen3_vl(tmp_path))
    if runner is None:
        pytest.skip("no native steps on this processor")
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1)).int() + 1
    runner.slot_table[:8, :70] = order[:560].view(8, 70)
    generator = np.random.default_rng(0)
    runner.step([Row(7, 0, PROMPT[:10], None, position_delta=DELTA)])
    for _ in range(10):
        made, expected = [], []
        for table_row in range(6):
            count, num_computed = int(generator.integers(1, 16)), 10
            if not runner.chunks_by_torch and generator.integers(0, 2):
                num_computed = 0
            parents = tuple(int(generator.integers(0, index + 1)) for index in range(count))
            own = parents if generator.integers(0, 3) else None
            drafts = generator.integers(30, 34, count).tolist()
            if num_computed:
                runner.step([Row(table_row, 0, PROMPT[:num_computed], None, position_delta=DELTA)])
            made.append(tree_row(table_row, drafts, own, num_computed))
            for lineage in [(), *lineages(drafts, own)]:
                alone = Row(7, 10, [PROMPT[10], *lineage], sampling(len(lineage)), position_delta=DELTA)
                expected.append(runner.logits([alone])[0])
        assert torch.equal(runner.logits(made), torch.stack(expected))


@pytest.fixture(scope="module", params=["plain positions", "three axes"])
def runner(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tiny_model if request.param == "plain positions" else tiny_qwen3_vl(tmp_path_factory.mktemp("qwen"))
    loaded = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=600, max_running=8))
    assert isinstance(loaded, TorchRunner)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1)).int() + 1
    loaded.slot_table[:8, :70] = order[:560].view(8, 70)
    return loaded


def tree_row(table_row: int, drafts: Ordered[int], parents: Ordered[int] | None, num_computed: int) -> Row:
    """The end of the prompt, of which so much is computed, and drafts."""
    given = PROMPT[num_computed:]
    asked = [sampling(0), *(sampling(len(lineage)) for lineage in lineages(drafts, parents))]
    shifted = None if parents is None else [len(given) - 1 + parent for parent in parents]
    ids = [*given, *drafts]
    return Row(table_row, num_computed, ids, asked[0], position_delta=DELTA, drafted=asked[1:], parents=shifted)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(shapes(), st.integers(0, 10), st.booleans()), min_size=1, max_size=4), data=st.data())
def test_a_guess_is_computed_as_if_what_leads_to_it_were_the_text(
    runner: TorchRunner, rows: list[tuple[tuple[int, ...], int, bool]], data: st.DataObject
) -> None:
    """Trees and chains of any length in one step, behind prompts that are computed, or not yet; logits and draws."""
    made, expected, wanted = [], [], []
    for table_row, (parents, num_computed, is_chain) in enumerate(rows):
        drafts = [data.draw(st.integers(30, 33)) for _ in parents]
        own = None if is_chain else parents
        if num_computed:
            runner.step([Row(table_row, 0, PROMPT[:num_computed], None, position_delta=DELTA)])
        made.append(tree_row(table_row, drafts, own, num_computed))
        for lineage in [(), *lineages(drafts, own)]:
            alone = Row(7, 0, [*PROMPT, *lineage], sampling(len(lineage)), position_delta=DELTA)
            expected.append(runner.logits([alone])[0])
            wanted += runner.step([alone])
    torch.testing.assert_close(runner.logits(made), torch.stack(expected), atol=2e-5, rtol=1e-5)
    assert runner.step(made) == wanted


def test_siblings_share_their_noise(runner: TorchRunner) -> None:
    """A token that two branches of equal text lead to is the same."""
    for seed in range(20):
        drafts, parents = (40, 41, 40, 41), (0, 1, 0, 3)
        asked = [sampling(len(lineage), seed) for lineage in [(), *lineages(drafts, parents)]]
        row = Row(0, 0, [PROMPT[0], *drafts], asked[0], drafted=asked[1:], parents=parents)
        tokens = [token.token_id for token in runner.step([row])]
        assert (tokens[1], tokens[2]) == (tokens[3], tokens[4])


@pytest.mark.parametrize("grammar", [JSON, DIGITS, WORDS], ids=["json", "digits", "words"])
def test_masks_of_a_tree_are_those_of_its_chains(tiny_model: Path, grammar: str) -> None:
    """Guesses are what the masks allow, or forbid: after a forbidden one nothing is right."""
    grammars = Grammars(str(tiny_model), 512)
    generator = np.random.default_rng(0)
    num_right = 0
    for _ in range(12):
        state = grammars.begin(grammar)
        parents = tuple(int(generator.integers(0, index + 1)) for index in range(9))
        drafts: list[int] = []
        for index in range(len(parents)):
            lead = [(), *lineages(drafts, parents[: len(drafts)])][parents[index]]
            words = grammars.masks([Wanted(state, [2, 6], 0, lead)])[0][-1].words()
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:512]
            allowed = np.flatnonzero(bits if index % 4 else bits == 0)
            drafts.append(int(generator.choice(allowed)) if len(allowed) else 5)
        tree = grammars.masks([Wanted(state, [2, 6], 2, drafts, parents)])[0]
        masks, right = [mask.words().copy() for mask in tree], list(state.right_masks)
        for node, lineage in enumerate([(), *lineages(drafts, parents)]):
            alone = grammars.masks([Wanted(state, [2, 6], 2, lineage)])[0]
            alone[0].words()
            assert right[node] == state.right_masks[-1]
            if right[node]:
                assert (masks[node] == alone[-1].words()).all()
                num_right += node > 0
        assert state.token_ids == []
        assert state.failure is None
    assert num_right > 8


# ---- slots -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 6), st.lists(st.integers(0, 9), unique=True, max_size=10))
def test_the_slots_of_what_stands_come_first_and_none_is_lost(num_prompt: int, chosen: list[int]) -> None:
    cache = KVCache(40, torch.zeros((2, 30), dtype=torch.int32))
    hold = cache.open(np.arange(100, 101 + num_prompt))
    cache.grow(hold, num_prompt + 1)
    cache.commit(hold, np.arange(100, 100 + num_prompt))
    cache.grow_each([hold], [10])
    first = num_prompt + 1
    before = cache.table.read_run(hold.row, first, first + 10).tolist()
    cache.reorder(hold, first, chosen)
    after = cache.table.read_run(hold.row, first, first + 10).tolist()
    assert after[: len(chosen)] == [before[index] for index in chosen]
    assert sorted(after) == sorted(before)
    cache.shrink(hold, first + len(chosen))
    cache.check([hold])
    cache.close(hold)
    cache.check([])
    assert cache.num_available == 39
