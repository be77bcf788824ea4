"""What the settings of image and video processors have in common, read for families here and encoders there.

A switch that is null is off, as transformers takes it; every other field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from preprocess.blocks.fields import Fields
from preprocess.errors import ModelError
from preprocess.families.layout import Normalisation


def switch(settings: Fields, name: str, default: bool) -> bool:
    """Whether something is done to pictures."""
    return False if settings.values.get(name, default) is None else settings.flag(name, default)


def count(settings: Fields, name: str, default: int) -> int:
    """A whole number; 0 says nothing."""
    return settings.integer(name, default, minimum=0) or default


def resampling(settings: Fields, default: Image.Resampling) -> Image.Resampling:
    """The filter that pictures are resized with."""
    value = settings.values.get("resample")
    try:
        return default if value is None else Image.Resampling(value)
    except ValueError:
        raise settings.error("resample", value, "the number of one of Pillow's filters") from None


def normalisation(settings: Fields, mean: Sequence[float], std: Sequence[float]) -> Normalisation:
    """What is done to uint8 pixels. `mean` and `std` hold where the settings have none."""
    scale = settings.number("rescale_factor", 1 / 255) if switch(settings, "do_rescale", True) else 1.0
    if not switch(settings, "do_normalize", True):
        return Normalisation(scale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    stds = _by_channel(settings, "image_std", std)
    if not min(stds) > 0:
        raise settings.error("image_std", settings.values["image_std"], "numbers above 0")
    return Normalisation(scale, _by_channel(settings, "image_mean", mean), stds)


def check_alike(pictures: Normalisation, clips: Normalisation) -> None:
    """For encoders to which a frame of a clip looks like a picture. Raises `ModelError` where it is another to both."""
    if pictures != clips:
        raise ModelError(
            "the video processor normalises pixels otherwise than the image processor, but this encoder cannot tell a "
            "frame from a picture; give both the same rescale_factor, image_mean and image_std"
        )


def _by_channel(settings: Fields, name: str, default: Sequence[float]) -> tuple[float, float, float]:
    """Of red, green and blue: three numbers, or one for all."""
    value = settings.values.get(name)
    numbers = list(default) if value is None else value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers):
        raise settings.error(name, value, "three numbers, or one for all colours")
    red, green, blue = numbers
    return float(red), float(green), float(blue)
