"""What every route is given: the settings, the service that does the work, and where to count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from server.image_store import ImageStore
from server.metrics import Metrics
from server.routes.connection import BodyBudget
from server.service import Service
from server.settings import Settings

MAX_BODY_BYTES_IN_FLIGHT: Final = 512 << 20


@dataclass(frozen=True)
class Context:
    """One per application. `created_s`: Unix time of its start, OpenAI's `created` of the model. `images`: uploads."""

    settings: Settings
    service: Service
    metrics: Metrics
    version: str
    created_s: int
    images: ImageStore
    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(MAX_BODY_BYTES_IN_FLIGHT))
