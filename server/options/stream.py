"""Options of live sessions (`/v1/stream`, `/v1/realtime`): their limits, each with what happens beyond it."""

from __future__ import annotations

from typing import Annotated

from server.options.engine import EngineOptions
from server.options.option import Option


class StreamOptions(EngineOptions, frozen=True, kw_only=True):
    """How many sessions, how fast, how large, how long."""

    stream_max_sessions: Annotated[
        int,
        Option(
            "Most live sessions, lost ones that may resume included; one more is closed with 1013.", low=1, high=100_000
        ),
    ] = 64
    stream_max_fps: Annotated[
        float, Option("Most frames a second of one session; more are dropped and counted as rate.", low=0.1, high=1000)
    ] = 30
    stream_max_messages_per_s: Annotated[
        float,
        Option(
            "Most messages a second of one session, twice that at once; more is closed with 4429.", low=1, high=100_000
        ),
    ] = 120
    stream_max_message_mb: Annotated[
        float,
        Option(
            "Largest message of a live session; a larger one is closed with 1009.", unit="MiB", low=0.001, high=1024
        ),
    ] = 16
    stream_max_mb_per_s: Annotated[
        float,
        Option(
            "Most media a second of one session, twice that at once; more is closed with 4429.",
            unit="MiB/s",
            low=0.001,
            high=100_000,
        ),
    ] = 32
    stream_max_held_mb: Annotated[
        float,
        Option(
            "Most encoded pictures that one session keeps; more are dropped and counted as too_large.",
            unit="MiB",
            low=0.001,
            high=65_536,
        ),
    ] = 64
    stream_max_queue: Annotated[
        int,
        Option("Most frames (overflow queue), and most asked responses, that wait in one session.", low=1, high=4096),
    ] = 8
    stream_max_response_tokens: Annotated[
        int, Option("Longest response of a live session.", unit="tokens", low=1, high=1_048_576)
    ] = 1024
    stream_send_queue_kb: Annotated[
        int,
        Option("Most text that waits for a slow reader; more is closed with 1013.", unit="KiB", low=4, high=1_048_576),
    ] = 256
    stream_send_timeout_s: Annotated[
        float,
        Option(
            "Longest time that a reader may take nothing; then it is closed with 1013.", unit="s", low=0.1, high=3600
        ),
    ] = 20
    stream_idle_timeout_s: Annotated[
        float,
        Option(
            "Longest time without a message from the client; then it is closed with 4408.",
            unit="s",
            low=0.1,
            high=86_400,
        ),
    ] = 60
    stream_max_session_s: Annotated[
        float, Option("Longest life of a live session; then it is closed with 4410.", unit="s", low=1, high=31_536_000)
    ] = 86_400
    stream_resume_s: Annotated[
        float, Option("How long a session waits for a client whose connection was lost.", unit="s", low=0, high=3600)
    ] = 30
