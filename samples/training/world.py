"""What a picture shows: things with a place, a size and a colour on a background.

Knows nothing about pixels (see `render`) and nothing about words (see `questions`). All places and sizes are fractions
of the picture's sides, x to the right and y down.
"""

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from samples.training.colours import BACKGROUND_COLOURS, SHAPE_COLOURS, VIVID, contrast, paint, pale
from samples.training.names import Noun
from samples.training.pack import SIDE, Pack
from samples.training.splits import HELD_OUT_STYLE, held_out

RGB = tuple[float, float, float]
SHAPES = [
    "circle",
    "square",
    "triangle",
    "rectangle",
    "star",
    "heart",
    "diamond",
    "hexagon",
    "pentagon",
    "oval",
    "cross",
    "ring",
    "crescent",
]
PLATE = len(SHAPES)  # the shape number of a sign's rounded plate, which has no name


def corners(count: int, middle: float, turn: float = -90.0, inner: float = 1.0) -> list[tuple[float, float]]:
    """The corners of a regular polygon, or of a star where every second corner is nearer by `inner`."""
    points = []
    for k in range(count):
        radius = (middle - 8) * (inner if k % 2 else 1.0)
        angle = math.radians(turn + 360 * k / count)
        points.append((middle + radius * math.cos(angle), middle + radius * math.sin(angle)))
    return points


def shape_sprites() -> NDArray[np.uint8]:
    """White drawings of the shapes and the plate, (len(SHAPES) + 1, SIDE, SIDE, 4)."""
    big = SIDE * 4
    drawings = []
    for name in [*SHAPES, "plate"]:
        mask = Image.new("L", (big, big))
        draw = ImageDraw.Draw(mask)
        low, high, middle = 8, big - 8, big / 2

        if name in ("circle", "ring", "crescent"):
            draw.ellipse((low, low, high, high), fill=255)
        if name == "ring":
            draw.ellipse((middle * 0.45, middle * 0.45, middle * 1.55, middle * 1.55), fill=0)
        elif name == "crescent":
            draw.ellipse((middle * 0.55, low - 10, middle * 0.55 + (high - low), high - 60), fill=0)
        elif name == "square":
            draw.rectangle((low + 20, low + 20, high - 20, high - 20), fill=255)
        elif name == "triangle":
            draw.polygon(((middle, low + 20), (low, high - 40), (high, high - 40)), fill=255)
        elif name == "rectangle":
            draw.rectangle((low, middle * 0.55, high, middle * 1.45), fill=255)
        elif name == "oval":
            draw.ellipse((low, middle * 0.5, high, middle * 1.5), fill=255)
        elif name == "star":
            draw.polygon(corners(10, middle, inner=0.42), fill=255)
        elif name == "diamond":
            draw.polygon(((middle, low), (high - 90, middle), (middle, high), (low + 90, middle)), fill=255)
        elif name == "hexagon":
            draw.polygon(corners(6, middle, turn=0), fill=255)
        elif name == "pentagon":
            draw.polygon(corners(5, middle), fill=255)
        elif name == "cross":
            draw.rectangle((middle * 0.68, low, middle * 1.32, high), fill=255)
            draw.rectangle((low, middle * 0.68, high, middle * 1.32), fill=255)
        elif name == "heart":
            draw.ellipse((low, low + 30, middle + 20, middle + 50), fill=255)
            draw.ellipse((middle - 20, low + 30, high, middle + 50), fill=255)
            draw.polygon(((low + 24, middle), (middle, middle - 60), (high - 24, middle), (middle, high)), fill=255)
        elif name == "plate":
            draw.rounded_rectangle((0, 0, big - 1, big - 1), radius=big // 10, fill=255)
        small = np.asarray(mask.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        drawings.append(np.dstack([np.full_like(small, 255)] * 3 + [small]))
    return np.stack(drawings)


@dataclass(frozen=True)
class Item:
    """One thing in a picture. `colour` is "" where no single colour rules; `tint` repaints the drawing."""

    noun: Noun
    sprite: int
    colour: str = ""
    tint: RGB | None = None
    x: float = 0.5
    y: float = 0.5
    size: float = 0.4
    stretch: float = 1.0  # width over height
    angle: float = 0.0  # radians
    flip: bool = False
    is_shape: bool = False

    @property
    def label(self) -> str:
        """The name that tells this thing from others: shapes and repainted things go by their colour, too."""
        return f"{self.colour} {self.noun.name}" if self.colour and (self.is_shape or self.tint) else self.noun.name

    def some(self) -> str:
        return self.noun.some(self.colour if self.colour and (self.is_shape or self.tint) else "")


@dataclass(frozen=True)
class Background:
    """What is behind the things; `name` is what it is called ("" if it has no plain name)."""

    numbers: tuple[float, ...]  # see render.backgrounds
    name: str
    middle: RGB


@dataclass(frozen=True)
class Writing:
    """A strip of text: `mask` is (128, 256) uint8; placed like an item that is twice as wide as high."""

    text: str
    mask: NDArray[np.uint8]
    colour: RGB
    x: float = 0.5
    y: float = 0.5
    width: float = 0.9
    height: float = 0.45
    angle: float = 0.0


@dataclass(frozen=True)
class Picture:
    """Everything that `render` needs: background first, then the items in order, then the writing."""

    background: Background
    items: tuple[Item, ...] = ()
    writing: tuple[Writing, ...] = ()
    finish: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 0.0)  # blur (px), brightness, contrast, noise
    double: bool = False  # drawn at 512 pixels and split into 2 x 2 tiles


@dataclass
class Catalogue:
    """Which drawings may be used, by concept."""

    pack: Pack
    testing: bool = False  # take only held-out drawings where there is a choice
    nouns: dict[str, Noun] = field(default_factory=dict)
    drawings: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # name -> style -> sprites
    unseen: dict[str, list[int]] = field(default_factory=dict)  # name -> drawings of the unseen style
    kept_back: dict[str, list[int]] = field(default_factory=dict)  # name -> held-out drawings of trained styles

    def __post_init__(self) -> None:
        for sprite, (name, style) in enumerate(zip(self.pack.names, self.pack.styles, strict=True)):
            if not name:
                continue
            self.nouns[name] = Noun(name, self.pack.kinds.get(name, ""))
            if style == HELD_OUT_STYLE:
                self.unseen.setdefault(name, []).append(sprite)
            elif held_out("sprite", f"{name}/{style}") and style != "openclipart":
                self.kept_back.setdefault(name, []).append(sprite)
            else:
                self.drawings.setdefault(name, {}).setdefault(style, []).append(sprite)
        self.names = sorted(self.drawings)
        self.flags = [name for name in self.names if name.startswith("flag of")]
        self.things = [name for name in self.names if not name.startswith("flag of")]
        self.first_shape = len(self.pack.names)

    def sprite(self, name: str, rng: random.Random) -> int:
        """A drawing of the concept in a random style."""
        styles = self.drawings[name]
        return rng.choice(styles[rng.choice(list(styles))])

    def thing(self, rng: random.Random, name: str | None = None, tinted: float = 0.2) -> Item:
        """A named thing, at times repainted in one colour."""
        if name is None:
            name = rng.choice(self.flags) if rng.random() < 0.03 else rng.choice(self.things)
        sprite = self.sprite(name, rng)
        item = Item(
            self.nouns[name], sprite, self.pack.colours[sprite], flip=rng.random() < 0.5, angle=rng.uniform(-0.15, 0.15)
        )
        if rng.random() < tinted and not name.startswith("flag"):
            item = self.repainted(item, rng)
        return item

    def repainted(self, item: Item, rng: random.Random, colour: str | None = None) -> Item:
        allowed = [c for c in VIVID if not held_out("colour", f"{c} {item.noun.name}")]
        colour = colour or rng.choice(allowed or VIVID)
        return replace(item, colour=colour, tint=paint(colour, rng))

    def shape(self, rng: random.Random, name: str | None = None, colour: str | None = None) -> Item:
        """A shape in a colour; pairs of colour and shape that are held out come only in tests."""
        while True:
            chosen = name or rng.choice(SHAPES)
            paint_name = colour or rng.choice(SHAPE_COLOURS)
            if (name and colour) or held_out("colour", f"{paint_name} {chosen}") == self.testing:
                break
        turn = rng.uniform(-0.4, 0.4) if chosen not in ("circle", "ring") else 0.0
        if chosen == "square":
            turn *= 0.6
        return Item(
            Noun(chosen, "shape"), self.first_shape + SHAPES.index(chosen), paint_name, paint(paint_name, rng),
            angle=turn,
            stretch=rng.uniform(0.9, 1.12), is_shape=True,
        )  # fmt: skip


def background(rng: random.Random, avoid: tuple[RGB, ...] = (), plain: float = 0.5) -> Background:
    """A background; plain with the given probability; `avoid` are paints that must stay visible."""
    for _ in range(12):
        name = rng.choice(BACKGROUND_COLOURS) if rng.random() > 0.25 else "white"
        strong = rng.random() < 0.3 or name in ("black", "white")
        first = paint(name, rng) if strong else pale(name, rng)
        if all(contrast(first, other) > 1.35 for other in avoid):
            break
    second = pale(rng.choice(BACKGROUND_COLOURS), rng)
    kind = 0 if rng.random() < plain else rng.choice([1, 1, 2, 2, 3, 4, 5, 5])
    if kind in (1, 2, 5) and rng.random() < 0.5:
        lift = rng.uniform(-0.25, 0.25)
        second = (min(1, max(0, first[0] + lift)), min(1, max(0, first[1] + lift)), min(1, max(0, first[2] + lift)))
    numbers = (
        float(kind), *first, *second, rng.uniform(0, 6.28), rng.uniform(2, 9), rng.uniform(0.4, 0.8),
        *(rng.uniform(0, 6.28) for _ in range(4)),
    )  # fmt: skip
    return Background(numbers, name if kind == 0 else "", first)


def finish(rng: random.Random) -> tuple[float, float, float, float]:
    """Blur, brightness, contrast and noise of a picture as cameras and scalers leave them."""
    blur = rng.uniform(0.4, 1.1) if rng.random() < 0.3 else 0.0
    noise = rng.uniform(0.0, 0.05) if rng.random() < 0.3 else 0.0
    return blur, rng.uniform(-0.06, 0.06), rng.uniform(0.85, 1.1), noise


def spread(count: int, rng: random.Random, smallest: float, largest: float) -> list[tuple[float, float, float]]:
    """Places (x, y, size) of `count` things that do not overlap."""
    if count == 1:
        size = rng.uniform(max(smallest, 0.3), max(largest, 0.85))
        margin = size / 2 * 0.92
        return [(rng.uniform(margin, 1 - margin), rng.uniform(margin, 1 - margin), size)]
    if count <= 5:
        for attempt in range(60):
            shrink = 0.985**attempt
            sizes = [rng.uniform(smallest, largest) * shrink for _ in range(count)]
            if rng.random() < 0.4:
                sizes = [sizes[0]] * count
            places = [(rng.uniform(s / 2, 1 - s / 2), rng.uniform(s / 2, 1 - s / 2), s) for s in sizes]
            if all(
                max(abs(a[0] - b[0]), abs(a[1] - b[1])) > (a[2] + b[2]) / 2 * 0.95
                for n, a in enumerate(places)
                for b in places[:n]
            ):
                return places
    columns = math.ceil(math.sqrt(count)) + (rng.random() < 0.3)
    rows = math.ceil(count / columns)
    if rng.random() < 0.3:
        columns, rows = rows, columns
    cells = [(c, r) for c in range(columns) for r in range(rows)]
    if rng.random() < 0.6:
        rng.shuffle(cells)
    else:
        cells.sort(key=lambda cell: (cell[1], cell[0]))
    size = min(1 / columns, 1 / rows, largest * 1.2)
    places = []
    for column, row in cells[:count]:
        own = size * rng.uniform(0.72, 0.94)
        slack_x, slack_y = 1 / columns - own, 1 / rows - own
        x = (column + 0.5) / columns + rng.uniform(-0.45, 0.45) * slack_x
        y = (row + 0.5) / rows + rng.uniform(-0.45, 0.45) * slack_y
        places.append((x, y, own))
    return places


def placed(items: list[Item], rng: random.Random, smallest: float = 0.2, largest: float = 0.48) -> tuple[Item, ...]:
    """The items at places that do not overlap."""
    spots = spread(len(items), rng, smallest, largest)
    return tuple(replace(item, x=x, y=y, size=s) for item, (x, y, s) in zip(items, spots, strict=True))


def paints_of(items: tuple[Item, ...] | list[Item]) -> tuple[RGB, ...]:
    """The paints that a background must leave visible."""
    return tuple(item.tint for item in items if item.tint is not None)
