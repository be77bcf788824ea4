"""Sessions, responses and usage of the Realtime API as its clients read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from preprocess.errors import BeholderError
from preprocess.wire import Usage
from server.stream.conversation import Item
from server.stream.mailbox import Frame
from server.stream.realtime_events import RealtimeConfig, ResponseParams

_REASONS: Final = {"cancelled": "client_cancelled", "incomplete": "max_output_tokens"}


@dataclass
class Response:
    """A response that runs, and what it has said.

    `item`: what it becomes in the conversation. `frame`: the camera's picture that it was given. `whose`: the items
    that it answers, by their places in the chat.
    """

    id: str
    params: ResponseParams
    item: Item
    max_output_tokens: int
    in_conversation: bool
    frame: Frame | None
    whose: dict[str, Item]
    created_s: float
    started: bool = False
    has_spoken: bool = False
    text: list[str] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Where in the API's terms its text goes."""
        return {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    def shown(self, status: str, usage: Usage | None = None, error: BeholderError | None = None) -> dict[str, Any]:
        """As `response.created` and `response.done` have it."""
        details: dict[str, Any] | None = None
        if status not in {"in_progress", "completed"}:
            details = {"type": status}
            if status in _REASONS:
                details["reason"] = _REASONS[status]
            if error is not None:
                details["error"] = {"type": error.kind, "code": error.code, "message": error.message}
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [self.item.shown()] if self.started and status != "in_progress" else [],
            "output_modalities": ["text"],
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.params.metadata,
            "usage": None if usage is None else _shown_usage(usage),
        }


def shown_session(config: RealtimeConfig, session_id: str, expires_in_s: float) -> dict[str, Any]:
    """As `session.created` and `session.updated` have it."""
    built = msgspec.to_builtins(config)
    served = ("type", "model", "instructions", "output_modalities", "max_output_tokens", "beholder")
    shown: dict[str, Any] = {name: built[name] for name in served}
    return {"object": "realtime.session", "id": session_id, **shown, "tools": [], "expires_in_s": expires_in_s}


def _shown_usage(usage: Usage) -> dict[str, Any]:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - usage.image_tokens,
            "image_tokens": usage.image_tokens,
            "audio_tokens": 0,
            "cached_tokens": usage.cached_tokens,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
