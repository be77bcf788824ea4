"""Colour names: which paint they stand for, and what a painted pixel is called.

Used by the pack builder (dominant colour of a drawing), the generators (paint) and the questions.
"""

import random

import numpy as np
from numpy.typing import NDArray

# Central paints, 8-bit sRGB. `teal` is only painted on shapes.
PAINTS: dict[str, list[tuple[int, int, int]]] = {
    "red": [(220, 30, 40), (200, 20, 20), (235, 50, 50)],
    "orange": [(245, 140, 25), (255, 155, 40), (235, 125, 10)],
    "yellow": [(250, 215, 40), (255, 230, 60), (240, 200, 20)],
    "green": [(50, 165, 70), (30, 140, 50), (90, 190, 80)],
    "blue": [(45, 100, 220), (30, 70, 190), (70, 140, 235)],
    "purple": [(140, 60, 180), (120, 50, 160), (160, 90, 210)],
    "pink": [(245, 130, 180), (250, 150, 190), (235, 105, 165)],
    "brown": [(130, 80, 45), (115, 70, 35), (145, 90, 55)],
    "black": [(25, 25, 28), (10, 10, 12), (40, 40, 42)],
    "white": [(248, 248, 248), (255, 255, 255), (240, 240, 242)],
    "gray": [(135, 135, 138), (120, 122, 125), (155, 155, 158)],
    "teal": [(20, 140, 140), (0, 128, 128), (35, 155, 150)],
}
VIVID = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown"]
SHAPE_COLOURS = [*VIVID, "black", "white", "gray", "teal"]
BACKGROUND_COLOURS = ["white", "gray", "yellow", "blue", "green", "pink", "orange", "purple", "brown", "black"]


def paint(name: str, rng: random.Random, spread: int = 14) -> tuple[float, float, float]:
    """A paint of that name, slightly varied; components in [0, 1]."""
    base = rng.choice(PAINTS[name])
    red, green, blue = (min(255, max(0, c + rng.randint(-spread, spread))) / 255 for c in base)
    return red, green, blue


def pale(name: str, rng: random.Random) -> tuple[float, float, float]:
    """A pale tone of the colour (for backgrounds that leave the objects visible); components in [0, 1]."""
    amount = rng.uniform(0.25, 0.65)
    red, green, blue = (c + (1 - c) * amount for c in paint(name, rng))
    return red, green, blue


def luminance(rgb: tuple[float, float, float]) -> float:
    """Relative luminance of linearised sRGB (WCAG 2)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    a, b = sorted((luminance(first), luminance(second)))
    return (b + 0.05) / (a + 0.05)


def dominant_colour(rgba: NDArray[np.uint8]) -> str:
    """The colour name of most opaque pixels of a drawing (height, width, 4), or "" where no colour rules.

    Dark outlines (near black) do not count unless nearly everything is dark.
    """
    pixels = rgba.reshape(-1, 4)
    pixels = pixels[pixels[:, 3] > 200][:, :3].astype(np.float32) / 255
    if len(pixels) < 200:
        return ""
    high, low = pixels.max(1), pixels.min(1)
    spread = high - low
    saturation = spread / np.maximum(high, 1e-6)
    red, green, blue = pixels.T
    with np.errstate(divide="ignore", invalid="ignore"):
        hue = np.where(
            high == red,
            (green - blue) / spread % 6,
            np.where(high == green, (blue - red) / spread + 2, (red - green) / spread + 4),
        )
    hue = np.nan_to_num(hue) * 60
    names = np.full(len(pixels), "", dtype="<U8")
    names[(hue < 14) | (hue >= 345)] = "red"
    names[(hue >= 14) & (hue < 40)] = "orange"
    names[(hue >= 40) & (hue < 66)] = "yellow"
    names[(hue >= 66) & (hue < 165)] = "green"
    names[(hue >= 165) & (hue < 252)] = "blue"
    names[(hue >= 252) & (hue < 300)] = "purple"
    names[(hue >= 300) & (hue < 345)] = "pink"
    names[((hue < 14) | (hue >= 345)) & (saturation < 0.55) & (high > 0.75)] = "pink"
    ruddy = (hue < 46) & (saturation > 0.25)
    names[ruddy & (high < 0.88) & (saturation < 0.75)] = "?"  # tan, rust and the like: people disagree
    names[ruddy & (high < 0.66) & ~((hue < 12) & (saturation > 0.7))] = "brown"
    names[saturation < 0.28] = "?"
    names[(saturation < 0.14) | (spread < 0.07)] = "gray"
    names[((saturation < 0.10) | (spread < 0.05)) & (high > 0.86)] = "white"
    names[high < 0.24] = "black"
    found, counts = np.unique(names, return_counts=True)
    shares = dict(zip(found.tolist(), (counts / len(names)).tolist(), strict=True))
    if shares.get("black", 0) < 0.7:
        shares.pop("black", None)
    total = sum(shares.values())
    if not shares or total < 0.25:
        return ""
    best = max(shares, key=lambda name: shares[name])
    return best if best != "?" and shares[best] / total > 0.66 else ""
