"""What the server asks of a preprocess worker: a chat to prepare, a frame to compare, a picture to show."""

from __future__ import annotations

from typing import Literal

import msgspec

Detail = Literal["auto", "low", "high"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of a message's text, exactly as the client wrote it; it never turns into control tokens."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """One encoded picture: either raw `data`, or a `data_url` (``data:image/...;base64,...``) still in base64.

    `rest`: what follows `data_url` where that is long, as bytes, so that the server copies and scans it nowhere.
    `max_pixels`: it is made so small before the model's own processing begins; 0 leaves it as it is.
    """

    data: bytes = b""
    data_url: str = ""
    rest: bytes = b""
    detail: Detail = "auto"
    max_pixels: int = 0

    @property
    def num_bytes(self) -> int:
        """Of what was sent, base64 as such."""
        return len(self.data) + len(self.data_url) + len(self.rest)


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """One encoded clip: either raw `data`, or a `data_url` (``data:video/...;base64,...``) still in base64.

    `fps` and `max_frames`: how many frames a second of it are looked at, and how many at most. 0: as the model's own
    processor does. `max_pixels` of each frame, and `rest`, as of a picture.
    """

    data: bytes = b""
    data_url: str = ""
    rest: bytes = b""
    fps: float = 0.0
    max_frames: int = 0
    max_pixels: int = 0

    @property
    def num_bytes(self) -> int:
        """Of what was sent, base64 as such."""
        return len(self.data) + len(self.data_url) + len(self.rest)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer made. `arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat. `role` is ``system``, ``user``, ``assistant``, or ``tool`` for what a call gave."""

    role: str
    content: list[TextPart | ImagePart | VideoPart]
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""


GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "tools"]


class Grammar(msgspec.Struct, frozen=True):
    """The shape that an answer must have.

    `text`: the schema as JSON, the regular expression, the choices as a JSON list, the grammar (Lark or GBNF), or the
    functions that may be called as JSON.
    `param`: the request field that it came in.
    """

    kind: GrammarKind
    text: str
    param: str
    any_whitespace: bool = True
    """Whether JSON may have white space between its parts (a space, or a line break and an indent)."""


class GenerationOptions(msgspec.Struct, frozen=True):
    """What the client asked for. None means: the model folder's `generation_config.json`, else the engine's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; k >= 0: log probability of each sampled token and of the k most likely ones."""
    grammar: Grammar | None = None
    tools: str = ""
    """JSON list of the tools that the model is told of; empty: none."""


class Lease(msgspec.Struct, frozen=True):
    """A block of the arena that a worker may fill: bytes [offset, offset + size). Size 0: send pixels inline."""

    offset: int = 0
    size: int = 0


class Segmenting(msgspec.Struct, frozen=True):
    """Cut the one clip of a job into parts of `seconds` (0: by the length of the clip), and ask about each alone."""

    seconds: float = 0.0


class Question(msgspec.Struct, frozen=True):
    """A question about the messages before it. `options`: for each possible answer, every way to write it."""

    text: str
    options: list[list[str]]


class Job(msgspec.Struct, frozen=True, tag="job"):
    """One chat to prepare. A worker holds one at a time. `arrival_s`: when the request reached the server.

    `request_id` names this attempt; `generation` the worker process that it is for. A later process in its place drops
    it: its lease is somebody else's by then.
    """

    request_id: str
    messages: list[Message]
    options: GenerationOptions
    lease: Lease
    arrival_s: float
    session_id: str = ""
    priority: int = 0
    segmenting: Segmenting | None = None
    generation: int = 0
    max_context: int = 0
    """Longest prompt + answer that the engine takes, in tokens; 0: the worker's own bound."""
    questions: list[Question] = []
    """When there are any, each is added to the last message, and nothing is written: its options are weighed."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Ask how much a camera's frame differs from an earlier one, without preparing anything for the engine.

    `reference`: the `Looked.thumbnail` to compare with; empty compares with nothing. `generation`: as of a `Job`.
    """

    request_id: str
    data: bytes
    reference: bytes = b""
    generation: int = 0


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """Ask what the model would see of one picture or clip, without preparing anything for the engine.

    `generation`: as of a `Job`.
    """

    request_id: str
    part: ImagePart | VideoPart
    generation: int = 0


WorkerInput = Job | Look | Preview
