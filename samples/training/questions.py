"""Questions about a still picture, with their answers.

Every function takes a `View` (what the picture shows) and returns a question and its answer, or None where the picture
does not allow the question. `turns` picks several for a dialogue.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from samples.training.colours import SHAPE_COLOURS, VIVID
from samples.training.names import Noun, article, kinds_of, pluralise
from samples.training.phrasings import ONE_WORD, ask
from samples.training.splits import held_out, pair_name
from samples.training.world import SHAPES, Background, Catalogue, Item

Turn = tuple[str, str]
NO_CLUE = [
    "I cannot tell from the picture.", "The picture does not show that.", "I cannot tell that from this picture.",
    "That cannot be seen in the picture.",
]  # fmt: skip


@dataclass
class View:
    """A picture as a questioner sees it."""

    items: tuple[Item, ...]
    background: Background
    catalogue: Catalogue
    rng: random.Random
    testing: bool = False

    @property
    def distinct(self) -> list[Item]:
        """Things whose label occurs once."""
        counts = Counter(item.label for item in self.items)
        return [item for item in self.items if counts[item.label] == 1]

    def ask(self, kind: str, **slots: str) -> str:
        return ask(kind, self.rng, self.testing, **slots)

    def absent(self) -> tuple[Noun, str]:
        """A thing that the picture does not show, with a colour where its kind needs one."""
        shown = {item.noun.name for item in self.items}
        labels = {item.label for item in self.items}
        if any(item.is_shape for item in self.items):
            while True:
                noun = Noun(self.rng.choice(SHAPES), "shape")
                colour = self.rng.choice(SHAPE_COLOURS)
                if f"{colour} {noun.name}" not in labels:
                    return noun, colour
        while True:
            noun = self.catalogue.nouns[self.rng.choice(self.catalogue.things)]
            if noun.name not in shown and not any(noun.name in name or name in noun.name for name in shown):
                return noun, ""


def the(item: Item) -> str:
    return f"the {item.label}"


def place_of(item: Item) -> str:
    """The ninth of the picture in which the thing lies, or "" if it lies on a border between them."""

    def part(value: float, low: str, high: str) -> str | None:
        if value < 0.31:
            return low
        if value > 0.69:
            return high
        return "" if 0.40 < value < 0.60 else None

    column, row = part(item.x, "left", "right"), part(item.y, "top", "bottom")
    if column is None or row is None:
        return ""
    if row and column:
        return f"in the {row} {column}"
    if not row and not column:
        return "in the center"
    return f"on the {column}" if column else f"at the {row}"


def side_of(first: Item, second: Item) -> str:
    """How the first lies to the second: "to the left of", …, or "" where it is not clear."""
    dx, dy = first.x - second.x, first.y - second.y
    if abs(dx) > 0.16 and abs(dx) > 1.4 * abs(dy):
        return "to the left of" if dx < 0 else "to the right of"
    if abs(dy) > 0.16 and abs(dy) > 1.4 * abs(dx):
        return "above" if dy < 0 else "below"
    return ""


OPPOSITE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}


def enumeration(phrases: list[str]) -> str:
    """ "a cat, a dog and an umbrella" """
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def inventory(items: tuple[Item, ...]) -> list[str]:
    """The things with their numbers: "2 cats", "a dog"."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.label, []).append(item)
    return [
        group[0].some() if len(group) == 1 else f"{len(group)} {pluralise(label) if group[0].noun.countable else label}"
        for label, group in groups.items()
    ]


def ground(view: View) -> str:
    name = view.background.name
    return f" on {article(name)} {name} background" if name else ""


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def clear_pair(view: View) -> tuple[Item, Item, str] | None:
    """Two things with a clear relation; held-out pairs of nouns only in tests."""
    items = view.distinct
    view.rng.shuffle(items)
    for n, first in enumerate(items):
        for second in items[n + 1 :]:
            side = side_of(first, second)
            if side and held_out("pair", pair_name(first.noun.name, second.noun.name)) == view.testing:
                return first, second, side
    return None


def describe(view: View) -> Turn | None:
    items = view.items
    things = inventory(items)
    if len(items) == 2 and len(things) == 2 and side_of(items[0], items[1]):
        text = f"{items[0].some()} {items[0].noun.verb} {side_of(items[0], items[1])} {items[1].some()}{ground(view)}"
        if held_out("pair", pair_name(items[0].noun.name, items[1].noun.name)) != view.testing:
            text = enumeration(things) + ground(view)
    else:
        text = enumeration(things) + ground(view)
    return view.ask("describe"), sentence(text)


def detail(view: View) -> Turn | None:
    if len(view.items) > 4:
        return None
    things = inventory(view.items)
    lead = "The picture shows " + enumeration(things) + "."
    parts = [lead]
    for item in view.distinct:
        place = place_of(item)
        facts = []
        if item.colour and not item.is_shape and not item.tint:
            facts.append(f"{item.noun.verb} {item.colour}")
        if (place and len(view.items) > 1) or place == "in the center":
            facts.append(f"{item.noun.verb} {place}" if not facts else place)
        if facts:
            parts.append(
                f"The {item.label} "
                + " and ".join(facts if len(facts) < 2 else [facts[0], f"{item.noun.verb} {facts[1]}"])
                + "."
            )
    name = view.background.name
    parts.append(f"The background is plain {name}." if name else "The background has more than one color.")
    return view.ask("detail"), " ".join(parts)


def listing(view: View) -> Turn | None:
    return view.ask("list"), sentence(enumeration(inventory(view.items)))


def as_json(view: View) -> Turn | None:
    names = list(dict.fromkeys(item.label for item in view.items))
    return view.ask("json"), json.dumps({"objects": names})


def name(view: View) -> Turn | None:
    if len(view.items) != 1:
        return None
    item = view.items[0]
    kinds = kinds_of(item.noun)
    if kinds and view.rng.random() < 0.25 and not view.testing:
        return view.ask("name_kind", k=kinds[0]), sentence(item.some())
    return view.ask("name"), sentence(item.some())


def count(view: View) -> Turn | None:
    counts = Counter(item.label for item in view.items)
    groups = {item.label: item for item in view.items if item.noun.countable}
    rng = view.rng
    if view.rng.random() < 0.08 or not groups:
        noun, colour = view.absent()
        if not noun.countable:
            return None
        plural = pluralise(f"{colour} {noun.name}".strip())
        return view.ask("count", ns=plural), f"There are no {plural}."
    if any(item.is_shape for item in view.items) and rng.random() < 0.4:  # by shape or by colour alone
        item = rng.choice([item for item in view.items if item.is_shape])
        if rng.random() < 0.5:
            plural, number = item.noun.plural(), sum(other.noun.name == item.noun.name for other in view.items)
            single = item.noun.name
        else:
            number = sum(other.colour == item.colour for other in view.items)
            plural, single = f"{item.colour} shapes", f"{item.colour} shape"
    else:
        label = max(groups, key=lambda key: counts[key] + rng.random() * 1.5)
        plural, number, single = pluralise(label), counts[label], label
    return view.ask("count", ns=plural), f"There are {number} {plural}." if number != 1 else f"There is 1 {single}."


def count_all(view: View) -> Turn | None:
    if not all(item.noun.countable for item in view.items):
        return None
    number = len(view.items)
    return view.ask("count_all"), f"There are {number} objects." if number != 1 else "There is 1 object."


def coloured(view: View) -> list[Item]:
    """Things whose colour may be asked: named once without the colour, and of one colour."""
    counts = Counter(item.noun.name for item in view.items)
    return [item for item in view.items if item.colour and counts[item.noun.name] == 1]


def colour(view: View) -> Turn | None:
    items = coloured(view)
    if view.rng.random() < 0.07:
        noun, _ = view.absent()
        if any(item.noun.name == noun.name for item in view.items):
            return None
        return view.ask("colour", a=f"the {noun.name}", v=noun.verb), f"I do not see {noun.some()} in the picture."
    if not items:
        return None
    item = view.rng.choice(items)
    if len(view.items) == 1 and view.rng.random() < 0.3:
        return view.ask("colour_only"), f"It is {item.colour}."
    return view.ask(
        "colour", a=f"the {item.noun.name}", v=item.noun.verb
    ), f"The {item.noun.name} {item.noun.verb} {item.colour}."


def of_colour(view: View) -> Turn | None:
    if not all(item.colour for item in view.items) or len(view.items) < 2:
        return None
    shades = Counter(item.colour for item in view.items)
    items = [item for item in view.items if shades[item.colour] == 1]
    if not items:
        return None
    item = view.rng.choice(items)
    return view.ask("of_colour", c=item.colour), f"The {item.noun.name} {item.noun.verb} {item.colour}."


def is_colour(view: View) -> Turn | None:
    items = coloured(view)
    if not items:
        return None
    item = view.rng.choice(items)
    slots = {"a": f"the {item.noun.name}", "v": item.noun.verb}
    if view.rng.random() < 0.5:
        return view.ask(
            "is_colour", c=item.colour, **slots
        ), f"Yes, the {item.noun.name} {item.noun.verb} {item.colour}."
    wrong = view.rng.choice([c for c in VIVID if c != item.colour])
    return view.ask("is_colour", c=wrong, **slots), f"No, the {item.noun.name} {item.noun.verb} {item.colour}."


def where(view: View) -> Turn | None:
    if view.rng.random() < 0.07:
        noun, shade = view.absent()
        label = f"{shade} {noun.name}".strip()
        return view.ask("where", a=f"the {label}", v=noun.verb), f"I do not see {noun.some(shade)} in the picture."
    items = [item for item in view.distinct if place_of(item)]
    if not items:
        return None
    item = view.rng.choice(items)
    return view.ask("where", a=the(item), v=item.noun.verb), f"The {item.label} {item.noun.verb} {place_of(item)}."


def at(view: View) -> Turn | None:
    places = Counter(place_of(item) for item in view.items)
    items = [item for item in view.items if place_of(item) and places[place_of(item)] == 1 and places[""] == 0]
    if len(view.items) < 2 or not items:
        return None
    item = view.rng.choice(items)
    return view.ask("at", p=place_of(item)), sentence(item.some())


def relation(view: View) -> Turn | None:
    pair = clear_pair(view)
    if pair is None or len(view.items) != 2:
        return None
    first, second, side = pair
    return view.ask("relation", side=side, a=the(second)), sentence(first.some())


def relation_yes_no(view: View) -> Turn | None:
    pair = clear_pair(view)
    if pair is None:
        return None
    first, second, side = pair
    asked = side if view.rng.random() < 0.5 else OPPOSITE[side]
    answer = f"{'Yes' if asked == side else 'No'}, the {first.label} {first.noun.verb} {side} the {second.label}."
    return view.ask("relation_yes_no", a=the(first), b=the(second), v=first.noun.verb, side=asked), answer


def relation_choice(view: View) -> Turn | None:
    pair = clear_pair(view)
    if pair is None:
        return None
    first, second, side = pair
    kind = "left_right" if "left" in side or "right" in side else "above_below"
    kind = "relative" if view.rng.random() < 0.35 else kind
    return view.ask(
        kind, a=the(first), b=the(second), v=first.noun.verb
    ), f"The {first.label} {first.noun.verb} {side} the {second.label}."


def exists(view: View) -> Turn | None:
    if view.rng.random() < 0.5:
        item = view.rng.choice(view.items)
        shade = item.colour if item.is_shape or item.tint else ""
        if shade and view.rng.random() < 0.3 and not item.is_shape:
            shade = ""
        answer = f"Yes, there {item.noun.verb} {item.noun.some(shade)}."
        if sum(other.label == item.label for other in view.items) > 1:
            answer = f"Yes, there are {sum(other.label == item.label for other in view.items)} {pluralise(item.label)}."
        return view.ask("exists", x=item.noun.some(shade), ns=pluralise(f"{shade} {item.noun.name}".strip())), answer
    noun, shade = view.absent()
    plural = pluralise(f"{shade} {noun.name}".strip())
    answer = f"No, there {noun.verb} no {f'{shade} {noun.name}'.strip()}."
    return view.ask("exists", x=noun.some(shade), ns=plural), answer


def is_it(view: View) -> Turn | None:
    if len(view.items) != 1:
        return None
    item = view.items[0]
    if view.rng.random() < 0.5:
        return view.ask("is_it", x=item.some()), f"Yes, it is {item.some()}."
    noun, shade = view.absent()
    return view.ask("is_it", x=noun.some(shade)), f"No, it is {item.some()}."


def kind_exists(view: View) -> Turn | None:
    if any(item.is_shape for item in view.items):
        return None
    present = {kind: item for item in view.items for kind in kinds_of(item.noun)}
    if present and view.rng.random() < 0.5:
        kind = view.rng.choice(sorted(present))
        item = present[kind]
        return view.ask(
            "kind_exists", x=f"{article(kind)} {kind}", k=kind
        ), f"Yes, there {item.noun.verb} {item.some()}."
    if any(not kinds_of(item.noun) for item in view.items):
        return None
    missing = [k for k in ("animal", "bird", "fruit", "vegetable", "vehicle", "flower", "insect", "building",
    "drink", "person",
                           "musical instrument", "boat", "flag", "piece of clothing",
                           "tool") if k not in present]  # fmt: skip
    if "food" in present:
        missing = [k for k in missing if k not in ("fruit", "vegetable")]
    if not missing:
        return None
    kind = view.rng.choice(missing)
    return view.ask("kind_exists", x=f"{article(kind)} {kind}", k=kind), f"No, there is no {kind}."


def bigger(view: View) -> Turn | None:
    items = view.distinct
    if len(items) < 2:
        return None
    first, second = view.rng.sample(items, 2)
    a, b = first.size, second.size
    if max(a, b) < 1.35 * min(a, b):
        return None
    large, small = (first, second) if a > b else (second, first)
    if view.rng.random() < 0.5:
        question = view.ask("bigger", a=the(first), b=the(second), v=first.noun.verb)
        answer = f"the {large.label} {large.noun.verb} bigger than the {small.label}"
        right = large is first
    else:
        question = view.ask("smaller", a=the(first), b=the(second), v=first.noun.verb)
        answer = f"the {small.label} {small.noun.verb} smaller than the {large.label}"
        right = small is first
    low = question.lower()
    if f" than {the(second)}".lower() in low and " or " not in low:
        return question, f"{'Yes' if right else 'No'}, {answer}."
    return question, sentence(answer)


def biggest(view: View) -> Turn | None:
    ranked = sorted(view.items, key=lambda item: -item.size)
    if len(ranked) < 2 or ranked[0].size < 1.3 * ranked[1].size:
        return None
    return view.ask("biggest"), sentence(the(ranked[0]))


def background(view: View) -> Turn | None:
    known = view.background.name
    return view.ask("background"), f"The background is {known}." if known else "The background has more than one color."


def placard(view: View) -> Turn | None:
    if len(view.items) > 4:
        return None
    things = inventory(view.items)
    pair = clear_pair(view)
    body = f"This picture shows {enumeration(things)}."
    if pair and len(view.items) <= 3:
        first, second, side = pair
        body += f" The {first.label} {first.noun.verb} {side} the {second.label}."
    elif view.items[0].colour and not view.items[0].is_shape and not view.items[0].tint:
        body += f" The {view.items[0].noun.name} {view.items[0].noun.verb} {view.items[0].colour}."
    name = view.background.name
    body += f" The ground is plain {name}." if name else ""
    return view.ask("placard"), f"{title_text(view)}. {body} Artist unknown."


def title_text(view: View) -> str:
    things = [
        capitals(text.split(" ", 1)[1] if text.split(" ")[0] in ("a", "an", "the", "some") else text)
        for text in inventory(view.items)
    ]
    return enumeration(things) if len(things) > 1 else things[0]


def capitals(text: str) -> str:
    return " ".join(
        word if word in ("of", "with", "and", "in", "a", "the") else word[0].upper() + word[1:]
        for word in text.split(" ")
    )


def title(view: View) -> Turn | None:
    return view.ask("title"), title_text(view)


def has_text(view: View) -> Turn | None:
    return view.ask("has_text" if view.rng.random() < 0.5 else "read"), "There is no text in the picture."


def unknowable(view: View) -> Turn | None:
    return view.ask("unknowable"), view.rng.choice(NO_CLUE)


QUESTIONS: dict[Callable[[View], Turn | None], float] = {
    describe: 3.0,
    detail: 1.0,
    listing: 1.5,
    as_json: 0.5,
    name: 4.0,
    count: 2.2,
    count_all: 0.8,
    colour: 3.0,
    of_colour: 1.0,
    is_colour: 0.8,
    where: 2.0,
    at: 1.2,
    relation: 1.4,
    relation_yes_no: 1.6,
    relation_choice: 1.8,
    exists: 2.0,
    is_it: 0.7,
    kind_exists: 0.8,
    bigger: 1.0,
    biggest: 0.5,
    background: 0.7,
    placard: 0.7,
    title: 0.6,
    has_text: 0.3,
    unknowable: 0.35,
}
ONE_WORD_KINDS = {colour, count, name, relation_yes_no, exists, is_it, is_colour, count_all}


UNCLEAR = [
    "I cannot tell what this is.", "I am not sure what this shows.", "I cannot make out any object here.",
    "This is not clear to me.",
]  # fmt: skip


def nothing_turns(kind: str, ground: Background, catalogue: Catalogue, rng: random.Random) -> list[Turn]:
    """Questions about an `empty` or an `unclear` picture."""
    view = View((), ground, catalogue, rng)
    plain = (
        f"nothing but {article(ground.name)} {ground.name} background" if ground.name else "nothing but a background"
    )
    whole = ("describe", "name", "list", "detail", "placard", "title")
    found: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        wording = rng.choice([*whole, "read", "exists", "count", "colour", "where", "count_all"])
        noun, shade = view.absent()
        label = f"{shade} {noun.name}".strip()
        if wording in whole:
            answer = rng.choice(UNCLEAR) if kind == "unclear" else f"I see {plain}."
            found.append((view.ask(wording), answer))
        elif wording == "read":
            found.append((view.ask("read"), "There is no text in the picture."))
        elif wording == "exists":
            found.append(
                (view.ask("exists", x=noun.some(shade), ns=pluralise(label)), f"No, there {noun.verb} no {label}.")
            )
        elif wording == "count" and noun.countable:
            found.append((view.ask("count", ns=pluralise(label)), f"There are no {pluralise(label)}."))
        elif wording == "count_all" and kind == "empty":
            found.append((view.ask("count_all"), "There are no objects."))
        elif wording == "colour":
            found.append(
                (view.ask("colour", a=f"the {noun.name}", v=noun.verb), f"I do not see {noun.some()} in the picture.")
            )
        else:
            found.append(
                (view.ask("where", a=f"the {label}", v=noun.verb), f"I do not see {noun.some(shade)} in the picture.")
            )
    return found


def shortened(make: Callable[[View], Turn | None], turn: Turn, view: View) -> Turn:
    """The same question with the wish for one word, and the one word."""
    question, answer = turn
    if answer.startswith("I do not"):
        return turn
    if answer.startswith(("Yes", "No,")):
        word = answer.split(",")[0]
    elif make is colour:
        word = capitals(answer.rstrip(".").split(" ")[-1])
    elif make in (count, count_all):
        word = answer.split(" ")[2] if not answer.startswith("There are no") else "0"
    else:
        item = view.items[0]
        word = capitals(item.noun.name)
    return question + " " + view.rng.choice(ONE_WORD), word


def turns(view: View, most: int) -> list[Turn]:
    """Up to `most` different questions about the picture."""
    makers = list(QUESTIONS)
    weights = list(QUESTIONS.values())
    chosen: list[Turn] = []
    used: set[int] = set()
    for _ in range(most * 4):
        place = view.rng.choices(range(len(makers)), weights)[0]
        if place in used and makers[place] not in (colour, exists, where):
            continue
        turn = makers[place](view)
        if turn is None:
            continue
        used.add(place)
        if makers[place] in ONE_WORD_KINDS and view.rng.random() < 0.12:
            turn = shortened(makers[place], turn, view)
        chosen.append(turn)
        if len(chosen) == most:
            break
    return chosen or [describe(view) or ("What do you see?", "A picture.")]
