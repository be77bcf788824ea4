"""Makes training batches in worker processes: dialogues packed into rows, and the plans of their pictures.

A batch has fixed sizes, so that the network compiles once. What does not fit waits for the next batch.
"""

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samples.training.clips import OUTRO, clip, intro, picture_set, stamp
from samples.training.dialogue import IMAGE, Document, Part, Seen, Writer, first_parts, load_tokenizer
from samples.training.pack import Pack
from samples.training.phrasings import casual
from samples.training.questions import Turn, View, nothing_turns, turns
from samples.training.reading import Scribe, reading_picture
from samples.training.render import Plan, plan
from samples.training.talk import SYSTEMS, talk
from samples.training.world import Background, Catalogue, Item, Picture, background, finish, paints_of, placed


@dataclass(frozen=True)
class Sizes:
    """Fixed sizes of a batch."""

    rows: int = 128
    tokens: int = 768  # a row
    pictures: int = 640  # single tiles, padded with empty ones
    doubles: int = 18  # pictures split into five tiles
    answers: int = 18_432  # places where an answer token is predicted


@dataclass
class Batch:
    """What a worker sends. Vision tile t belongs at `image_place[t]` and the 63 places after it."""

    ids: NDArray[np.int16]  # (rows, tokens)
    positions: NDArray[np.int16]  # within the document
    documents: NDArray[np.int16]  # number of the document in its row; 0 is padding
    image_place: NDArray[np.int64]  # (tiles, 64) places in the flattened rows
    answer_place: NDArray[np.int64]  # (answers,) places whose next token is an answer
    answer_id: NDArray[np.int64]
    answer_weight: NDArray[np.float32]
    singles: Plan
    doubles: Plan
    count: int  # documents
    drawn: int  # pictures


MIX = {
    "scene": 0.25,
    "single": 0.13,
    "count": 0.085,
    "shapes": 0.12,
    "reading": 0.24,
    "easy": 0.015,
    "clip": 0.075,
    "set": 0.03,
    "talk": 0.035,
    "empty": 0.008,
    "unclear": 0.015,
}


class Maker:
    """Draws dialogues with their pictures, one after another, from one seed."""

    def __init__(self, pack: Pack, writer: Writer | None, seed: int, mix: dict[str, float] | None = None) -> None:
        self.rng = random.Random(seed)
        self.pack, self.writer = pack, writer
        self.catalogue = Catalogue(pack)
        self.scribe = Scribe(pack)
        self.mix = mix or MIX
        by_sprite: dict[int, list[Turn]] = {}
        for entry in pack.easy_vqa.get("train", []):
            by_sprite.setdefault(entry["sprite"], []).append((entry["question"], entry["answer"]))
        self.easy = list(by_sprite.items())

    def still(self, kind: str) -> tuple[Picture, View]:
        """A picture of things (no writing) and its view."""
        rng, catalogue = self.rng, self.catalogue
        if kind == "single":
            items = [catalogue.thing(rng, tinted=0.08)]
        elif kind == "count":
            hero = catalogue.shape(rng) if rng.random() < 0.25 else catalogue.thing(rng)
            number = rng.choices([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 3, 3, 3, 1.5, 1.2, 1, 1])[0]
            items = [hero] * number
            if number < 8 and rng.random() < 0.45:
                other = catalogue.shape(rng) if hero.is_shape else catalogue.thing(rng)
                if other.noun.name != hero.noun.name:
                    items += [other] * rng.randint(1, min(4, 9 - number))
            rng.shuffle(items)
        elif kind == "shapes":
            items = [catalogue.shape(rng) for _ in range(rng.choices([1, 2, 3, 4, 5, 6], [2, 3, 3, 2, 1, 1])[0])]
        else:
            number = rng.choices([2, 3, 4, 5, 6], [4, 3, 2, 0.7, 0.4])[0]
            items = [catalogue.thing(rng) for _ in range(number)]
            if rng.random() < 0.12:
                items[-1] = catalogue.shape(rng)
            if rng.random() < 0.1:
                items.append(items[0])
        scene = placed(items, rng)
        ground = background(rng, paints_of(scene))
        return Picture(ground, scene, (), finish(rng)), View(scene, ground, catalogue, rng)

    def nothing_to_name(self, kind: str) -> tuple[list[Picture], list[Turn], dict[str, Any]]:
        """A picture without things, or of things so near that nobody can tell what they are."""
        rng, catalogue = self.rng, self.catalogue
        ground = background(rng)
        items: list[Item] = []
        if kind == "unclear":
            for _ in range(rng.randint(2, 6)):
                item = catalogue.thing(rng, tinted=0.1)
                items.append(
                    replace(
                        item,
                        size=rng.uniform(1.8, 5.0),
                        x=rng.uniform(-0.6, 1.6),
                        y=rng.uniform(-0.6, 1.6),
                        angle=rng.uniform(0, 6.28),
                    )
                )
        picture = Picture(ground, tuple(items), (), finish(rng))
        return [picture], nothing_turns(kind, ground, catalogue, rng), {}

    def easy_vqa(self) -> tuple[Picture, list[Turn]]:
        sprite, known = self.rng.choice(self.easy)
        item = Item(self.catalogue.nouns[self.catalogue.names[0]], sprite, size=1.0)
        picture = Picture(Background((0.0, *(1.0,) * 6, *(0.0,) * 7), "", (1, 1, 1)), (item,), (), finish(self.rng))
        chosen = self.rng.sample(known, min(len(known), self.rng.randint(2, 4)))
        return picture, [(casual(q, self.rng) if self.rng.random() < 0.3 else q, a) for q, a in chosen]

    def draw(self) -> tuple[list[Picture], list[Turn], dict[str, Any]]:
        """Pictures, turns and how the first question is put."""
        rng = self.rng
        kind = rng.choices(list(self.mix), list(self.mix.values()))[0]
        if kind == "talk":
            return [], talk(self.catalogue, rng), {}
        if kind == "clip":
            film = clip(self.catalogue, rng)
            return film.frames, film.turns, {"clip": film}
        if kind == "set":
            pictures, asked = picture_set(self.catalogue, rng)
            return pictures, asked, {"numbered": rng.random() < 0.3}
        if kind == "reading":
            picture, asked = reading_picture(self.scribe, self.catalogue, rng, split=rng.random() < 0.14)
            return [picture], asked, {}
        if kind == "easy" and self.easy:
            picture, asked = self.easy_vqa()
            return [picture], asked, {}
        if kind in ("empty", "unclear"):
            return self.nothing_to_name(kind)
        picture, view = self.still(kind)
        return [picture], turns(view, rng.choices([2, 3, 4, 5], [2, 3, 3, 1])[0]), {}

    def texts(self) -> list[Turn]:
        """Only the turns (for the tokenizer)."""
        return self.draw()[1]

    def document(self) -> tuple[Document, list[Picture]]:
        """One dialogue as ids, with its pictures in order; at times a second picture follows in the same dialogue."""
        assert self.writer is not None
        rng = self.rng
        said: list[tuple[list[Part], str]] = []
        shown: list[Picture] = []
        for _ in range(2 if rng.random() < 0.06 else 1):
            pictures, asked, how = self.draw()
            if said and len(pictures) > 2:
                break
            question, answer = asked[0]
            if "clip" in how:
                film = how["clip"]
                first: list[Part] = [intro(len(pictures), film.duration)]
                for seconds in film.seconds:
                    first += [stamp(seconds), Seen()]
                first.append(OUTRO + question)
            elif pictures:
                first = first_parts(
                    question, [Seen(picture.double) for picture in pictures], rng, how.get("numbered", False)
                )
            else:
                first = [question]
            said.append((first, answer))
            said += [([later], reply) for later, reply in asked[1:]]
            shown += pictures
        return self.writer.document(said, rng.choice(SYSTEMS) if rng.random() < 0.08 else ""), shown


class Packer:
    """Fills batches of fixed sizes with documents, first fit."""

    def __init__(self, maker: Maker, sizes: Sizes) -> None:
        self.maker, self.sizes = maker, sizes
        self.waiting: list[tuple[Document, list[Picture]]] = []

    def batch(self) -> Batch:
        sizes = self.sizes
        rows: list[list[Document]] = [[] for _ in range(sizes.rows)]
        pictures_of: list[list[list[Picture]]] = [[] for _ in range(sizes.rows)]
        room = [sizes.tokens] * sizes.rows
        singles = doubles = answers = misses = 0
        still_waiting: list[tuple[Document, list[Picture]]] = []
        queue, self.waiting = self.waiting, still_waiting
        first_open = 0
        while misses < 60:
            document, pictures = queue.pop() if queue else self.maker.document()
            own_doubles = sum(picture.double for picture in pictures)
            own_singles = len(pictures) - own_doubles
            own_answers = sum(weight > 0 for weight in document.weights)
            if len(document.ids) > sizes.tokens:
                continue
            row = next((r for r in range(first_open, sizes.rows) if room[r] >= len(document.ids)), None)
            fits = (
                singles + own_singles <= sizes.pictures
                and doubles + own_doubles <= sizes.doubles
                and answers + own_answers <= sizes.answers
            )
            if row is None or not fits:
                misses += 1
                if len(still_waiting) < 64:
                    still_waiting.append((document, pictures))
                continue
            singles, doubles, answers = singles + own_singles, doubles + own_doubles, answers + own_answers
            rows[row].append(document)
            pictures_of[row].append(pictures)
            room[row] -= len(document.ids)
            while first_open < sizes.rows - 1 and room[first_open] < 70:
                first_open += 1
        return self._assemble(rows, pictures_of)

    def _assemble(self, rows: list[list[Document]], pictures_of: list[list[list[Picture]]]) -> Batch:
        sizes = self.sizes
        ids = np.zeros((sizes.rows, sizes.tokens), np.int16)
        positions = np.zeros((sizes.rows, sizes.tokens), np.int16)
        numbers = np.zeros((sizes.rows, sizes.tokens), np.int16)
        weights = np.zeros((sizes.rows, sizes.tokens), np.float32)
        single_pictures: list[Picture] = []
        double_pictures: list[Picture] = []
        single_places: list[NDArray[np.int64]] = []
        double_places: list[NDArray[np.int64]] = []
        count = 0
        for row, documents in enumerate(rows):
            at = 0
            for number, document in enumerate(documents, 1):
                length = len(document.ids)
                own = np.array(document.ids, np.int16)
                ids[row, at : at + length] = own
                positions[row, at : at + length] = np.arange(length)
                numbers[row, at : at + length] = number
                weights[row, at : at + length] = document.weights
                places = (np.nonzero(own == IMAGE)[0] + row * sizes.tokens + at).reshape(-1, 64)
                tile = 0
                for picture in pictures_of[row][number - 1]:
                    if picture.double:
                        double_pictures.append(picture)
                        double_places.append(places[tile : tile + 5])
                        tile += 5
                    else:
                        single_pictures.append(picture)
                        single_places.append(places[tile : tile + 1])
                        tile += 1
                at += length
                count += 1
        tiles = sizes.pictures + 5 * sizes.doubles
        nowhere = sizes.rows * sizes.tokens  # a place after the last one, for tiles that are only padding
        image_place = np.full((tiles, 64), nowhere, np.int64)
        if single_places:
            image_place[: len(single_pictures)] = np.concatenate(single_places)
        if double_places:
            image_place[sizes.pictures : sizes.pictures + 5 * len(double_pictures)] = np.concatenate(double_places)
        flat = weights.reshape(-1)
        place = np.nonzero(flat)[0]
        place = place[place % sizes.tokens > 0][: sizes.answers]
        answer_place = np.arange(sizes.answers) % nowhere  # places without an answer weigh nothing
        answer_id = np.zeros(sizes.answers, np.int64)
        answer_weight = np.zeros(sizes.answers, np.float32)
        answer_place[: len(place)] = place - 1
        answer_id[: len(place)] = ids.reshape(-1)[place]
        answer_weight[: len(place)] = flat[place]
        answer_weight /= max(answer_weight.sum(), 1e-6)
        return Batch(
            ids, positions, numbers, image_place, answer_place, answer_id, answer_weight, plan(single_pictures),
            plan(double_pictures),
            count, len(single_pictures) + len(double_pictures),
        )  # fmt: skip


def work(pack_folder: Path, tokenizer_folder: Path, sizes: Sizes, seed: int, queue: Any) -> None:
    """A worker: batches from its own seed, for ever."""
    maker = Maker(Pack.load_index(pack_folder), Writer(load_tokenizer(tokenizer_folder)), seed)
    packer = Packer(maker, sizes)
    while True:
        queue.put(packer.batch())


def stream(pack: Path, tokenizer: Path, sizes: Sizes, workers: int, seed: int) -> Iterator[Batch]:
    """Batches from `workers` processes (none: made here, in order, from one seed)."""
    if workers == 0:
        packer = Packer(Maker(Pack.load_index(pack), Writer(load_tokenizer(tokenizer)), seed), sizes)
        while True:
            yield packer.batch()
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue(maxsize=workers * 2)
    processes = [
        context.Process(target=work, args=(pack, tokenizer, sizes, seed * 1000 + number, queue), daemon=True)
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while True:
            yield queue.get(timeout=300)
    finally:
        for process in processes:
            process.terminate()
