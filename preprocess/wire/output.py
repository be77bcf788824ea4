"""What was generated, on its way out: token ids from the engine to the detokenizer, text from there to the server."""

from __future__ import annotations

from typing import Literal

import msgspec

from preprocess.wire.engine import Rejected, ResetDone
from preprocess.wire.sequence import TextOptions

FinishReason = Literal["stop", "length", "abort", "error"]


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
