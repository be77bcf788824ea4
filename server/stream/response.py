"""One response while it runs: what was said so far, how it ends, and the event that tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from preprocess.errors import BeholderError
from preprocess.wire import Delta, Usage
from server.stream.mailbox import DropReason, Frame
from server.stream.server_events import (
    ErrorInfo,
    ResponseCreated,
    ResponseDone,
    Status,
    StreamTimings,
    StreamUsage,
    TextDelta,
)
from server.stream.settings_events import TriggerMode


@dataclass(frozen=True)
class Ending:
    """How a response ended. `reason`: why those of its frames were dropped that had not been captioned."""

    status: Status
    finish_reason: str | None = None
    usage: Usage | None = None
    error: BeholderError | None = None
    reason: DropReason = "failed"

    @classmethod
    def of(cls, delta: Delta) -> Ending:
        """As the engine's last word has it."""
        status: Status = "incomplete" if delta.finish_reason == "length" else "completed"
        return cls(status, delta.finish_reason, delta.usage)


@dataclass
class Response:
    """A response that was created and is not done. `newest`: the frame whose age counts."""

    id: str
    trigger: TriggerMode
    frames: list[Frame]
    newest: Frame | None
    created_s: float
    metadata: dict[str, str] | None
    return_token_ids: bool
    is_context: bool
    """Whether its frames are the context of the next response."""
    places: dict[str, Frame] = field(default_factory=dict)
    """Where in the chat each picture stands, as refusals name it."""
    num_prompt_tokens: int = 0
    decode_ms: float = 0.0
    preprocess_ms: float = 0.0
    frame_age_ms: float | None = None
    _first_token_s: float | None = None
    _last_token_s: float = 0.0
    _num_tokens: int = 0
    _text: list[str] = field(default_factory=list)

    def created(self, trigger_s: float) -> ResponseCreated:
        """The event that begins it."""
        return ResponseCreated(
            response_id=self.id,
            trigger=self.trigger,
            frame_ids=[frame.id for frame in self.frames],
            frame_age_ms=None if self.newest is None else (self.created_s - self.newest.captured_s) * 1e3,
            queue_ms=(self.created_s - trigger_s) * 1e3,
            metadata=self.metadata,
        )

    def take(self, delta: Delta, now_s: float) -> TextDelta | None:
        """Note what the engine said; the event for it, if there is something to tell."""
        if delta.token_ids:
            if self._first_token_s is None:
                self._first_token_s = now_s
                if self.newest is not None:
                    self.frame_age_ms = (now_s - self.newest.captured_s) * 1e3
            self._last_token_s = now_s
            self._num_tokens += len(delta.token_ids)
        if not delta.text and not (self.return_token_ids and delta.token_ids):
            return None
        self._text.append(delta.text)
        ids = list(delta.token_ids) if self.return_token_ids else None
        return TextDelta(response_id=self.id, delta=delta.text, token_ids=ids)

    def done(self, ending: Ending, now_s: float) -> ResponseDone:
        """The event that ends it. Without the engine's `usage` the counts are what was seen here."""
        usage, error = ending.usage, ending.error
        return ResponseDone(
            response_id=self.id,
            status=ending.status,
            finish_reason=ending.finish_reason,
            text="".join(self._text),
            frame_ids=[frame.id for frame in self.frames],
            frame_age_ms=self.frame_age_ms,
            usage=StreamUsage(
                input_tokens=usage.prompt_tokens if usage else self.num_prompt_tokens,
                image_tokens=usage.image_tokens if usage else 0,
                cached_tokens=usage.cached_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else self._num_tokens,
                accepted_prediction_tokens=usage.accepted_prediction_tokens if usage else 0,
                rejected_prediction_tokens=usage.rejected_prediction_tokens if usage else 0,
            ),
            timings=self._timings(usage, now_s),
            metadata=self.metadata,
            error=None if error is None else ErrorInfo.of(error),
        )

    def _timings(self, usage: Usage | None, now_s: float) -> StreamTimings:
        ttft_ms = tpot_ms = None
        if self._first_token_s is not None:
            ttft_ms = (self._first_token_s - self.created_s) * 1e3
            if self._num_tokens > 1:
                tpot_ms = (self._last_token_s - self._first_token_s) * 1e3 / (self._num_tokens - 1)
        return StreamTimings(
            decode_ms=self.decode_ms,
            preprocess_ms=self.preprocess_ms,
            engine_queue_ms=usage.queue_ms if usage else 0.0,
            vision_ms=usage.vision_ms if usage else 0.0,
            prefill_ms=usage.prefill_ms if usage else 0.0,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            total_ms=(now_s - self.created_s) * 1e3,
        )
