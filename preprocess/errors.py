"""The two families of errors: what the client did wrong (4xx), and what we could not do (5xx).

Every message names what came, what was expected and what to do; none carries a decoder's or a library's own text.
"""

from __future__ import annotations


class BeholderError(Exception):
    """An error with an HTTP status and the fields of OpenAI's error object.

    Args:
        message: A sentence for the person who sent the request.
        status: HTTP status.
        code: A stable word for programs, such as ``"image_too_large"``.
        param: The request field at fault, such as ``"messages[0].content[1]"``, or None.
        retry_after_s: Seconds after which the same request may succeed, or None.
    """

    kind = "server_error"

    def __init__(
        self, message: str, *, status: int, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class ClientError(BeholderError):
    """The request cannot be served as sent: HTTP 4xx."""

    kind = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 400,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, code=code, param=param, retry_after_s=retry_after_s)
        if status == 429:  # nothing is wrong with the request but its time
            self.kind = "rate_limit_error"


class ServiceError(BeholderError):
    """The request was right and we could not serve it: HTTP 5xx."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 503,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, code=code, param=param, retry_after_s=retry_after_s)


class ModelError(ServiceError):
    """The model folder cannot be served as it is. The message names the field, what came and what would work."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="model_unusable", status=500)
