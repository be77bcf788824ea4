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

from preprocess.wire.children import ChildState, Drain, Role
from preprocess.wire.engine import (
    GAUGES,
    Abort,
    Admitted,
    EngineInput,
    EngineReply,
    EngineStats,
    Rejected,
    Reset,
    ResetDone,
    Stop,
)
from preprocess.wire.job import (
    Detail,
    GenerationOptions,
    Grammar,
    GrammarKind,
    ImagePart,
    Job,
    Lease,
    Look,
    Message,
    Preview,
    Question,
    Segmenting,
    TextPart,
    ToolCall,
    VideoPart,
    WorkerInput,
)
from preprocess.wire.output import (
    Delta,
    DeltaLogprob,
    Deltas,
    DetokenizerInput,
    DetokenizerReset,
    FinishReason,
    OutputStart,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    Usage,
)
from preprocess.wire.prepared import (
    Branch,
    ClipInfo,
    ImageInfo,
    Looked,
    Prepared,
    Previewed,
    Refused,
    SeenTile,
    WorkerReply,
)
from preprocess.wire.sequence import GREEDY_TEMPERATURE, EngineRequest, MediaItem, Pixels, SamplingParams, TextOptions

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

__all__ = [
    "GAUGES",
    "GREEDY_TEMPERATURE",
    "Abort",
    "Admitted",
    "Branch",
    "ChildState",
    "ClipInfo",
    "Delta",
    "DeltaLogprob",
    "Deltas",
    "Detail",
    "DetokenizerInput",
    "DetokenizerReset",
    "Drain",
    "EngineInput",
    "EngineReply",
    "EngineRequest",
    "EngineStats",
    "FinishReason",
    "GenerationOptions",
    "Grammar",
    "GrammarKind",
    "ImageInfo",
    "ImagePart",
    "Job",
    "Lease",
    "Look",
    "Looked",
    "MediaItem",
    "Message",
    "OutputStart",
    "Pixels",
    "Prepared",
    "Preview",
    "Previewed",
    "Question",
    "Refused",
    "Rejected",
    "Reset",
    "ResetDone",
    "Role",
    "SamplingParams",
    "SeenTile",
    "Segmenting",
    "ServerInput",
    "Stop",
    "TextOptions",
    "TextPart",
    "TokenEvent",
    "TokenEvents",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
    "VideoPart",
    "WorkerInput",
    "WorkerReply",
]
