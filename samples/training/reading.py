"""Pictures with writing on them, and questions about it.

Letters are drawn by Pillow into small masks (a worker's job); colour, place and slant are left to `render`.
"""

import io
import random
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from samples.training.colours import SHAPE_COLOURS, VIVID, contrast, paint
from samples.training.names import Noun
from samples.training.pack import Pack
from samples.training.phrasings import ONE_WORD, ask
from samples.training.questions import NO_CLUE, Turn
from samples.training.render import STRIP
from samples.training.splits import held_out
from samples.training.world import PLATE, RGB, Background, Catalogue, Item, Picture, Writing, background, finish, placed

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
SIGNS = """stop exit open closed sale push pull danger caution no entry welcome hotel cafe bakery taxi bus stop parking
police hospital pharmacy school library museum restroom ticket office information wet paint keep out no
smoking private fire exit self service please wait menu today special free coffee hot drinks ice cream fresh
fish bar pizza books flowers gate platform arrivals departures check in lost and found out of order one way
slow yield no parking garage post office bank market""".split()  # noqa: SIM905


class Scribe:
    """Draws text in the pack's typefaces; `testing` uses the held-out typefaces and words only."""

    def __init__(self, pack: Pack, testing: bool = False) -> None:
        names = [name for name in pack.typefaces if held_out("font", name) == testing]
        self.faces = [ImageFont.truetype(io.BytesIO(pack.typefaces[name]), 40) for name in names]
        self.sizes: dict[tuple[int, int], ImageFont.FreeTypeFont] = {}
        self.words = [word for word in pack.words if held_out("word", word) == testing]
        self.short = [word for word in self.words if len(word) <= 8]
        signs = sorted({word for word in SIGNS if held_out("word", word) == testing})
        self.signs = signs or self.short
        self.names = [
            name
            for name in dict.fromkeys(pack.names)
            if name and " " not in name and held_out("word", name.lower()) == testing
        ]

    def face(self, rng: random.Random, size: int) -> ImageFont.FreeTypeFont:
        chosen = rng.randrange(len(self.faces))
        key = (chosen, size)
        if key not in self.sizes:
            self.sizes[key] = self.faces[chosen].font_variant(size=size)
        return self.sizes[key]

    def word(self, rng: random.Random) -> str:
        """One word as signs write it: small, capital or all capitals; at times letters that are no word."""
        chance = rng.random()
        if chance < 0.16:
            text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
        elif chance < 0.28:
            text = rng.choice(self.signs)
        elif chance < 0.38:
            text = rng.choice(self.names)
        else:
            text = rng.choice(self.short if rng.random() < 0.7 else self.words)
        return rng.choice((text, text.capitalize(), text.upper(), text.upper()))

    def number(self, rng: random.Random) -> str:
        """A price, a time, a number, a date or a percentage."""
        kind = rng.randrange(6)
        if kind == 0:
            return f"${rng.randint(0, 99)}.{rng.randint(0, 99):02d}"
        if kind == 1:
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        if kind == 2:
            return str(rng.randint(0, 10 ** rng.randint(1, 5)))
        if kind == 3:
            return f"{rng.randint(1, 100)}%"
        if kind == 4:
            return rng.choice(["No. ", "Gate ", "Room ", "Bus ", "Platform ", "Table "]) + str(rng.randint(1, 99))
        return f"{rng.randint(1, 31)} {rng.choice(MONTHS)}"

    def strip(self, lines: list[str], rng: random.Random, fill: float) -> np.ndarray:
        """A mask (128, 256) with the lines centred; `fill` is the share of the strip that the text may take."""
        height, width = STRIP
        size = int(min(height * 0.8 / len(lines), 84))
        face = self.face(rng, size)
        widest = max(face.getlength(line) for line in lines)
        room = width * fill
        limit = height * 0.82 / len(lines) * min(1.0, fill + 0.2)
        scale = min(room / max(widest, 1), limit / size, 1.0)
        if scale < 0.98:
            face = self.faces_like(face, max(9, int(size * scale)))
        mask = Image.new("L", (width, height))
        draw = ImageDraw.Draw(mask)
        step = min(height / (len(lines) + 0.2), face.size * 1.25)
        top = (height - step * len(lines)) / 2
        align = rng.random() < 0.25 and len(lines) > 1
        for number, line in enumerate(lines):
            y = top + step * (number + 0.5)
            if align:
                draw.text(((width - room) / 2, y), line, fill=255, font=face, anchor="lm")
            else:
                draw.text((width / 2, y), line, fill=255, font=face, anchor="mm")
        return np.asarray(mask)

    def faces_like(self, face: ImageFont.FreeTypeFont, size: int) -> ImageFont.FreeTypeFont:
        for (chosen, known_size), known in self.sizes.items():
            if known is face:
                key = (chosen, size)
                if key not in self.sizes:
                    self.sizes[key] = self.faces[chosen].font_variant(size=size)
                return self.sizes[key]
            del known_size
        return face.font_variant(size=size)


def ink(ground: RGB, rng: random.Random) -> tuple[str, RGB]:
    """A colour for letters that stands out on the ground."""
    for _ in range(20):
        name = rng.choice(["black", "white", "black", "white", *VIVID, *SHAPE_COLOURS])
        colour = paint(name, rng)
        if contrast(colour, ground) > rng.uniform(2.0, 4.5):
            return name, colour
    return ("black", (0.05, 0.05, 0.05)) if contrast((0.05, 0.05, 0.05), ground) > 3 else ("white", (0.98, 0.98, 0.98))


def quoted(lines: list[str]) -> str:
    return 'It says "' + " ".join(lines) + '".'


def written(
    scribe: Scribe,
    lines: list[str],
    ground: Background,
    rng: random.Random,
    box: tuple[float, float, float, float],
    fill: float = 0.97,
) -> tuple[Writing, str]:
    """A writing in a box (x, y, width, height) and the name of its colour."""
    name, colour = ink(ground.middle, rng)
    x, y, width, height = box
    return Writing(
        " ".join(lines), scribe.strip(lines, rng, fill), colour, x, y, width, height, rng.uniform(-0.12, 0.12)
    ), name


def plate(
    box: tuple[float, float, float, float], catalogue: Catalogue, rng: random.Random, angle: float = 0.0
) -> tuple[Item, RGB]:
    """A sign's plate behind a writing."""
    x, y, width, height = box
    colour = paint(rng.choice(SHAPE_COLOURS), rng)
    side = (width * height) ** 0.5
    item = Item(
        Noun("sign"),
        catalogue.first_shape + PLATE,
        tint=colour,
        x=x,
        y=y,
        size=side,
        stretch=width / height,
        angle=angle,
    )
    return item, colour


def text_turns(text: str, colour: str, rng: random.Random, testing: bool, others: tuple[Item, ...] = ()) -> list[Turn]:
    """Questions about a writing, and about the things beside it."""
    answer = f'It says "{text}".'
    turns: list[Turn] = [(ask("read", rng, testing), answer)]
    if " " not in text and rng.random() < 0.15 and not testing:
        turns[0] = (turns[0][0] + " " + rng.choice(ONE_WORD), text)
    if rng.random() < 0.3:
        turns.append((ask("text_colour", rng, testing), f"The text is {colour}."))
    if rng.random() < 0.3:
        if others:
            shown = " and ".join(item.some() for item in others)
            turns.append(
                (ask("describe", rng, testing), f'{shown[0].upper() + shown[1:]} with a sign that says "{text}".')
            )
            turns.append(
                (
                    ask("name" if rng.random() < 0.4 else "list", rng, testing),
                    f"{shown[0].upper() + shown[1:]} and a sign.",
                )
            )
        else:
            turns.append((ask("describe", rng, testing), f'The {colour} text "{text}".'))
    if rng.random() < 0.15:
        turns.append((ask("has_text", rng, testing), f'Yes, it says "{text}".'))
    if rng.random() < 0.1:
        turns.append((ask("title", rng, testing), f'"{text}"'))
    if rng.random() < 0.1:
        turns.append(
            (
                ask("placard", rng, testing),
                f'"{text}". This picture shows the word "{text}" in {colour} letters. Artist unknown.',
            )
        )
    if rng.random() < 0.06:
        turns.append((ask("unknowable", rng, testing), rng.choice(NO_CLUE)))
    rng.shuffle(turns)
    return turns


def reading_picture(
    scribe: Scribe, catalogue: Catalogue, rng: random.Random, testing: bool = False, split: bool = False
) -> tuple[Picture, list[Turn]]:
    """A picture with writing and its questions. `split` pictures are larger and may hold more and smaller lines."""
    ground = background(rng, plain=0.6)
    chance = rng.random()
    if split:
        count = rng.randint(1, 3)
        lines = [
            " ".join(scribe.word(rng) for _ in range(rng.randint(1, 3))) if rng.random() < 0.75 else scribe.number(rng)
            for _ in range(count)
        ]
        colour, paint_rgb = ink(ground.middle, rng)
        width = rng.uniform(0.5, 0.95)
        strips = []
        for number, line in enumerate(lines):
            y = (number + 0.5) / count + rng.uniform(-0.04, 0.04)
            mask = scribe.strip([line], rng, rng.uniform(0.6, 0.97))
            strips.append(Writing(line, mask, paint_rgb, 0.5, y, width, width / 2, rng.uniform(-0.05, 0.05)))
        text = " ".join(lines)
        return Picture(ground, (), tuple(strips), finish(rng), double=True), text_turns(text, colour, rng, testing)
    if chance < 0.22:  # a sign beside a thing
        things = placed([catalogue.thing(rng)], rng, 0.25, 0.4)
        thing = replace(things[0], size=rng.uniform(0.28, 0.45))
        above = rng.random() < 0.5
        thing = replace(thing, x=rng.uniform(0.3, 0.7), y=0.26 if above else 0.74)
        text = scribe.word(rng) if rng.random() < 0.8 else scribe.number(rng)
        width = rng.uniform(0.5, 0.9)
        box = (rng.uniform(width / 2, 1 - width / 2), 0.74 if above else 0.26, width, width * rng.uniform(0.35, 0.5))
        board, board_paint = plate(box, catalogue, rng)
        strip, colour = written(scribe, [text], replace(ground, middle=board_paint), rng, box, 0.9)
        picture = Picture(ground, (thing, replace(board, angle=strip.angle)), (strip,), finish(rng))
        return picture, text_turns(text, colour, rng, testing, (thing,))
    if chance < 0.68:
        lines = [scribe.word(rng)]
    elif chance < 0.78:
        lines = [scribe.number(rng)]
    elif chance < 0.90:
        lines = (
            [f"{scribe.word(rng)} {scribe.word(rng)}"] if rng.random() < 0.5 else [scribe.word(rng), scribe.word(rng)]
        )
    else:
        lines = [scribe.word(rng) if rng.random() < 0.8 else scribe.number(rng) for _ in range(3)]
    width = rng.uniform(0.62, 1.0) if len(lines) > 1 or rng.random() < 0.8 else rng.uniform(0.4, 0.62)
    height = width * rng.uniform(0.42, 0.85)
    box = (
        0.5 + rng.uniform(-0.5, 0.5) * (1 - width),
        0.5 + rng.uniform(-0.5, 0.5) * max(0.0, 1 - height),
        width,
        height,
    )
    items: tuple[Item, ...] = ()
    middle = ground.middle
    if rng.random() < 0.3:
        board, middle = plate(box, catalogue, rng)
        items = (board,)
    strip, colour = written(scribe, lines, replace(ground, middle=middle), rng, box, rng.uniform(0.7, 0.98))
    if items:
        items = (replace(items[0], angle=strip.angle),)
    return Picture(ground, items, (strip,), finish(rng)), text_turns(" ".join(lines), colour, rng, testing)
