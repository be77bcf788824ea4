"""A small pack without any package: a few concepts, drawn as plain squares in several styles."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from samples.training.pack import SIDE, Pack  # noqa: E402
from samples.training.splits import HELD_OUT_STYLE  # noqa: E402

CONCEPTS = {
    "cat": "animal",
    "dog": "animal",
    "umbrella": "",
    "banana": "fruit",
    "car": "vehicle",
    "grapes": "fruit",
    "bread": "food",
    "knife": "tool",
    "owl": "bird",
    "tulip": "flower",
    "flag of France": "flag",
    "hourglass": "",
}


@pytest.fixture(scope="session")
def pack() -> Pack:
    names, styles, colours, sprites = [], [], [], []
    for number, name in enumerate(CONCEPTS):
        for style in ("noto", "twemoji", HELD_OUT_STYLE):
            names.append(name)
            styles.append(style)
            colours.append("red" if number % 2 else "")
            drawing = np.zeros((SIDE, SIDE, 4), np.uint8)
            drawing[8:-8, 8:-8] = (200, 20 * number, 10, 255)
            sprites.append(drawing)
    words = ["apple", "bridge", "candle", "dream", "engine", "forest", "garden", "harbour", "island", "jacket"]
    return Pack(np.stack(sprites), names, styles, colours, dict(CONCEPTS), words, {})


@pytest.fixture(scope="session")
def samples() -> Path:
    return ROOT / "samples"
