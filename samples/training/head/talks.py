"""What the target is asked while a head learns to foresee it: pictures and questions, without answers.

The questions are those that a served model hears: the wordings of the recipe, and the prompts that Beholder's own
presets, pages and clients send (some of them ask for JSON in a shape). `answers.py` lets the target answer them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samples.training.batches import Maker
from samples.training.clips import OUTRO, clip, intro, picture_set, stamp
from samples.training.dialogue import Part, Seen, first_parts
from samples.training.phrasings import ask
from samples.training.questions import View, turns
from samples.training.reading import reading_picture
from samples.training.talk import SYSTEMS, talk
from samples.training.world import Picture

PRESETS = Path(__file__).parents[3] / "server" / "presets"


@dataclass(frozen=True)
class Question:
    """One turn's text, what kind of answer it asks for, and the JSON schema of that answer ("" for none)."""

    kind: str
    text: str
    schema: str = ""


@dataclass
class Talk:
    """A conversation with the target: the parts of each turn, its question, and the pictures in order."""

    turns: list[tuple[list[Part], Question]]
    pictures: list[Picture] = field(default_factory=list)
    system: str = ""


def presets() -> dict[str, dict[str, Any]]:
    """The prompts that a server offers by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(PRESETS.glob("*.json"))}


def preset_question(kind: str, preset: dict[str, Any]) -> Question:
    """A preset as the question that it sends."""
    schema = preset.get("response_format", {}).get("json_schema", {}).get("schema")
    return Question(kind, preset["prompt"], json.dumps(schema) if schema else "")


WORDINGS = {  # kind → kinds of `phrasings`
    "caption": ("describe",),
    "detail": ("detail",),
    "placard": ("placard",),
    "list": ("list", "background", "title", "count_all", "biggest"),
    "json": ("json",),
}
OFFERED = {"caption": ("one_line", "alt_text"), "detail": ("describe",), "placard": ("placard_in_words",),
           "json": ("list_objects",), "shape": ("museum_placard", "hazards", "list_objects"),
           "read": ("read_text",)}  # fmt: skip
PLAIN = {  # what pages, clients and the benchmark ask
    "caption": ("Describe the picture.", "Describe the picture.", "Is there a person?"),
    "detail": ("Describe the picture in detail, with all the things that you can see in it.",),
    "placard": ("Write a museum placard for this picture.",),
    "list": ("List the objects.", "What is the background?", "What is in the center of the picture?"),
    "json": ("List the objects as JSON.",),
    "clip": ("Describe the video.",),
}
MIX = {"caption": 0.2, "detail": 0.16, "placard": 0.17, "list": 0.07, "json": 0.07, "shape": 0.04, "read": 0.11,
       "chat": 0.15, "clip": 0.06, "set": 0.02, "talk": 0.02}  # fmt: skip
KINDS = tuple(MIX)
STILL = ("scene", "single", "count", "shapes")  # kinds of pictures of `Maker.still`


class Asker:
    """Draws talks, one after the other, from one seed. `testing` uses only wordings that are held out of training."""

    def __init__(self, maker: Maker, testing: bool = False) -> None:
        self.maker, self.testing = maker, testing
        self.presets = presets()

    def question(self, kind: str) -> Question:
        """A question of a kind that suits any still picture."""
        rng = self.maker.rng
        chance = rng.random()
        offered = OFFERED.get(kind, ())
        if offered and (chance < 0.35 or kind not in WORDINGS):
            return preset_question(kind, self.presets[rng.choice(offered)])
        if kind in PLAIN and chance < 0.6:
            return Question(kind, rng.choice(PLAIN[kind]))
        return Question(kind, ask(rng.choice(WORDINGS[kind]), rng, self.testing))

    def talk(self, kind: str) -> Talk:
        """Pictures and questions of one kind; half of the still pictures are asked about again, in any other way."""
        rng, maker = self.maker.rng, self.maker
        if kind == "talk":
            return Talk([([question], Question(kind, question)) for question, _ in talk(maker.catalogue, rng)])
        if kind == "clip":
            film = clip(maker.catalogue, rng, rng.choice([2, 3, 4]), testing=self.testing)
            asked = [Question(kind, question) for question, _ in film.turns[:3]]
            if rng.random() < 0.4:
                asked[0] = Question(kind, rng.choice(PLAIN[kind]))
            first: list[Part] = [intro(len(film.frames), film.duration)]
            for seconds in film.seconds:
                first += [stamp(seconds), Seen()]
            return self._conversation([*first, OUTRO + asked[0].text], asked, film.frames)
        if kind == "set":
            pictures, made = picture_set(maker.catalogue, rng, self.testing)
            asked = [Question(kind, question) for question, _ in made]
            parts = first_parts(asked[0].text, [Seen()] * len(pictures), rng, rng.random() < 0.3)
            return self._conversation(parts, asked, pictures)
        if kind == "read":
            picture, made = reading_picture(maker.scribe, maker.catalogue, rng, self.testing)
            asked = [self.question(kind) if rng.random() < 0.4 else Question(kind, made[0][0])]
            asked += [Question(kind, question) for question, _ in made[1:3]]
        else:
            picture, _ = maker.still(rng.choices(STILL, [5, 2, 2, 3])[0])
            asked = self._about(picture, kind)
        return self._conversation([Seen(), asked[0].text], asked, [picture])

    def _about(self, picture: Picture, kind: str) -> list[Question]:
        rng, maker = self.maker.rng, self.maker
        view = View(picture.items, picture.background, maker.catalogue, rng, self.testing)
        chat = [Question("chat", question) for question, _ in turns(view, rng.choice([2, 3, 4]))]
        if kind == "chat":
            return chat
        asked = [self.question(kind)]
        for _ in range(rng.choices([0, 1, 2], [4, 3, 2])[0]):
            more = chat[0] if rng.random() < 0.3 else self.question(rng.choice(tuple(WORDINGS)))
            if more.kind not in {question.kind for question in asked}:  # else it would only repeat itself
                asked.append(more)
        return asked

    def _conversation(self, first: list[Part], asked: list[Question], pictures: list[Picture]) -> Talk:
        rng = self.maker.rng
        later: list[tuple[list[Part], Question]] = [([question.text], question) for question in asked[1:]]
        return Talk([(first, asked[0]), *later], pictures, rng.choice(SYSTEMS) if rng.random() < 0.06 else "")


def draw(asker: Asker, mix: dict[str, float] = MIX) -> Callable[[], Talk]:
    """A source of talks in the shares of `mix`."""
    kinds, shares = list(mix), list(mix.values())
    return lambda: asker.talk(asker.maker.rng.choices(kinds, shares)[0])
