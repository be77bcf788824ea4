"""What a step tells the detokenizer: starts of requests, new tokens, and ends with their usage. Exactly one end a
request.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from engine.batch import SampledToken
from engine.sequence import Sequence
from preprocess.wire import FinishReason, OutputStart, Rejected, TokenEvent, TokenEvents, Usage


class Outputs:
    """Collects the events of a step until `take`."""

    def __init__(self) -> None:
        self._starts: list[OutputStart] = []
        self._events: list[TokenEvent] = []

    def __bool__(self) -> bool:
        return bool(self._starts or self._events)

    @property
    def has_first(self) -> bool:
        """Whether somebody waits for an answer that begins here."""
        return any(event.token_ids and not event.first_index for event in self._events)

    def start(self, sequence: Sequence) -> None:
        """A request was admitted to the queue; this precedes all its events."""
        self._starts.append(OutputStart(sequence.request_id, sequence.request.text))

    def tokens(self, sequence: Sequence, sampled: Ordered[SampledToken]) -> None:
        """The sequence's newest output."""
        self._events.append(_token_event(sequence, sampled))

    def last_tokens(
        self, sequence: Sequence, sampled: Ordered[SampledToken], reason: FinishReason, now_s: float, *, by_id: bool
    ) -> None:
        """The sequence's newest output, with which it ends. `by_id`: its last is a stop id, and no part of the text."""
        stop_token_id = sampled[-1].token_id if by_id else None
        self._events.append(_token_event(sequence, sampled, reason, stop_token_id, usage(sequence, now_s)))

    def end(self, sequence: Sequence, reason: FinishReason, now_s: float, error: Rejected | None = None) -> None:
        """The sequence ends without a new token."""
        self._events.append(
            TokenEvent(
                sequence.request_id,
                len(sequence.output_ids),
                [],
                [],
                finish_reason=reason,
                usage=usage(sequence, now_s),
                error=error,
            )
        )

    def take(self) -> list[OutputStart | TokenEvents]:
        """Everything collected, starts first."""
        taken: list[OutputStart | TokenEvents] = [*self._starts]
        if self._events:
            taken.append(TokenEvents(self._events))
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget what was collected."""
        self._starts, self._events = [], []


def usage(sequence: Sequence, now_s: float) -> Usage:
    """Counts and times of a sequence that ends now."""
    clock = sequence.clock
    admitted_s = clock.admitted_s if sequence.num_cached is not None else now_s
    first_token_s = clock.first_token_s if sequence.output_ids else now_s
    return Usage(
        prompt_tokens=sequence.num_prompt_tokens,
        completion_tokens=len(sequence.output_ids),
        cached_tokens=sequence.num_cached or 0,
        image_tokens=sum(picture.num_tokens for picture in sequence.pictures),
        queue_ms=(admitted_s - clock.submitted_s) * 1e3,
        vision_ms=clock.vision_s * 1e3,
        prefill_ms=max(first_token_s - admitted_s - clock.vision_s, 0.0) * 1e3,
        decode_ms=max(now_s - first_token_s, 0.0) * 1e3,
        accepted_prediction_tokens=sequence.num_accepted,
        rejected_prediction_tokens=sequence.num_drafted - sequence.num_accepted,
    )


def _token_event(
    sequence: Sequence,
    sampled: Ordered[SampledToken],
    reason: FinishReason | None = None,
    stop_token_id: int | None = None,
    usage: Usage | None = None,
) -> TokenEvent:
    logprobs = []
    if sampled[0].logprobs is not None:
        logprobs = [token.logprobs for token in sampled if token.logprobs is not None]
    first = len(sequence.output_ids) - len(sampled)
    ids = [token.token_id for token in sampled]
    return TokenEvent(sequence.request_id, first, ids, logprobs, reason, stop_token_id, usage)
