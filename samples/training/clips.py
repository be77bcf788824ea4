"""Short clips and sets of pictures: what moves, appears or vanishes, and which picture shows what."""

import random
from dataclasses import dataclass, replace

from samples.training.phrasings import ask
from samples.training.questions import NO_CLUE, Turn, View, enumeration, sentence
from samples.training.world import Catalogue, Item, Picture, background, finish, paints_of, placed

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}


@dataclass
class Clip:
    """Frames in order with their times in seconds, and questions about them."""

    frames: list[Picture]
    seconds: list[float]
    duration: int
    turns: list[Turn]


def intro(frames: int, duration: int) -> str:
    """SmolVLM's words before the frames of a video."""
    clock = f"{duration // 3600}:{duration // 60 % 60:02d}:{duration % 60:02d}"
    return f"You are provided the following series of {NUMBER_WORDS[frames]} frames from a {clock} [H:MM:SS] video.\n"


def stamp(seconds: float) -> str:
    """SmolVLM's words before one frame."""
    return f"\nFrame from {int(seconds) // 60:02d}:{int(seconds) % 60:02d}:"


OUTRO = "\n\n"


def some_item(catalogue: Catalogue, rng: random.Random) -> Item:
    return catalogue.shape(rng) if rng.random() < 0.3 else catalogue.thing(rng)


def still(catalogue: Catalogue, rng: random.Random, count: int, apart_from: Item) -> list[Item]:
    """Other things, none with the same name."""
    found: list[Item] = []
    while len(found) < count:
        item = some_item(catalogue, rng)
        if item.noun.name not in {apart_from.noun.name, *(other.noun.name for other in found)}:
            found.append(item)
    return found


def clip(
    catalogue: Catalogue, rng: random.Random, count: int | None = None, event: str | None = None, testing: bool = False
) -> Clip:
    """A clip of `count` frames with one event."""
    count = count or rng.choices([2, 3, 4, 5, 6, 8], [1, 1.5, 3, 1, 1, 1])[0]
    event = event or rng.choices(["move", "appear", "vanish", "grow", "shrink", "still"], [5, 1.3, 1.3, 0.8, 0.8, 1])[0]
    hero = some_item(catalogue, rng)
    others = still(catalogue, rng, rng.choice([0, 0, 0, 1, 1, 2]) + (event in ("appear", "vanish")), hero)
    scene = placed([hero, *others], rng, 0.2, 0.36)
    hero, bystanders = replace(scene[0], size=min(scene[0].size, 0.42)), scene[1:]
    ground = background(rng, paints_of(scene), plain=0.7)
    look = finish(rng)
    name, verb, the = hero.label, hero.noun.verb, f"the {hero.label}"
    do = (lambda word: word.removesuffix("s")) if hero.noun.is_plural else (lambda word: word)
    frames: list[tuple[Item, ...]] = []
    questions: list[Turn] = []
    if event == "move":
        direction = rng.choice(list(DIRECTIONS))
        dx, dy = DIRECTIONS[direction]
        reach = rng.uniform(0.35, 0.62) if count > 2 else rng.uniform(0.22, 0.5)
        start_x = 0.5 - dx * reach / 2 + rng.uniform(-0.08, 0.08) if dx else rng.uniform(0.22, 0.78)
        start_y = 0.5 - dy * reach / 2 + rng.uniform(-0.08, 0.08) if dy else rng.uniform(0.22, 0.78)
        wobble = rng.uniform(0, 0.02)
        for n in range(count):
            t = n / (count - 1)
            x = start_x + dx * reach * t + (rng.uniform(-wobble, wobble) if dy else 0)
            y = start_y + dy * reach * t + (rng.uniform(-wobble, wobble) if dx else 0)
            frames.append((*bystanders, replace(hero, x=x, y=y)))
        way = f"to the {direction}" if dx else direction
        story = f"The {name} {do('moves')} {way}."
        questions.append((ask("direction", rng, testing, a=the), story))
        if rng.random() < 0.5:
            questions.append((ask("what_moves", rng, testing), sentence(f"the {name} {do('moves')}")))
        if rng.random() < 0.35:
            if bystanders and rng.random() < 0.5:
                other = bystanders[0]
                stays = "stay" if other.noun.is_plural else "stays"
                questions.append(
                    (ask("does_move", rng, testing, a=f"the {other.label}"), f"The {other.label} {stays} in place.")
                )
            else:
                questions.append((ask("does_move", rng, testing, a=the), story))
    elif event in ("appear", "vanish"):
        switch = rng.randint(1, count - 1)
        for n in range(count):
            shown = (n >= switch) == (event == "appear")
            frames.append((*bystanders, hero) if shown else bystanders)
        story = (
            f"{hero.some()[0].upper() + hero.some()[1:]} {do('appears')}."
            if event == "appear"
            else f"The {name} {do('disappears')}."
        )
        questions.append((ask("appears" if event == "appear" else "vanishes", rng, testing), story))
    elif event in ("grow", "shrink"):
        small, large = rng.uniform(0.14, 0.24), rng.uniform(0.5, 0.7)
        sizes = [small + (large - small) * n / (count - 1) for n in range(count)]
        if event == "shrink":
            sizes.reverse()
        hero = replace(hero, x=rng.uniform(0.4, 0.6), y=rng.uniform(0.4, 0.6))
        bystanders = ()
        frames = [(replace(hero, size=size),) for size in sizes]
        story = f"The {name} {do('gets')} {'bigger' if event == 'grow' else 'smaller'}."
    else:
        frames = [(*bystanders, hero)] * count
        story = "Nothing changes."
        if rng.random() < 0.5:
            questions.append((ask("does_move", rng, testing, a=the), f"The {name} {do('stays')} in place."))
        if rng.random() < 0.5:
            questions.append((ask("what_moves", rng, testing), "Nothing moves."))
        if rng.random() < 0.3:
            questions.append((ask("appears" if rng.random() < 0.5 else "vanishes", rng, testing), "Nothing changes."))
    questions.insert(rng.randint(0, len(questions)), (ask("what_happens", rng, testing), story))
    last = View(frames[-1] or frames[0], ground, catalogue, rng, testing)
    if rng.random() < 0.35 and all(frames):
        questions.append((ask("list", rng, testing), sentence(enumeration([item.some() for item in last.items]))))
    if hero.colour and not hero.tint and rng.random() < 0.2:
        questions.append((ask("colour", rng, testing, a=the, v=verb), f"The {name} {verb} {hero.colour}."))
    if rng.random() < 0.05:
        questions.append((ask("unknowable", rng, testing), rng.choice(NO_CLUE)))
    pictures = [Picture(ground, items, (), look) for items in frames]
    gap = rng.choice([0.5, 1.0, 1.0, 1.0, 1.0, 2.0])
    seconds = [n * gap for n in range(count)]
    duration = int(seconds[-1] + gap) if rng.random() < 0.7 else int(seconds[-1])
    return Clip(pictures, seconds, duration, questions)


ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]


def picture_set(catalogue: Catalogue, rng: random.Random, testing: bool = False) -> tuple[list[Picture], list[Turn]]:
    """Two to four pictures of one or two things each, and questions that need all of them."""
    count = rng.choices([2, 3, 4], [4, 2, 1])[0]
    alike = count == 2 and rng.random() < 0.3
    used: list[Item] = []
    views: list[View] = []
    for n in range(count):
        if alike and n == 1:
            first = views[0].items[0]
            items = [
                catalogue.thing(rng, first.noun.name)
                if not first.is_shape
                else catalogue.shape(rng, first.noun.name, first.colour)
            ]
            items = [replace(items[0], colour=first.colour, tint=first.tint)] if first.tint else items
        else:
            items = []
            for _ in range(1 if rng.random() < 0.75 or alike else 2):
                item = some_item(catalogue, rng)
                while item.noun.name in {other.noun.name for other in used}:
                    item = some_item(catalogue, rng)
                items.append(item)
                used.append(item)
        scene = placed(items, rng, 0.3, 0.5)
        views.append(View(scene, background(rng, paints_of(scene), plain=0.7), catalogue, rng, testing))
    pictures = [Picture(view.background, view.items, (), finish(rng)) for view in views]
    questions: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        chance = rng.random()
        n = rng.randrange(count)
        view = views[n]
        if chance < 0.4:
            questions.append(
                (
                    ask("nth_picture", rng, testing, nth=ORDINALS[n]),
                    sentence(enumeration([i.some() for i in view.items])),
                )
            )
        elif chance < 0.65 and not alike:
            item = rng.choice(view.items)
            questions.append(
                (ask("which_picture", rng, testing, x=item.some()), f"The {ORDINALS[n]} picture shows {item.some()}.")
            )
        elif chance < 0.78 and count == 2:
            first, second = (sentence(enumeration([i.some() for i in v.items]))[:-1] for v in views)
            if alike:
                questions.append((ask("same", rng, testing), f"They show the same: {views[0].items[0].some()}."))
            else:
                lower = lambda text: text[0].lower() + text[1:]  # noqa: E731
                questions.append(
                    (
                        ask("same", rng, testing),
                        f"They differ: the first shows {lower(first)} and the second {lower(second)}.",
                    )
                )
        elif chance < 0.85:
            questions.append((ask("how_many_pictures", rng, testing), f"There are {count} pictures."))
        else:
            shown = [f"the {ORDINALS[k]} shows {enumeration([i.some() for i in v.items])}" for k, v in enumerate(views)]
            questions.append((ask("describe", rng, testing), sentence(", ".join(shown[:-1]) + " and " + shown[-1])))
    return pictures, questions
