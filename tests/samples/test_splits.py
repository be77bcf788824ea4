"""What is held out follows from names alone, and training never uses it."""

import random

import pytest

from samples.training.phrasings import PHRASINGS, ask, wordings
from samples.training.splits import HELD_OUT_SHARE, fraction, held_out, pair_name
from samples.training.world import SHAPES, Catalogue


def test_a_name_always_falls_on_the_same_side() -> None:
    assert fraction("word", "umbrella") == pytest.approx(0.0302091, abs=1e-6)
    assert held_out("word", "umbrella")


@pytest.mark.parametrize("kind", sorted(HELD_OUT_SHARE))
def test_about_the_promised_share_is_held_out(kind: str) -> None:
    share = sum(held_out(kind, f"name {n}") for n in range(4000)) / 4000
    assert share == pytest.approx(HELD_OUT_SHARE[kind], abs=0.03)


def test_the_order_of_a_pair_does_not_matter() -> None:
    assert pair_name("cat", "dog") == pair_name("dog", "cat")


@pytest.mark.parametrize("kind", sorted(PHRASINGS))
def test_every_question_has_ten_wordings_and_both_sides_have_some(kind: str) -> None:
    assert len(set(PHRASINGS[kind])) >= 10
    assert wordings(kind, testing=False)
    assert wordings(kind, testing=True)


def test_training_asks_only_in_wordings_that_are_not_held_out() -> None:
    kept = {text for text in PHRASINGS["describe"] if held_out("phrasing", text)}
    rng = random.Random(0)
    asked = [ask("describe", rng) for _ in range(3000)]
    assert kept
    assert not any(question.endswith(text) for question in asked for text in kept)


def test_colours_and_shapes_that_are_held_out_come_only_in_tests(pack) -> None:
    rng = random.Random(1)
    trained = [Catalogue(pack).shape(rng) for _ in range(500)]
    tested = [Catalogue(pack, testing=True).shape(rng) for _ in range(200)]
    assert not any(held_out("colour", f"{item.colour} {item.noun.name}") for item in trained)
    assert all(held_out("colour", f"{item.colour} {item.noun.name}") for item in tested)
    assert {item.noun.name for item in trained} == set(SHAPES)


def test_the_unseen_style_is_never_drawn_in_training(pack) -> None:
    catalogue, rng = Catalogue(pack), random.Random(2)
    used = {pack.styles[catalogue.thing(rng).sprite] for _ in range(500)}
    assert used == {"noto", "twemoji"}
