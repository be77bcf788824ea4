"""What a client is told of a request that the engine did not take, or could not answer."""

from __future__ import annotations

from engine.sequence import Sequence
from engine.waiting import WaitingQueue
from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Rejected


def rejected(request_id: str, error: BeholderError) -> Rejected:
    """An error as it is sent."""
    return Rejected(request_id, error.message, error.status, error.code, error.param, error.retry_after_s)


def duplicate_id(request_id: str) -> ClientError:
    """Two requests at once have the same id."""
    return ClientError(f"A request with the id {request_id!r} is being served.", code="duplicate_request_id")


def queue_full(waiting: WaitingQueue, num_prompt_tokens: int, now_s: float) -> ClientError:
    """There is no room for a prompt of so many tokens."""
    return ClientError(
        f"The queue is full: {len(waiting)} requests with {waiting.num_tokens} prompt tokens wait "
        f"(at most {waiting.max_requests} and {waiting.max_tokens}). Try again later.",
        status=429,
        code="queue_full",
        retry_after_s=waiting.retry_after_s(num_prompt_tokens, now_s),
    )


def engine_failed(what: str) -> ServiceError:
    """The engine failed while it did `what` with the request."""
    return ServiceError(f"The engine failed while {what} this request.", status=500, code="engine_error")


def stalled() -> ServiceError:
    """Steps compute nothing."""
    return ServiceError("The engine could not go on with this request.", status=500, code="engine_stalled")


def memory_full(sequence: Sequence, capacity: int) -> ServiceError:
    """A request does not even fit alone into memory for so many tokens."""
    return ServiceError(
        f"The server's memory holds {capacity} tokens, and this request alone needs more: "
        f"{sequence.num_prompt_tokens} of prompt alone. Send fewer or smaller pictures, or less text.",
        status=500,
        code="kv_exhausted",
    )
