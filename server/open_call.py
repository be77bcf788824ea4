"""All that the dispatcher knows of one request, from `submit` to the finish of its last choice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from preprocess.wire import Job, Lease, Look, Looked, Prepared, Preview, Previewed
from server.generation import Generation


@dataclass
class OpenCall:
    """One submitted request, from `submit` to the finish of its last choice."""

    request_id: str
    job: Job | Look | Preview
    num_choices: int
    waiting_bytes: int
    prepared: asyncio.Future[Prepared | Looked | Previewed]
    num_images: int = 0
    num_clips: int = 0
    """Of a chat: counted once, since it may have very many parts."""
    lease: Lease = field(default_factory=Lease)
    worker: int | None = None
    admissions: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    unfinished: dict[str, None] = field(default_factory=dict)
    """Engine request ids sent and not yet finished, in the order of their choices."""
    generation: Generation | None = None
    cancelled: bool = False
    deaths: int = 0
    """Workers that died with it."""
