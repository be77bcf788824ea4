"""Makes `samples/pictures` and `samples/clips`: a dozen of each with known content, and their index.

Run `python -m samples.training.pictures FETCHED` after `sources`; `--check CHECKPOINT` also asks a model every question
of the index and prints what it says. Needs `resvg-py`. The drawings are from Fluent Emoji and Noto Emoji, whose
licences are named in the index; words are set in DejaVu Sans.
"""

import argparse
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from samples.training.pack import icon_svg
from samples.training.sources import folder_of

SAMPLES = Path(__file__).parent.parent
SIZE = (640, 480)
CLIP_SIZE = (384, 288)
SECONDS, RATE = 4, 12
LICENCES = {
    "fluent-emoji-flat": "drawings: Fluent Emoji, MIT, Microsoft Corporation",
    "noto": "drawings: Noto Emoji, Apache-2.0, Google LLC",
    "": "made by this program, Apache-2.0",
}
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Thing:
    """A drawing, a shape ("circle", "square", "triangle" with a colour) or a text (in quotes) at a place.

    `x`, `y` (centre) and `size` (width) are shares of the picture's width and height, width for `size`.
    """

    icon: str
    x: float
    y: float
    size: float
    colour: Colour = (0, 0, 0)


@dataclass(frozen=True)
class Sheet:
    """A picture: what it is called, what it shows, and one question with its answer."""

    file: str
    style: str
    ground: Colour
    floor: Colour | None
    things: tuple[Thing, ...]
    shows: str
    question: str
    answer: str


WHITE, CREAM, SKY, GRASS = (250, 250, 250), (250, 238, 214), (178, 216, 246), (126, 190, 110)
SHEETS = [
    Sheet(
        "kitchen.jpg",
        "noto",
        CREAM,
        (196, 150, 104),
        (Thing("kitchen-knife", 0.19, 0.64, 0.26), Thing("teapot", 0.5, 0.56, 0.28), Thing("lemon", 0.82, 0.64, 0.22)),
        "a knife, a teapot and a lemon",
        "What is in the center of the picture?",
        "A teapot.",
    ),
    Sheet(
        "garden.jpg",
        "fluent-emoji-flat",
        SKY,
        GRASS,
        (Thing("sunflower", 0.24, 0.60, 0.26), Thing("butterfly", 0.60, 0.26, 0.20), Thing("snail", 0.78, 0.76, 0.20)),
        "a sunflower, a butterfly and a snail",
        "Is the butterfly above the snail?",
        "Yes, the butterfly is above the snail.",
    ),
    Sheet(
        "street.jpg",
        "noto",
        (214, 222, 230),
        (150, 150, 154),
        (Thing("police-car", 0.28, 0.58, 0.36), Thing("bicycle", 0.76, 0.66, 0.26)),
        "a police car and a bicycle",
        "Which is bigger, the police car or the bicycle?",
        "The police car is bigger than the bicycle.",
    ),
    Sheet(
        "farm.jpg",
        "fluent-emoji-flat",
        SKY,
        GRASS,
        (Thing("cow", 0.22, 0.60, 0.28), Thing("tractor", 0.74, 0.58, 0.34)),
        "a cow and a tractor",
        "What is to the left of the tractor?",
        "A cow.",
    ),
    Sheet(
        "desk.jpg",
        "fluent-emoji-flat",
        (236, 226, 206),
        None,
        (Thing("laptop", 0.30, 0.55, 0.36), Thing("pencil", 0.76, 0.28, 0.18), Thing("scissors", 0.76, 0.74, 0.18)),
        "a laptop, a pencil and scissors",
        "List the objects.",
        "A laptop, a pencil and some scissors.",
    ),
    Sheet(
        "penguins.jpg",
        "noto",
        (190, 222, 244),
        None,
        tuple(
            Thing("penguin", x, y, 0.18)
            for x, y in ((0.2, 0.28), (0.52, 0.24), (0.82, 0.3), (0.34, 0.72), (0.68, 0.72))
        ),
        "five penguins",
        "How many penguins are there?",
        "There are 5 penguins.",
    ),
    Sheet(
        "fruit.jpg",
        "fluent-emoji-flat",
        WHITE,
        None,
        (
            Thing("banana", 0.26, 0.3, 0.24),
            Thing("strawberry", 0.74, 0.3, 0.20),
            Thing("strawberry", 0.30, 0.74, 0.20),
            Thing("strawberry", 0.72, 0.74, 0.20),
        ),
        "a banana and three strawberries",
        "How many strawberries are in the picture?",
        "There are 3 strawberries.",
    ),
    Sheet(
        "gallery.jpg",
        "fluent-emoji-flat",
        (226, 220, 210),
        None,
        (Thing("fox", 0.5, 0.5, 0.46),),
        "a fox",
        "Write a museum placard for this.",
        "Fox. This picture shows a fox.",
    ),
    Sheet(
        "music.jpg",
        "noto",
        (236, 228, 240),
        None,
        (Thing("guitar", 0.28, 0.5, 0.34), Thing("drum", 0.74, 0.6, 0.3)),
        "a guitar and a drum",
        "Is there a drum?",
        "Yes, there is a drum.",
    ),
    Sheet(
        "shapes.png",
        "",
        WHITE,
        None,
        (
            Thing("circle", 0.22, 0.30, 0.22, (214, 36, 44)),
            Thing("square", 0.74, 0.32, 0.20, (40, 96, 214)),
            Thing("triangle", 0.48, 0.74, 0.24, (246, 208, 40)),
        ),
        "a red circle, a blue square and a yellow triangle",
        "What color is the square?",
        "The square is blue.",
    ),
    Sheet(
        "cafe.png",
        "fluent-emoji-flat",
        (244, 232, 212),
        None,
        (Thing("hot-beverage", 0.5, 0.30, 0.28), Thing('"OPEN"', 0.5, 0.76, 0.44, (120, 40, 30))),
        'a cup of coffee with a sign that says "OPEN"',
        "What does the sign say?",
        'It says "OPEN".',
    ),
    Sheet(
        "welcome.png",
        "",
        (32, 70, 120),
        None,
        (Thing('"Welcome"', 0.5, 0.5, 0.8, (250, 250, 250)),),
        'the word "Welcome"',
        "Read the text.",
        'It says "Welcome".',
    ),
]


@dataclass(frozen=True)
class Reel:
    """A clip of one thing: its place and size at every moment (0 to 1), or None while it is away."""

    file: str
    style: str
    ground: Colour
    icon: str
    path: Callable[[float], tuple[float, float, float] | None]
    shows: str
    question: str
    answer: str
    beside: Thing | None = None  # something that stays


def line(
    start: tuple[float, float], end: tuple[float, float], size: float = 0.26
) -> Callable[[float], tuple[float, float, float]]:
    """A straight path from one place to another."""
    return lambda t: (start[0] + (end[0] - start[0]) * t, start[1] + (end[1] - start[1]) * t, size)


LEFT, RIGHT, TOP, BOTTOM = (0.2, 0.5), (0.8, 0.5), (0.5, 0.22), (0.5, 0.78)
HAPPENS, WAY = "What happens in the video?", "In which direction does the {} move?"
REELS = [
    Reel(
        "car.mp4",
        "noto",
        CREAM,
        "automobile",
        line(LEFT, RIGHT),
        "a car moves to the right",
        WAY.format("car"),
        "The car moves to the right.",
    ),
    Reel(
        "cat.mp4",
        "fluent-emoji-flat",
        (214, 234, 214),
        "cat",
        line(RIGHT, LEFT),
        "a cat moves to the left",
        HAPPENS,
        "The cat moves to the left.",
    ),
    Reel(
        "balloon.mp4", "noto", SKY, "balloon", line(BOTTOM, TOP), "a balloon moves up", HAPPENS, "The balloon moves up."
    ),
    Reel(
        "ball.mp4",
        "fluent-emoji-flat",
        GRASS,
        "basketball",
        line(TOP, BOTTOM),
        "a basketball moves down",
        WAY.format("basketball"),
        "The basketball moves down.",
    ),
    Reel(
        "rocket.mp4",
        "noto",
        (190, 196, 232),
        "rocket",
        line(BOTTOM, TOP),
        "a rocket moves up",
        WAY.format("rocket"),
        "The rocket moves up.",
    ),
    Reel(
        "fish.mp4",
        "fluent-emoji-flat",
        (196, 226, 246),
        "tropical-fish",
        line(LEFT, RIGHT),
        "a tropical fish moves to the right",
        "What moves?",
        "The tropical fish moves.",
    ),
    Reel(
        "bus.mp4",
        "noto",
        (222, 222, 224),
        "bus",
        line(RIGHT, LEFT, 0.3),
        "a bus moves to the left",
        WAY.format("bus"),
        "The bus moves to the left.",
    ),
    Reel(
        "spider.mp4",
        "noto",
        WHITE,
        "spider",
        line(TOP, BOTTOM, 0.24),
        "a spider moves down",
        HAPPENS,
        "The spider moves down.",
    ),
    Reel(
        "owl.mp4",
        "fluent-emoji-flat",
        (206, 200, 224),
        "owl",
        lambda t: (0.5, 0.5, 0.34) if t >= 0.5 else None,
        "an owl appears",
        "What appears?",
        "An owl appears.",
    ),
    Reel(
        "cake.mp4",
        "noto",
        (246, 222, 232),
        "birthday-cake",
        lambda t: (0.3, 0.5, 0.34) if t < 0.5 else None,
        "a birthday cake beside a balloon disappears",
        HAPPENS,
        "The birthday cake disappears.",
        Thing("balloon", 0.76, 0.5, 0.26),
    ),
    Reel(
        "star.mp4",
        "fluent-emoji-flat",
        (60, 66, 110),
        "star",
        lambda t: (0.5, 0.5, 0.16 + 0.42 * t),
        "a star gets bigger",
        HAPPENS,
        "The star gets bigger.",
    ),
    Reel(
        "pumpkin.mp4",
        "noto",
        (232, 232, 220),
        "jack-o-lantern",
        lambda t: (0.5, 0.5, 0.6 - 0.42 * t),
        "a jack-o'-lantern gets smaller",
        HAPPENS,
        "The jack-o'-lantern gets smaller.",
    ),
]


class Studio:
    """Draws things with PIL from the fetched packages."""

    def __init__(self, fetched: Path) -> None:
        self.icons = {
            style: json.loads((folder_of(fetched, f"@iconify-json/{style}") / "package/icons.json").read_text())
            for style in LICENCES
            if style
        }
        faces = sorted(folder_of(fetched, "fonts-dejavu-core").rglob("DejaVuSans-Bold.ttf"))
        self.face = str(faces[0])
        self.drawings: dict[tuple[str, str], Image.Image] = {}

    def drawing(self, style: str, icon: str) -> Image.Image:
        """A drawing at 512 pixels, RGBA."""
        import resvg_py

        if (style, icon) not in self.drawings:
            svg = icon_svg(self.icons[style], icon)
            if svg is None:
                raise KeyError(f"{style} has no drawing called {icon}")
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=512, height=512, skip_system_fonts=True))
            image = Image.open(io.BytesIO(png)).convert("RGBA")
            self.drawings[style, icon] = image.crop(image.getchannel("A").getbbox())
        return self.drawings[style, icon]

    def put(self, canvas: Image.Image, style: str, thing: Thing) -> None:
        """Paint one thing on the canvas."""
        width = thing.size * canvas.width
        x, y = thing.x * canvas.width, thing.y * canvas.height
        draw = ImageDraw.Draw(canvas)
        if thing.icon.startswith('"'):
            text = thing.icon.strip('"')
            size = 20
            while ImageFont.truetype(self.face, size + 2).getlength(text) < width * 0.86:
                size += 2
            if thing.size < 0.6:  # a sign
                draw.rounded_rectangle(
                    (x - width / 2, y - width / 5, x + width / 2, y + width / 5), radius=12, fill=thing.colour
                )
            ink = (255, 255, 255)
            draw.text((x, y), text, fill=ink, font=ImageFont.truetype(self.face, size), anchor="mm")
            return
        half = width / 2
        if thing.icon == "circle":
            draw.ellipse((x - half, y - half, x + half, y + half), fill=thing.colour)
        elif thing.icon == "square":
            draw.rectangle((x - half, y - half, x + half, y + half), fill=thing.colour)
        elif thing.icon == "triangle":
            draw.polygon(((x, y - half), (x - half, y + half * 0.8), (x + half, y + half * 0.8)), fill=thing.colour)
        else:
            drawing = self.drawing(style, thing.icon)
            height = round(drawing.height * width / drawing.width)
            drawing = drawing.resize((round(width), height), Image.Resampling.LANCZOS)
            canvas.paste(drawing, (round(x - half), round(y - height / 2)), drawing)

    def picture(self, sheet: Sheet) -> Image.Image:
        canvas = Image.new("RGB", (SIZE[0] * 2, SIZE[1] * 2), sheet.ground)
        if sheet.floor:
            ImageDraw.Draw(canvas).rectangle((0, canvas.height * 0.66, canvas.width, canvas.height), fill=sheet.floor)
        for thing in sheet.things:
            self.put(canvas, sheet.style, thing)
        return canvas.resize(SIZE, Image.Resampling.LANCZOS)

    def frames(self, reel: Reel) -> list[NDArray[np.uint8]]:
        """All frames of a clip, (height, width, 3)."""
        frames = []
        for number in range(SECONDS * RATE):
            canvas = Image.new("RGB", (CLIP_SIZE[0] * 2, CLIP_SIZE[1] * 2), reel.ground)
            if reel.beside:
                self.put(canvas, reel.style, reel.beside)
            spot = reel.path(number / (SECONDS * RATE - 1))
            if spot:
                self.put(canvas, reel.style, Thing(reel.icon, *spot))
            frames.append(np.asarray(canvas.resize(CLIP_SIZE, Image.Resampling.LANCZOS)))
        return frames


def write_clip(path: Path, frames: list[NDArray[np.uint8]]) -> None:
    """Encode frames as H.264 in MP4."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "23", "preset": "slow"})
        stream.width, stream.height, stream.pix_fmt = *CLIP_SIZE, "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def entry(source: Sheet | Reel) -> dict[str, str]:
    return {
        "file": source.file,
        "shows": source.shows,
        "question": source.question,
        "answer": source.answer,
        "licence": LICENCES[source.style],
    }


def index(sources: list[Sheet] | list[Reel]) -> str:
    return json.dumps([entry(source) for source in sources], indent=2) + "\n"


def check(checkpoint: Path, studio: Studio) -> None:
    """Ask a model every question; clips as the frames at 0, 1, 2 and 3 seconds."""
    from samples.training.evaluate import Case, local_answerer

    answer = local_answerer(checkpoint, "cpu")
    for sheet in SHEETS:
        with Image.open(SAMPLES / "pictures" / sheet.file) as image:
            pixels = [np.asarray(image.convert("RGB"))]
        for question in (sheet.question, "Describe the picture."):
            case = Case("", [], SIZE, question, lambda _: True, "")
            print(f"{sheet.file:14} {question} (expected {sheet.answer}) -> {answer([case], [pixels])[0]}", flush=True)
    for reel in REELS:
        frames = studio.frames(reel)[::RATE]
        case = Case("", [], CLIP_SIZE, reel.question, lambda _: True, "", (0.0, 1.0, 2.0, 3.0), SECONDS)
        print(f"{reel.file:14} {reel.question} (expected {reel.answer}) -> {answer([case], [frames])[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fetched", type=Path)
    parser.add_argument("--check", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()
    studio = Studio(arguments.fetched)
    for name in ("pictures", "clips"):
        (SAMPLES / name).mkdir(exist_ok=True)
    for sheet in SHEETS:
        options: dict[str, Any] = {"quality": 90} if sheet.file.endswith(".jpg") else {"optimize": True}
        studio.picture(sheet).save(SAMPLES / "pictures" / sheet.file, **options)
    for reel in REELS:
        write_clip(SAMPLES / "clips" / reel.file, studio.frames(reel))
    (SAMPLES / "pictures" / "contents.json").write_text(index(SHEETS))
    (SAMPLES / "clips" / "contents.json").write_text(index(REELS))
    if arguments.check:
        check(arguments.check, studio)


if __name__ == "__main__":
    main()
