"""The pictures and clips of one job as they are being prepared: decoded, resized, and laid out in shared memory.

Pixels go into the job's lease, one item after the other, until one does not fit; the rest travels inline.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from preprocess.arena import ALIGNMENT, Arena
from preprocess.config import PreprocessConfig
from preprocess.errors import ClientError
from preprocess.image import decode, encoded_bytes
from preprocess.shrink import shrunk, size_within
from preprocess.video import Clip, encoded_clip, open_clip
from preprocess.wire import ClipInfo, ImageInfo, ImagePart, Lease, Pixels, VideoPart

if TYPE_CHECKING:
    import numpy.typing as npt

    from preprocess.families import Family
    from preprocess.families.clips import ClipFamily
    from preprocess.families.layout import PictureLayout

MAX_SEGMENTS: Final = 64
SEGMENT_S: Final = 4
"""Length of a timed caption's segment, unless the clip is so long that this would make too many."""

_LEAST_FRAMES: Final = 2
"""Of a segment, unless the client asks for fewer: in one frame nothing moves."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item:
    """What the engine encodes at once: a picture, or of a clip one frame or a few.

    Attributes:
        layout: Its size.
        digest: Names all that its vision tokens and their positions depend on.
        pixels: Where they are.
        index: Which of its clip's items it is; 0 for a picture.
        time: How far behind the clip's first its positions are (`ClipFamily.item_times`).
    """

    layout: PictureLayout
    digest: bytes
    pixels: Pixels
    index: int = 0
    time: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a clip, and the frames of it that are wanted."""

    start_s: Fraction
    end_s: Fraction
    wanted: list[int]


@dataclass(frozen=True, slots=True)
class Shown:
    """A part of a clip that is asked about alone: the text that stands for it, and what the engine encodes."""

    start_s: Fraction
    end_s: Fraction
    placeholder: str
    items: list[Item]


@dataclass
class Media:
    """Add pictures and clips in the order of the messages.

    Attributes:
        placeholders: For each picture and clip, the text that stands for it.
        items: What the engine encodes, in the order of the placeholders.
        images: About each picture.
        clips: About each clip.
        arena_bytes: How much of the lease is used.
        decode_s: Time spent in decoders.
    """

    arena: Arena | None
    lease: Lease
    family: Family
    identity: bytes
    config: PreprocessConfig
    placeholders: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    images: list[ImageInfo] = field(default_factory=list)
    clips: list[ClipInfo] = field(default_factory=list)
    arena_bytes: int = 0
    decode_s: float = 0.0

    def add(self, part: ImagePart | VideoPart) -> None:
        """Decode a part and lay it out. Raises `ClientError`."""
        if isinstance(part, ImagePart):
            self._add_picture(part)
        else:
            self._add_clip(part)

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def _add_picture(self, part: ImagePart) -> None:
        started = time.monotonic()
        data = encoded_bytes(part, self.config.limits)
        family, detail = self.family, part.detail

        def draft_size(width: int, height: int) -> tuple[int, int]:
            size = size_within(width, height, part.max_pixels)
            return family.layout(width, height, detail).draft_size if size == (width, height) else size

        picture = decode(data, self.config.limits, None if self.config.exact_decode else draft_size)
        size = size_within(picture.width, picture.height, part.max_pixels)
        is_shrunk = size != (picture.width, picture.height)
        image = shrunk(picture.image, size) if is_shrunk else picture.image
        layout = family.layout(*size, detail)
        self.decode_s += time.monotonic() - started
        room, offset = self._room_for(layout)
        family.fill(image, layout, room)
        sha256 = hashlib.sha256(data)
        source = sha256.digest() + (repr(size).encode() if is_shrunk else b"")
        self.placeholders.append(family.placeholder(layout))
        self.items.append(Item(layout, self._digest(layout, source), _pixels(layout, room, offset)))
        self.images.append(ImageInfo(picture.width, picture.height, sha256.hexdigest(), layout.num_tokens))

    # ---- clips -------------------------------------------------------------------------------------------------------

    def _add_clip(self, part: VideoPart) -> None:
        family = self._clip_family()
        data, clip = self._open(part)
        most = part.max_frames or min(family.max_frames, self.config.limits.max_video_frames)
        wanted = family.sample(clip.timeline, part.fps, most)
        self._check_num_frames(len(wanted))
        segment = Segment(Fraction(0), clip.timeline.duration_s, wanted)
        (whole,) = self._show(clip, [segment], data, part.max_pixels)
        self.placeholders.append(whole.placeholder)
        self.items.extend(whole.items)

    def add_segments(self, part: VideoPart, seconds: float) -> list[Shown]:
        """Decode a clip that is looked at in parts of so many seconds (0: by its length). Raises `ClientError`."""
        family = self._clip_family()
        data, clip = self._open(part)
        timeline = clip.timeline
        bounds = list(_bounds(timeline.duration_s, seconds))
        most = min(part.max_frames or family.max_frames, max(self.config.limits.max_video_frames // len(bounds), 1))
        segments: list[Segment] = []
        for start_s, end_s in bounds:
            piece, first = timeline.between(start_s, end_s)
            fps = part.fps or max(family.fps, float(_LEAST_FRAMES / (end_s - start_s)) if end_s > start_s else 0.0)
            wanted = [first + number for number in family.sample(piece, fps, most)]
            self._check_num_frames(len(wanted))
            segments.append(Segment(start_s, end_s, wanted))
        self._check_num_frames(len({number for segment in segments for number in segment.wanted}))
        return self._show(clip, segments, data, part.max_pixels)

    def _open(self, part: VideoPart) -> tuple[bytes, Clip]:
        started = time.monotonic()
        data = encoded_clip(part, self.config.limits)
        clip = open_clip(data, self.config.limits)
        self.decode_s += time.monotonic() - started
        return data, clip

    def _show(self, clip: Clip, segments: Sequence[Segment], data: bytes, max_pixels: int) -> list[Shown]:
        """Decode the frames of each segment and lay them out, in order.

        Not all that are wanted may come out of a damaged clip: the nearest stand for them.
        """
        family = self._clip_family()
        sha256 = hashlib.sha256(data)
        frames: dict[tuple[int, PictureLayout], npt.NDArray[np.uint8]] = {}
        given: list[int] = []
        size = (0, 0)
        shrunk_to = b""
        layouts: list[PictureLayout] = []
        for number, image in self._timed(
            clip.frames(sorted({number for segment in segments for number in segment.wanted}))
        ):
            seen = shrunk(image, size_within(*image.size, max_pixels))
            if not given:
                size = image.size
                shrunk_to = b"" if seen is image else repr(seen.size).encode()
                layouts = [family.layout(*seen.size, len(segment.wanted)) for segment in segments]
            given.append(number)
            for layout in dict.fromkeys(layouts):
                frames[number, layout] = np.empty((1, *layout.shape[1:]), np.uint8)
                self.family.fill(seen, layout, frames[number, layout])
        chosen = [sorted({_nearest(given, number) for number in segment.wanted}) for segment in segments]
        last_use = {
            (number, layout): index
            for index, (layout, numbers) in enumerate(zip(layouts, chosen, strict=True))
            for number in numbers
        }
        shown: list[Shown] = []
        made: dict[tuple[object, ...], Item] = {}  # segments share what lies on their border
        for place, (segment, layout, numbers) in enumerate(zip(segments, layouts, chosen, strict=True)):
            times_s = [max(clip.timeline.time_s(number) - segment.start_s, Fraction(0)) for number in numbers]
            duration_s = segment.end_s - segment.start_s
            times = family.item_times(times_s, duration_s)
            items: list[Item] = []
            for index, item_time in enumerate(times):
                mine = numbers[index * layout.frames : (index + 1) * layout.frames]
                mine += mine[-1:] * (layout.frames - len(mine))
                key = (*mine, layout, item_time, index)
                if key not in made:
                    source = b"".join(number.to_bytes(8, "little") for number in (*mine, item_time))
                    digest = self._digest(layout, sha256.digest() + source + shrunk_to)
                    room, offset = self._room_for(layout)
                    np.concatenate([frames[number, layout] for number in mine], out=room)
                    made[key] = Item(layout, digest, _pixels(layout, room, offset), index, item_time)
                items.append(made[key])
                for number in set(mine):
                    if last_use[number, layout] == place:  # a long clip's frames take as much memory as its items
                        del frames[number, layout]
            shown.append(Shown(segment.start_s, segment.end_s, family.placeholder(layout, times_s, duration_s), items))
        self.clips.append(
            ClipInfo(
                *size,
                duration_s=float(clip.timeline.duration_s),
                frame_times_s=[float(clip.timeline.time_s(number)) for number in given],
                sha256=sha256.hexdigest(),
                num_tokens=sum(item.layout.num_tokens for item in made.values()),
            )
        )
        return shown

    def _timed(self, frames: Iterable[T]) -> Iterator[T]:
        """Counts the time between the frames that are asked for as time in decoders."""
        started = time.monotonic()
        for frame in frames:
            self.decode_s += time.monotonic() - started
            yield frame
            started = time.monotonic()
        self.decode_s += time.monotonic() - started

    def _clip_family(self) -> ClipFamily:
        if self.family.clips is None:
            raise ClientError(
                f"This model ({self.family.name}) shown at pictures and not at clips; send single frames as pictures.",
                code="video_not_supported",
            )
        return self.family.clips

    def _check_num_frames(self, num_frames: int) -> None:
        seen = sum(len(clip.frame_times_s) for clip in self.clips)
        limit = self.config.limits.max_video_frames
        if seen + num_frames > limit:
            raise ClientError(
                f"{seen + num_frames:,} frames would be looked at; at most {limit:,} are accepted in one request; ask "
                "for fewer with fps or max_frames.",
                code="too_many_frames",
            )

    # ---- pixels ------------------------------------------------------------------------------------------------------

    def _room_for(self, layout: PictureLayout) -> tuple[npt.NDArray[np.uint8], int | None]:
        """An array (tiles, height, width, 3) to fill, and its place in the arena."""
        start = aligned(self.arena_bytes)
        if self.arena is not None and start + layout.num_bytes <= self.lease.size:
            offset: int | None = self.lease.offset + start
            self.arena_bytes = start + layout.num_bytes
            room = np.frombuffer(self.arena.view(self.lease.offset + start, layout.num_bytes), dtype=np.uint8)
        else:
            offset = None
            room = np.empty(layout.num_bytes, dtype=np.uint8)
        return room.reshape(layout.shape), offset

    def _digest(self, layout: PictureLayout, source: bytes) -> bytes:
        """Names what the vision tokens depend on."""
        return hashlib.sha256(self.identity + source + repr(layout).encode()).digest()


def aligned(size: int) -> int:
    """Rounded up to where the next pixels may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pixels(layout: PictureLayout, room: npt.NDArray[np.uint8], offset: int | None) -> Pixels:
    return Pixels(layout.shape, inline=room.tobytes()) if offset is None else Pixels(layout.shape, offset)


def _nearest(sorted_numbers: Sequence[int], number: int) -> int:
    place = bisect_left(sorted_numbers, number)
    return min(sorted_numbers[max(place - 1, 0) : place + 1], key=lambda other: abs(other - number))


def _bounds(duration_s: Fraction, seconds: float) -> Iterator[tuple[Fraction, Fraction]]:
    """Start and end of each segment: all of one length, a millisecond or more, but for a last one of up to half as
    much more.
    """
    if seconds:
        length = max(Fraction(seconds).limit_denominator(1000), Fraction(1, 1000))
    else:
        length = max(Fraction(SEGMENT_S), duration_s / MAX_SEGMENTS)
    num_segments = max(ceil(duration_s / length - Fraction(1, 2)), 1)
    if num_segments > MAX_SEGMENTS:
        raise ClientError(
            f"Segments of {seconds:g} s would cut this clip into {num_segments:,}; at most {MAX_SEGMENTS} are made, so "
            f"ask for {ceil(duration_s / MAX_SEGMENTS)} s or more.",
            code="too_many_segments",
            param="segment_s",
        )
    for index in range(num_segments):
        yield index * length, duration_s if index == num_segments - 1 else (index + 1) * length
