"""Pictures drawn by code and questions with known answers, for `beholder calibrate`.

    python tests/calibration_questions.py FOLDER && beholder calibrate FOLDER/questions.jsonl

Each picture has one to six flat shapes on a plain ground. The drawing is not the one that the bundled model was
trained on, and neither are all of the wordings.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

COLOURS: Final = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "black": (20, 20, 20),
    "purple": (140, 50, 170),
}
SHAPES: Final = ("circle", "square", "triangle")
SIDE: Final = 256


def draw(kind: str, colour: str, count: int, rng: random.Random) -> Image.Image:
    """`count` equal shapes, apart from each other."""
    image = Image.new("RGB", (SIDE, SIDE), rng.choice([(250, 250, 250), (225, 235, 245), (245, 240, 225)]))
    pen = ImageDraw.Draw(image)
    radius = rng.randint(18, 26) if count > 1 else rng.randint(30, 60)
    cells = rng.sample([(x, y) for x in range(3) for y in range(3)], count)
    for x, y in cells:
        cx, cy = (43 + 85 * x, 43 + 85 * y) if count > 1 else (rng.randint(80, 176), rng.randint(80, 176))
        box = (cx - radius, cy - radius, cx + radius, cy + radius)
        if kind == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif kind == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon([(cx, box[1]), (box[0], box[3]), (box[2], box[3])], COLOURS[colour])
    return image


def questions(kind: str, colour: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Two yes/no questions, a choice, and a count."""
    other_kind = rng.choice([shape for shape in SHAPES if shape != kind])
    other_colour = rng.choice([name for name in COLOURS if name != colour])
    noun = kind if count == 1 else f"{kind}s"
    is_it = "Is the" if count == 1 else "Are the"
    return [
        {"question": f"Is there a {kind}?", "answer": "yes"},
        {"question": f"Is there a {other_kind}?", "answer": "no"},
        {"question": f"{is_it} {noun} {colour}?", "answer": "yes"},
        {"question": f"{is_it} {noun} {other_colour}?", "answer": "no"},
        {
            "type": "choice",
            "question": f"What color {'is' if count == 1 else 'are'} the {noun}?",
            "choices": [f"The {noun} {'is' if count == 1 else 'are'} {name}" for name in COLOURS],
            "instruction": "",
            "answer": f"The {noun} {'is' if count == 1 else 'are'} {colour}",
        },
        {
            "type": "choice",
            "question": "Which shape is it?",
            "choices": [*SHAPES],
            "answer": kind,
        },
        {"type": "score", "question": f"How many {kind}s are there?", "min": 1, "max": 9, "answer": str(count)},
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20)
    lines = []
    for index in range(int(sys.argv[2]) if len(sys.argv) > 2 else 150):
        kind, colour, count = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.choice([1, 1, 2, 3, 4, 5, 6])
        draw(kind, colour, count, rng).save(folder / f"{index}.png")
        lines += [{"image": f"{index}.png", **question} for question in questions(kind, colour, count, rng)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
