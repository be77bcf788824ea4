"""Which pictures a step encodes, and how far: a picture's encoding is cut into slices where steps are short of time.

    no entry ─▶ begun: entry holds a `PictureEncoding` ─▶ … ─▶ encoded: entry holds embeddings
                  └────── no holder left: entry and what it keeps are gone ──────┘

At most one picture is under way between steps, so that what encodings keep is never more than encoding that picture at
once takes. Whoever wants a picture that another has begun shares it, and goes on with it if the other ends. The
scheduler asks here; `engine.execution` runs what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from engine.sequence import Picture, Sequence
from engine.step_budget import Room, StepBudget
from engine.vision_cache import VisionCache, VisionEntry

MOST_SHAPES: Final = 1024
"""Of pictures, of which it is remembered in how many slices they are encoded."""


@dataclass(slots=True, eq=False)
class Encoding:
    """`count` slices of a picture from slice `first`, for the sequence that asks; others may share it."""

    sequence: Sequence
    picture: Picture
    entry: VisionEntry
    first: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Whether the picture is encoded at once."""
        return not self.first and self.count == self.entry.num_slices

    @property
    def size(self) -> float:
        """Vision tokens a slice, which its time depends on."""
        return self.entry.num_tokens / self.entry.num_slices


class Encodings:
    """Chooses slices.

    Args:
        vision: The cache, whose entries say how far pictures are.
        budget: Where steps are not bounded by time, pictures are encoded as a whole.
        num_slices: In how many slices pixels of some shape can be encoded.
    """

    def __init__(
        self, vision: VisionCache, budget: StepBudget, num_slices: Callable[[Ordered[int]], int] | None = None
    ) -> None:
        self._vision = vision
        self._budget = budget
        self._slices_of = num_slices if num_slices is not None and budget.is_timed else None
        self._known: dict[Ordered[int], int] = {}  # slices by shape

    def left_s(self, sequence: Sequence, counted: set[int]) -> float:
        """What the steps to come will take to encode what the sequence has not read yet, by the costs; but for pictures
        that are `counted`, to which its own are added.
        """
        costs, left_s = self._budget.costs, 0.0
        if costs is None:
            return left_s
        for picture in sequence.pictures:
            entry = self._vision.find(picture.key)
            is_there = picture.stop <= sequence.num_computed or (entry is not None and entry.is_encoded)
            if is_there or picture.key in counted:
                continue
            counted.add(picture.key)
            num_slices = self._num_slices(picture)
            num_left = num_slices if entry is None else entry.num_slices - entry.num_planned
            left_s += num_left * costs.slice_s(picture.num_tokens / num_slices)
        return left_s

    def _num_slices(self, picture: Picture) -> int:
        if self._slices_of is None:
            return 1
        shape = tuple(picture.pixels.shape)
        if shape not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._slices_of(shape)
        return self._known[shape]

    def make_readable(self, room: Room, chosen: list[Encoding], sequence: Sequence, picture: Picture) -> bool:
        """Hold a picture for a sequence and have the step encode what is missing, as far as there is room; adds to
        `chosen`. False: the step cannot read its embeddings.
        """
        entry = self._vision.find(picture.key)
        if entry is None:
            entry = self._begin(room, sequence, picture)
            if entry is None:
                return False
        elif not picture.held:
            self._vision.hold(picture.key, picture.num_tokens, (sequence.serial, picture.index))
        picture.held = True
        if not entry.is_encoded:
            self._go_on(room, chosen, sequence, picture, entry)
        return entry.is_encoded

    def _begin(self, room: Room, sequence: Sequence, picture: Picture) -> VisionEntry | None:
        """A new entry, of which at least one slice will run. None: no time, another picture is under way, or no memory
        beside what is held.
        """
        if not room.pictures or self._vision.is_encoding:
            return None
        num_slices = self._num_slices(picture)
        if not room.slices(picture.num_tokens / num_slices, num_slices):
            return None
        entry = self._vision.hold(picture.key, picture.num_tokens, (sequence.serial, picture.index))
        if entry is not None:
            entry.num_slices = num_slices
            room.pictures -= 1
        return entry

    def _go_on(
        self, room: Room, chosen: list[Encoding], sequence: Sequence, picture: Picture, entry: VisionEntry
    ) -> None:
        left = entry.num_slices - entry.num_planned
        size = entry.num_tokens / entry.num_slices
        count = room.slices(size, left)
        if not count:
            return
        room.take_slices(size, count)
        own = next((other for other in chosen if other.entry is entry), None)
        if own is None:
            chosen.append(Encoding(sequence, picture, entry, entry.num_planned, count))
        else:
            own.count += count
        entry.num_planned += count
