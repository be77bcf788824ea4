"""Every family answers as transformers does, in float32 on random weights, whatever it sees and however it is computed.

Families come from `tiny_models.FAMILIES`, chats from `family_parity.CASES`. A family that looks at pictures only must
refuse clips by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES

from preprocess.wire import Refused
from tests.engine.family_parity import CASES, NEW_TOKENS, Checked, pixels_of, run
from tests.engine.speculation.random_trees import RandomTrees

TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}

Load = Callable[[str], Checked]
Encode = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads each family once, for all tests of this module."""

    @cache
    def loaded(name: str) -> Checked:
        checked = Checked(FAMILIES[name](tmp_path_factory.mktemp("family")))
        checked.runner.encode = remembered(checked.runner.encode)  # type: ignore[method-assign]
        return checked

    return loaded


def remembered(encode: Encode) -> Encode:
    """Each call is computed once: the same pictures together again, as chunks and retractions do not change them, give
    the same embeddings again.
    """
    known: dict[tuple[tuple[tuple[int, ...], bytes], ...], list[torch.Tensor]] = {}

    def encoded(pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple((tuple(item.shape), item.numpy().tobytes()) for item in pixels)
        if key not in known:
            known[key] = encode(pixels)
        return [embeddings.clone() for embeddings in known[key]]

    return encoded


@pytest.fixture(params=[(family, case) for family in FAMILIES for case in CASES], ids=lambda pair: ", ".join(pair))
def checked(request: pytest.FixtureRequest, load: Load) -> tuple[Checked, str]:
    """A family and a case that it can see. One that it cannot see must be refused in words."""
    family, case = request.param
    checked = load(family)
    if not checked.shows(case):
        refused = checked.prepare(CASES[case])
        assert isinstance(refused, Refused)
        assert refused.code == "video_not_supported"
        pytest.skip("refused, as it must be")
    return checked, case


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [case for case in CASES if "picture" in case and "clip" not in case])
def test_processor_equals_transformers(family: str, case: str, load: Load) -> None:
    """Ids with every placeholder, and pixels to the last value of uint8."""
    checked = load(family)
    request = checked.request(case)
    ids, pixels = checked.processed(case)
    assert np.frombuffer(request.prompt_ids, "<i8").tolist() == ids
    torch.testing.assert_close(checked.reference_media(request)["pixel_values"], pixels, atol=1e-5, rtol=0)


def test_prefill_and_decode_equal_transformers(checked: tuple[Checked, str]) -> None:
    family, case = checked
    request, expected = family.expected(case)
    for chunk in (4096, 1, 3, 7):
        got = family.answer(request, chunk=chunk)
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)
        assert got.ids == expected.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_depend_on_what_is_seen(family: str, load: Load) -> None:
    """Else all this would prove little."""
    checked = load(family)
    answers = [checked.expected(case)[1] for case in CASES if checked.shows(case)]
    first = torch.stack([answer.logits[0] for answer in answers])
    assert torch.cdist(first, first).fill_diagonal_(torch.inf).min() > 1
    assert len({token for answer in answers for token in answer.ids}) > 12


def test_encoder_equals_transformers(checked: tuple[Checked, str]) -> None:
    family, case = checked
    request, _ = family.expected(case)
    ours = family.runner.encode([pixels_of(item.pixels) for item in request.media])
    theirs = family.reference_embeddings(request)
    assert len(ours) == len(theirs) == len(request.media)
    for item, got, expected in zip(request.media, ours, theirs, strict=True):
        assert len(got) == item.num_tokens
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=1e-5)


def test_retraction_in_mid_answer_changes_nothing(checked: tuple[Checked, str]) -> None:
    family, case = checked
    request, expected = family.expected(case)
    for chunk in (4096, 5):
        got = family.answer(request, chunk=chunk, retract_after=(1, 6))
        assert got.ids == expected.ids
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)


def test_drafts_are_checked_by_the_logits_of_plain_decoding(checked: tuple[Checked, str]) -> None:
    """Right guesses, four a step: every logit is what transformers has for that place, rotary positions and all."""
    family, case = checked
    request, expected = family.expected(case)
    for chunk in (4096, 11):
        got = family.answer(request, chunk=chunk, drafts=expected.ids)
        assert got.ids == expected.ids
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)


@pytest.mark.parametrize("way", ["batched", "retracted"])
@pytest.mark.parametrize(("chunk", "late"), [(12, False), (4096, False), (12, True)], ids=["12", "4096", "12-late"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_and_right_drafts_change_no_token(
    family: str, prefix_cache: bool, chunk: int, late: bool, way: str, load: Load
) -> None:
    checked = load(family)
    cases = [case for case in CASES if checked.shows(case) and case != "picture after long text"]
    expected = {case: checked.expected(case)[1].ids for case in cases}
    engine = checked.engine(chunk=chunk, prefix_cache=prefix_cache, script=expected, accuracy=0.7, late=late)
    for case in cases:
        engine.submit(checked.expected(case)[0], pixels_of)
    assert run(engine, retract_after=(2, 3, 7) if way == "retracted" else ()) == expected
    assert engine.speculator.drafted["replay"] > engine.speculator.accepted["replay"] > 0


@pytest.mark.parametrize(("chunk", "late"), [(40, False), (4096, True)], ids=["40", "4096-late"])
@pytest.mark.parametrize("shape", ["branches", "any tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_drafts_change_no_token(family: str, shape: str, chunk: int, late: bool, load: Load) -> None:
    checked = load(family)
    cases = [case for case in CASES if checked.shows(case) and case != "picture after long text"]
    expected = {case: checked.expected(case)[1].ids for case in cases}
    engine = checked.engine(chunk=chunk, prefix_cache=late, script=expected, accuracy=0.7, branches=2, late=late)
    trees = RandomTrees(expected, 0.7, checked.runner.vocab_size, 9, seed=5)  # of which many branch
    if shape == "any tree":
        trees.guide(engine)
    for case in cases:
        engine.submit(checked.expected(case)[0], pixels_of)
    assert run(engine, retract_after=(3, 7)) == expected
    if shape == "any tree":
        assert trees.num_branching > 4
    else:
        assert engine.speculator.drafted["replay"] > engine.speculator.accepted["replay"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_is_the_same_at_every_chunk_size(family: str, load: Load) -> None:
    checked = load(family)
    case = "pictures and clips" if checked.shows("pictures and clips") else "several pictures"
    _, expected = checked.expected(case)
    request = checked.request(case, max_tokens=1)
    for chunk in range(1, request.num_prompt_tokens + 1):
        got = checked.answer(request, chunk=chunk)
        torch.testing.assert_close(got.logits, expected.logits[:1], **TOLERANCE)


@pytest.mark.parametrize("way", ["alone", "batched", "retracted"])
@pytest.mark.parametrize("chunk", [1, 6, 64, 4096])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_computing_gives_the_same_tokens(
    family: str, prefix_cache: bool, chunk: int, way: str, load: Load
) -> None:
    checked = load(family)
    cases = [case for case in CASES if checked.shows(case) and case != "picture after long text"]
    expected = {case: checked.expected(case)[1].ids for case in cases}
    requests = [checked.expected(case)[0] for case in cases]
    engine = checked.engine(chunk=chunk, prefix_cache=prefix_cache)
    answers: dict[str, list[int]] = {}
    if way == "alone":
        for request in requests:
            engine.submit(request, pixels_of)
            answers |= run(engine)
    else:
        for request in requests:
            engine.submit(request, pixels_of)
        answers = run(engine, retract_after=(2, 3, 7) if way == "retracted" else ())
    assert answers == expected
    assert (engine.stats().num_retracted > 0) == (way == "retracted")
    assert all(len(ids) == NEW_TOKENS for ids in answers.values())
