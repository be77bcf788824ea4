"""What the engine is told besides requests, and what it says of them and of itself to the server."""

from __future__ import annotations

from typing import Final

import msgspec

from preprocess.wire.sequence import EngineRequest


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


GAUGES: Final = (
    "num_running",
    "num_waiting",
    "kv_slots_used",
    "kv_slots_total",
    "vision_cache_bytes",
    "encoding_bytes",
    "device_bytes",
)
"""Fields of `EngineStats` that tell how it is now; all others count from the engine's start on."""


class EngineStats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges and running totals since the engine started, sent up to four times a second while anything changes.

    `prefix_*` count prompt tokens; `vision_*` count pictures. `encoding_bytes` is what the picture under way keeps
    between steps, `device_bytes` what all tensors take on a GPU. `encoder_slices` and `steps_over_target` count what
    ran beside decoding, `drafted_*` and `accepted_*` guessed tokens by who guessed them.
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
    encoding_bytes: int = 0
    device_bytes: int = 0
    encoder_slices: int = 0
    steps_over_target: int = 0
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
