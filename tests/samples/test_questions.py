"""Answers agree with the picture that was asked about."""

import random

import pytest

from samples.training import questions
from samples.training.names import Noun, pluralise
from samples.training.pack import Pack
from samples.training.questions import View
from samples.training.world import Catalogue, Item, background, placed


def view(pack: Pack, seed: int, items: list[str]) -> View:
    rng = random.Random(seed)
    catalogue = Catalogue(pack)
    scene = placed([catalogue.thing(rng, name, tinted=0) for name in items], rng)
    return View(scene, background(rng), catalogue, rng)


@pytest.mark.parametrize("seed", range(20))
def test_a_relation_is_true(pack: Pack, seed: int) -> None:
    made = view(pack, seed, ["cat", "umbrella"])
    pair = questions.clear_pair(made)
    if pair is None:
        return
    first, second, side = pair
    dx, dy = first.x - second.x, first.y - second.y
    assert {"to the left of": dx < 0, "to the right of": dx > 0, "above": dy < 0, "below": dy > 0}[side]


@pytest.mark.parametrize("seed", range(20))
def test_a_count_is_the_number_of_things(pack: Pack, seed: int) -> None:
    made = view(pack, seed, ["car"] * 4)
    turn = questions.count(made)
    assert turn is not None
    assert turn[1] in ("There are 4 cars.",) or turn[1].startswith("There are no ")


@pytest.mark.parametrize("seed", range(20))
def test_things_do_not_overlap(pack: Pack, seed: int) -> None:
    items = view(pack, seed, ["cat", "dog", "owl", "car"]).items
    for n, one in enumerate(items):
        for other in items[:n]:
            apart = max(abs(one.x - other.x), abs(one.y - other.y))
            assert apart > (one.size + other.size) / 2 * 0.9


@pytest.mark.parametrize("seed", range(20))
def test_yes_and_no_are_right(pack: Pack, seed: int) -> None:
    made = view(pack, seed, ["cat", "umbrella"])
    turn = questions.exists(made)
    assert turn is not None
    asked_of_shown = any(name in turn[0].lower() for name in ("cat", "umbrella"))
    assert turn[1].startswith("Yes") == asked_of_shown


def test_articles_and_plurals() -> None:
    assert Noun("umbrella").some() == "an umbrella"
    assert Noun("umbrella").some("red") == "a red umbrella"
    assert Noun("grapes").some() == "some grapes"
    assert Noun("unicorn").some() == "a unicorn"
    assert [pluralise(name) for name in ("cat", "knife", "cup of tea", "fly", "bus", "fish", "snowman")] == [
        "cats", "knives", "cups of tea", "flies", "buses", "fish", "snowmen",
    ]  # fmt: skip


def test_the_ninths_of_a_picture() -> None:
    where = lambda x, y: questions.place_of(Item(Noun("cat"), 0, x=x, y=y))  # noqa: E731
    assert where(0.1, 0.1) == "in the top left"
    assert where(0.5, 0.5) == "in the center"
    assert where(0.5, 0.9) == "at the bottom"
    assert where(0.35, 0.5) == ""
