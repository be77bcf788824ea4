"""What a preprocess worker answers."""

from __future__ import annotations

import msgspec

from preprocess.wire.sequence import EngineRequest


class ImageInfo(msgspec.Struct, frozen=True):
    """What a client may want to know of its picture: size after EXIF orientation, before resizing.

    `sha256`: hexadecimal digest of the encoded bytes.
    """

    width: int
    height: int
    sha256: str
    num_tokens: int


class ClipInfo(msgspec.Struct, frozen=True):
    """What a client may want to know of its clip: upright size, how long it is, and when the frames are that were seen.

    `sha256`: hexadecimal digest of the encoded bytes.
    """

    width: int
    height: int
    duration_s: float
    frame_times_s: list[float]
    sha256: str
    num_tokens: int


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A place where the answers to a question part: how likely is each of `score_ids` after `prompt_ids`?

    `options[i]`: the option that `score_ids[i]` leads to, or -1 where a later branch decides, whose `parent` is this
    one and whose `edge` is i. `parent` -1: the question's first.
    """

    prompt_ids: bytes
    question: int
    score_ids: list[int]
    options: list[int]
    parent: int
    edge: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """A worker's answer: the request for the engine, and what the server tells the client about it."""

    request_id: str
    request: EngineRequest
    images: list[ImageInfo]
    arena_bytes: int
    """How much of the lease was used, from its start."""
    decode_ms: float
    preprocess_ms: float
    """The whole time in the worker, `decode_ms` included."""
    clips: list[ClipInfo] = msgspec.field(default_factory=list)
    further: list[EngineRequest] = msgspec.field(default_factory=list)
    """Of a clip in segments: the requests for all but the first."""
    segments: list[tuple[float, float]] = msgspec.field(default_factory=list)
    """Of a clip in segments: start and end of each, in seconds."""
    branches: list[Branch] = []
    """Of a job with questions: the request is sent once for each, with its prompt."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A worker's answer to what cannot be served: fields of `errors.BeholderError`."""

    request_id: str
    message: str
    status: int
    code: str
    param: str | None = None


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """A worker's answer to `Look`: see `preprocess.change` for both fields. `change` is None without a reference."""

    request_id: str
    thumbnail: bytes
    change: float | None


class SeenTile(msgspec.Struct, frozen=True):
    """Pixels that the vision encoder gets at once, as a picture that can be looked at.

    `row`, `column`: its place in the grid, from 1; 0 and 0 is the whole picture. `time_s`: of a clip's frame.
    `encoded`: WebP.
    """

    width: int
    height: int
    encoded: bytes
    row: int = 0
    column: int = 0
    time_s: float | None = None


class Previewed(msgspec.Struct, frozen=True, tag="previewed"):
    """A worker's answer to `Preview`: one of `image` and `clip`, and the tiles in the order of the prompt."""

    request_id: str
    tiles: list[SeenTile]
    image: ImageInfo | None = None
    clip: ClipInfo | None = None
    rows: int = 0
    columns: int = 0


WorkerReply = Prepared | Looked | Previewed | Refused
