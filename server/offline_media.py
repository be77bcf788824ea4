"""What callers of the Python API give as a picture or a clip, and the parts of a request that it becomes."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from preprocess.errors import ClientError
from preprocess.video_formats import is_video
from preprocess.wire import ImagePart, Message, TextPart, VideoPart
from server.complaints import invalid
from server.intake import MAX_FPS
from server.request_models import DEFAULT_CLIP_PROMPT, DEFAULT_PROMPT

if TYPE_CHECKING:
    import PIL.Image

Picture: TypeAlias = "str | os.PathLike[str] | bytes | PIL.Image.Image | Clip"
"""A file, an encoded picture, or a Pillow image; or a clip: a video file is known as one by its first bytes."""

_PNG_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip, where more is to be said of it than its file, or where an animated picture shall be one.

    Attributes:
        source: A file, or encoded bytes.
        fps: Frames a second that are looked at; 0: as the model's own processor does.
        max_frames: Frames that are looked at, at most; 0: likewise.
    """

    source: str | os.PathLike[str] | bytes
    fps: float = 0.0
    max_frames: int = 0


def question_of(picture: Picture | Sequence[Picture], prompt: str | None, max_bytes: int) -> list[Message]:
    """One user's turn: all pictures and clips, then the prompt or, where it is None, what is asked by default.

    Raises:
        ClientError: There is no picture, or one of them is none.
    """
    pictures = picture if isinstance(picture, (list, tuple)) else [picture]
    if not pictures:
        raise ClientError("There is no picture; expected at least one.", code="image_missing", param="picture")
    parts = [_media_part(item, max_bytes) for item in pictures]
    if prompt is None:
        prompt = DEFAULT_CLIP_PROMPT if any(isinstance(part, VideoPart) for part in parts) else DEFAULT_PROMPT
    if not isinstance(prompt, str):
        raise invalid("prompt", f"`prompt` is of type {type(prompt).__name__}; expected a string.")
    return [Message("user", [*parts, TextPart(prompt)])]


def _media_part(item: object, max_bytes: int) -> ImagePart | VideoPart:
    if isinstance(item, Clip):
        return video_part(item, max_bytes)
    data = _encoded(item, max_bytes)
    return VideoPart(data=data) if is_video(data[:64]) else ImagePart(data=data)


def video_part(clip: Clip, max_bytes: int) -> VideoPart:
    """A clip as it goes to the preparer. Raises `ClientError` for what cannot be."""
    if not (0 <= clip.fps <= MAX_FPS and clip.max_frames >= 0):
        raise ClientError(
            f"fps {clip.fps:g} and max_frames {clip.max_frames}: expected 0 to {MAX_FPS} and nothing below 0.",
            code="invalid_value",
        )
    return VideoPart(data=_encoded(clip.source, max_bytes), fps=clip.fps, max_frames=clip.max_frames)


def _encoded(picture: object, max_bytes: int) -> bytes:
    """The bytes of a picture in a file format; of a file at most one more than `max_bytes`, which is then refused for
    its size (a device such as /dev/zero never ends).

    Raises:
        ClientError: The file cannot be read, or it is no picture at all.
    """
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return bytes(picture)
    if isinstance(picture, (str, os.PathLike)):
        try:
            with open(picture, "rb") as opened:
                return opened.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a possible file name"
            raise ClientError(f"{os.fspath(picture)!r} cannot be read: {reason}.", code="image_unreadable") from None
    import PIL.Image

    if not isinstance(picture, PIL.Image.Image):
        raise ClientError(
            f"A {type(picture).__name__} is no picture; expected a file name, encoded bytes or a Pillow image.",
            code="image_unreadable",
        )
    file = io.BytesIO()
    picture = _upright(picture)
    shown = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
    shown.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _upright(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Turned as its EXIF data says; where those are damaged, as it is."""
    import PIL.ImageOps

    try:
        return PIL.ImageOps.exif_transpose(picture)
    except Exception:  # EXIF comes from a file: reading it may raise anything
        return picture


def with_data_urls(messages: Sequence[Mapping[str, object]], max_bytes: int) -> list[Any]:
    """The messages with every ``{"type": "image"}`` or ``"video"`` part as the URL part that it stands for."""
    return [
        {**message, "content": [_as_url(part, max_bytes) for part in content]}
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


_URL_FIELDS: Final = {"image": ("detail",), "video": ("fps", "max_frames")}


def _as_url(part: object, max_bytes: int) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _URL_FIELDS or set(part) - {"type", kind, *_URL_FIELDS[kind]}:
        return part
    data = base64.b64encode(_encoded(part.get(kind), max_bytes)).decode()
    fields = {name: part[name] for name in _URL_FIELDS[kind] if name in part}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:application/octet-stream;base64,{data}", **fields}}
