"""Batches are the same for the same seed, and every place in them points where it should."""

from pathlib import Path

import numpy as np
import pytest

from samples.training.batches import MIX, Batch, Maker, Packer, Sizes
from samples.training.dialogue import IMAGE, Writer, load_tokenizer
from samples.training.pack import Pack

DRAWN = {kind: share for kind, share in MIX.items() if kind not in ("reading", "easy")}  # the rest needs typefaces
SIZES = Sizes(rows=4, tokens=768, pictures=24, doubles=1, answers=1024)


@pytest.fixture(scope="module")
def writer(samples: Path) -> Writer:
    return Writer(load_tokenizer(samples / "model"))


def batch(pack: Pack, writer: Writer, seed: int) -> Batch:
    return Packer(Maker(pack, writer, seed, DRAWN), SIZES).batch()


def test_a_seed_gives_the_same_batch(pack: Pack, writer: Writer) -> None:
    first, again, other = (batch(pack, writer, seed) for seed in (5, 5, 6))
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.singles.layer_numbers, again.singles.layer_numbers)
    assert not np.array_equal(first.ids, other.ids)


def test_every_picture_has_its_64_places(pack: Pack, writer: Writer) -> None:
    made = batch(pack, writer, 7)
    places = made.image_place[made.image_place < SIZES.rows * SIZES.tokens]
    assert len(places) == 64 * made.drawn
    assert sorted(places.tolist()) == np.nonzero(made.ids.reshape(-1) == IMAGE)[0].tolist()


def test_answers_are_predicted_from_the_token_before(pack: Pack, writer: Writer) -> None:
    made = batch(pack, writer, 8)
    used = made.answer_weight > 0
    assert used.any()
    assert np.array_equal(made.ids.reshape(-1)[made.answer_place[used] + 1], made.answer_id[used])
    assert made.answer_weight.sum() == pytest.approx(1.0, abs=1e-4)


def test_positions_begin_at_zero_in_every_document(pack: Pack, writer: Writer) -> None:
    made = batch(pack, writer, 9)
    starts = np.diff(made.documents, axis=1, prepend=0) > 0
    assert (made.positions[starts] == 0).all()
    assert (made.ids[starts] == 1).all()
