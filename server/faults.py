"""Errors as clients see them: OpenAI's error object, and the responses that carry it."""

from __future__ import annotations

import math
from typing import Final

import msgspec
from starlette.responses import Response

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Refused, Rejected

INTERNAL_ERROR_CODE: Final = "internal_error"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of an error response, and of the event that ends a failed stream."""

    error: ErrorObject


def error_body(error: BeholderError) -> bytes:
    """The error as JSON."""
    return msgspec.json.encode(ErrorBody(ErrorObject(error.message, error.kind, error.param, error.code)))


def error_response(error: BeholderError, headers: dict[str, str] | None = None) -> Response:
    """The error as an HTTP response, with `Retry-After` where the error knows a time."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error_body(error), status_code=error.status, headers=headers, media_type="application/json")


def internal_error(request_id: str) -> ServiceError:
    """What a client is told of a fault of ours: nothing but where to find it in the log."""
    return ServiceError(
        f"The server made a mistake; its log tells more under request id {request_id}.",
        status=500,
        code=INTERNAL_ERROR_CODE,
    )


def rejection(told: Refused | Rejected) -> BeholderError:
    """The error that another process told as a message."""
    family = ClientError if told.status < 500 else ServiceError
    return family(
        told.message,
        status=told.status,
        code=told.code,
        param=told.param,
        retry_after_s=told.retry_after_s if isinstance(told, Rejected) else None,
    )
