"""An animated GIF, WebP or PNG as a clip, read by Pillow. A still one is a clip of one frame."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from preprocess.colour import to_rgb
from preprocess.errors import ClientError
from preprocess.timeline import Timeline
from preprocess.video_limits import check_size

if TYPE_CHECKING:
    from preprocess.config import MediaLimits
    from preprocess.video_formats import ClipFormat

_MAX_FRAMES: Final = 20_000
_MAX_DECODED_PIXELS: Final = 1 << 32
"""Of all frames together: each one is drawn over the one before, so none can be skipped."""

_LEAST_MS: Final = 20
_SHOWN_MS: Final = 100
"""Browsers show frames that ask for less than 20 ms for 100 ms."""


class Animation:
    """See `preprocess.video.Clip`."""

    def __init__(self, data: bytes, found: ClipFormat, limits: MediaLimits) -> None:
        self._data = data
        self._format = found
        with self._opened() as image:
            check_size(image.width, image.height, limits)
            num_frames = self._count(image)
            if num_frames > _MAX_FRAMES or num_frames * image.width * image.height > _MAX_DECODED_PIXELS:
                raise ClientError(
                    f"The animation has {num_frames:,} frames of {image.width:,} × {image.height:,} pixels, which are "
                    "too many to be decoded; send it as a video.",
                    code="video_too_long",
                    status=413,
                )
            durations = self._durations(image, num_frames)
        starts = np.concatenate(([0], np.cumsum(durations[:-1], dtype=np.int64)))
        self.timeline = Timeline.of(starts, durations[-1], Fraction(1, 1000))

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
        """See `preprocess.video.Clip`."""
        with self._opened() as image:
            for number in wanted:
                try:
                    image.seek(number)
                    image.load()
                    frame = to_rgb(image)
                except (ClientError, MemoryError):
                    raise
                except Exception as error:  # as in `preprocess.image`
                    raise self._unreadable() from error
                yield number, frame.copy() if frame is image else frame

    def _opened(self) -> Image.Image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Image.open(io.BytesIO(self._data), formats=[self._format.pillow])
        except MemoryError:
            raise
        except Exception as error:
            raise self._unreadable() from error

    def _count(self, image: Image.Image) -> int:
        try:
            return int(getattr(image, "n_frames", 1))
        except MemoryError:
            raise
        except Exception as error:
            raise self._unreadable() from error

    def _durations(self, image: Image.Image, num_frames: int) -> list[int]:
        """Milliseconds that each frame is shown, up to where the file is cut off."""
        durations: list[int] = []
        for number in range(num_frames):
            try:
                image.seek(number)
                image.load()
            except MemoryError:
                raise
            except Exception:
                break
            asked = image.info.get("duration", 0)
            shown_ms = round(asked) if isinstance(asked, (int, float)) else 0
            durations.append(shown_ms if shown_ms >= _LEAST_MS else _SHOWN_MS)
        if not durations:
            raise self._unreadable()
        return durations

    def _unreadable(self) -> ClientError:
        return ClientError(
            f"The {self._format.name} animation is damaged or cut off; save it again with another program.",
            code="video_undecodable",
        )
