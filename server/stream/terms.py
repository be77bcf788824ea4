"""What a server offers to every one of its sessions: names, limits, presets; all of it told in `session.created`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from server.presets import Preset, load_presets
from server.settings import Settings
from server.stream.server_events import Capabilities, SessionLimits

TRIGGERS: Final = ("manual", "interval", "continuous", "on_change")
MEDIA: Final = ("frame", "image", "video")


@dataclass(frozen=True)
class Terms:
    """The offer. `model_names`: of the served model, the one that answers carry first. `presets`: by name, in order."""

    model_names: tuple[str, ...]
    limits: SessionLimits
    presets: Mapping[str, Preset]

    @property
    def capabilities(self) -> Capabilities:
        """As clients see what can be asked for."""
        return Capabilities(triggers=list(TRIGGERS), presets=list(self.presets), media=list(MEDIA))


def terms_of(settings: Settings) -> Terms:
    """From the server's options.

    Raises:
        SettingsError: A preset of `--presets` cannot be used.
    """
    limits = SessionLimits(
        max_frame_bytes=min(int(settings.max_image_mb * (1 << 20)), settings.stream_message_bytes),
        max_clip_bytes=int(min(settings.max_video_mb, settings.stream_max_held_mb) * (1 << 20)),
        max_message_bytes=settings.stream_message_bytes,
        max_pixels=settings.max_image_pixels,
        max_images=settings.max_images,
        max_fps=settings.stream_max_fps,
        max_messages_per_s=settings.stream_max_messages_per_s,
        max_bytes_per_s=settings.stream_max_mb_per_s * (1 << 20),
        max_held_bytes=int(settings.stream_max_held_mb * (1 << 20)),
        max_queue=settings.stream_max_queue,
        max_response_tokens=settings.stream_max_response_tokens,
        send_queue_bytes=settings.stream_send_queue_kb * 1024,
        idle_timeout_s=settings.stream_idle_timeout_s,
        max_session_s=settings.stream_max_session_s,
        resume_s=settings.stream_resume_s,
    )
    return Terms(settings.model_names, limits, load_presets(settings.presets))
