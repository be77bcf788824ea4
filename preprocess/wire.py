"""Every struct that crosses a process border, and nothing else.

    server ──Job──▶ preprocess worker ──Prepared | Refused──▶ server
    server ──Look | Preview──▶ preprocess worker ──Looked | Previewed | Refused──▶ server
    server ──EngineRequest | Abort | Reset──▶ engine ──Admitted | Rejected | ResetDone | EngineStats──▶ server
    engine ──OutputStart, TokenEvents, ResetDone──▶ detokenizer ──Deltas | DetokenizerReset──▶ server
                                        detokenizer ──Stop──▶ engine
    launcher ──ChildState | Drain──▶ server

Messages are msgpack. Pixels never ride in one, unless the shared-memory arena is full. Times are seconds of
`time.monotonic()`, which is one clock for all processes of a machine; durations are milliseconds and say so in their
names. Request ids are chosen by the server and begin with its epoch, so that answers to an earlier server process are
known as stale.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Detail = Literal["auto", "low", "high"]
FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_TEMPERATURE: Final = 0.0


# ---- server → preprocess worker -------------------------------------------------------------------------------------


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of a message's text, exactly as the client wrote it; it never turns into control tokens."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """One encoded picture: either raw `data`, or a `data_url` (``data:image/...;base64,...``) still in base64.

    `max_pixels`: it is made so small before the model's own processing begins; 0 leaves it as it is.
    """

    data: bytes = b""
    data_url: str = ""
    detail: Detail = "auto"
    max_pixels: int = 0


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """One encoded clip: either raw `data`, or a `data_url` (``data:video/...;base64,...``) still in base64.

    `fps` and `max_frames`: how many frames a second of it are looked at, and how many at most. 0: as the model's own
    processor does. `max_pixels` of each frame, as of a picture.
    """

    data: bytes = b""
    data_url: str = ""
    fps: float = 0.0
    max_frames: int = 0
    max_pixels: int = 0


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


# ---- preprocess worker → server -------------------------------------------------------------------------------------


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


class Pixels(msgspec.Struct, frozen=True):
    """uint8 pixels of one item, C order: in the arena at `offset` or inline.

    `shape` = (tiles or frames, height, width, 3).
    """

    shape: tuple[int, int, int, int]
    offset: int = 0
    inline: bytes = b""


class MediaItem(msgspec.Struct, frozen=True):
    """What the encoder attends over at once: a picture, or of a clip one frame or a few that it sees together.

    `digest` (32 bytes) names the encoded bytes and every option that changes its tokens. `spans` are the
    (start, length) runs of placeholder ids in the prompt that its vision tokens replace, in order.
    """

    digest: bytes
    pixels: Pixels
    spans: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Vision tokens of this item."""
        return sum(length for _, length in self.spans)


class SamplingParams(msgspec.Struct, frozen=True):
    """How one sequence is sampled: all resolved, nothing left to default.

    `temperature` 0 is greedy. `top_k` 0 is all. `stop_token_ids` holds the model's end ids too, unless `ignore_eos` was
    asked. `seed` (63 bits) and the output index are the whole state of the noise.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    score_ids: list[int] = msgspec.field(default_factory=list)
    """Log probabilities are those of these ids, in this order, instead of the most likely ones'."""
    grammar: str = ""
    """In the form that `preprocess.grammar` gives it; empty: any text."""


class TextOptions(msgspec.Struct, frozen=True):
    """What the detokenizer must know of a request."""

    stop: list[str] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    strip_leading_space: bool = False
    """Where the prompt ends in text (``Assistant:``), answers begin with a space, which is no part of them: in the next
    turn the template writes it again."""
    min_tokens: int = 0
    """A stop string that ends before this many output tokens is ordinary text."""


class EngineRequest(msgspec.Struct, frozen=True, tag="request"):
    """One sequence for the engine. `prompt_ids`: int64 little-endian token ids, placeholders not yet replaced.

    `positions`: of models whose positions have three axes (M-RoPE), int32 little-endian (3, n): time, row and column of
    the first n tokens of the prompt, at least to the end of its last item. What follows goes on from the largest + 1 on
    all axes. Empty: 0, 1, 2, … The keys and values of a prefix are shared by ids, so whatever decides positions must
    be in the ids or in the items' digests.
    """

    request_id: str
    prompt_ids: bytes
    media: list[MediaItem]
    sampling: SamplingParams
    text: TextOptions
    arrival_s: float
    session_id: str = ""
    priority: int = 0
    positions: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt_ids) // 8


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


# ---- server, detokenizer → engine -----------------------------------------------------------------------------------


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client is gone, or the request was cancelled: stop within one step. Unknown ids are ignored."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """A stop string ended within the first `num_tokens` output tokens: keep those, discard the rest."""

    request_id: str
    num_tokens: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Forget every request from before. `epoch` comes back in `ResetDone`.

    `generation`: the engine process that it is for. A fresh engine serves nobody before its own reset, since what was
    sent to the process before it may still arrive, and with pixels that are somebody else's by then.
    """

    epoch: str
    generation: int = 0


EngineInput = EngineRequest | Abort | Stop | Reset


# ---- engine → server ------------------------------------------------------------------------------------------------


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The engine queued the request: from now on its outcome comes through the detokenizer, exactly one finish."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine did not take the request: fields of `errors.BeholderError`."""

    request_id: str
    message: str
    status: int
    code: str
    param: str | None = None
    retry_after_s: float | None = None


class ResetDone(msgspec.Struct, frozen=True, tag="reset_done"):
    """All requests from before `Reset(epoch)` are gone. The engine says so on both of its sockets.

    `max_context`: longest prompt + answer that it takes, in tokens.
    """

    epoch: str
    max_context: int = 0


class EngineStats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges and running totals since the engine started, sent up to four times a second while anything changes.

    `prefix_*` count prompt tokens; `vision_*` count pictures; `drafted_*` and `accepted_*` count guessed tokens by who
    guessed them.
    """

    num_running: int
    num_waiting: int
    kv_slots_used: int
    kv_slots_total: int
    num_steps: int
    num_retracted: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    vision_queries: int
    vision_hits: int
    vision_cache_bytes: int
    drafted_ngram: int = 0
    drafted_echo: int = 0
    drafted_grammar: int = 0
    drafted_habit: int = 0
    drafted_draft_model: int = 0
    drafted_head: int = 0
    accepted_ngram: int = 0
    accepted_echo: int = 0
    accepted_grammar: int = 0
    accepted_habit: int = 0
    accepted_draft_model: int = 0
    accepted_head: int = 0


EngineReply = Admitted | Rejected | ResetDone | EngineStats


# ---- engine → detokenizer -------------------------------------------------------------------------------------------


class OutputStart(msgspec.Struct, frozen=True, tag="start"):
    """Precedes the first token of a request on the same socket."""

    request_id: str
    text: TextOptions


class Usage(msgspec.Struct, frozen=True):
    """Token counts and engine times of a finished sequence."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int
    queue_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    accepted_prediction_tokens: int = 0
    """Output tokens that had been guessed beforehand, so that they came together with others in one step."""
    rejected_prediction_tokens: int = 0
    """Guesses that the model checked for nothing."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of the sampled token, and (id, logprob) of the most likely ones, best first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New output of one sequence in one step: ids (none when only the finish is told), and its end if it ended.

    `first_index`: output index of `token_ids[0]`. `logprobs` is as long as `token_ids` when asked for, else empty.
    """

    request_id: str
    first_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended it; it is the last of `token_ids` and is not shown as text."""
    usage: Usage | None = None
    error: Rejected | None = None
    """Set exactly when `finish_reason` is ``"error"``."""


class TokenEvents(msgspec.Struct, frozen=True, tag="tokens"):
    """All events of one step."""

    events: list[TokenEvent]


DetokenizerInput = OutputStart | TokenEvents | ResetDone


# ---- detokenizer → server -------------------------------------------------------------------------------------------


class DeltaLogprob(msgspec.Struct, frozen=True):
    """One output token with its own text (bytes may be partial UTF-8), for OpenAI's `logprobs.content`."""

    token: str
    data: bytes
    logprob: float
    top: list[tuple[str, bytes, float]]


class Delta(msgspec.Struct, frozen=True):
    """New text of one request, and its end if it ended. Texts of all deltas concatenate to the answer."""

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[DeltaLogprob] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end id."""
    usage: Usage | None = None
    error: Rejected | None = None


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """All deltas of one step."""

    deltas: list[Delta]


class DetokenizerReset(msgspec.Struct, frozen=True, tag="detokenizer_reset"):
    """The detokenizer heard `ResetDone(epoch)` behind the last event of earlier requests and forgot them."""

    epoch: str


# ---- launcher → server ----------------------------------------------------------------------------------------------

Role = Literal["server", "preprocess", "detokenizer", "engine"]


class ChildState(msgspec.Struct, frozen=True, tag="child"):
    """A child process came up (`up`) or died. `reason` tells how it died, such as ``"signal SIGKILL"``."""

    role: Role
    index: int
    up: bool
    reason: str = ""
    generation: int = 0
    """Counts the processes that have filled this place: a later one has a larger number."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop intake, finish streams within `grace_s`, then exit 0."""

    grace_s: float


ServerInput = (
    Prepared
    | Looked
    | Previewed
    | Refused
    | Admitted
    | Rejected
    | ResetDone
    | EngineStats
    | Deltas
    | DetokenizerReset
    | ChildState
    | Drain
)
