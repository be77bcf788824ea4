"""What is known of a model before any process starts, and the table of limits that is printed when all are up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from preprocess.arena import available_memory
from preprocess.errors import ServiceError
from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder
from server.options.option import SettingsError
from server.settings import MEBIBYTE, Settings

LEAST_ARENA_MB: Final = 64
MOST_ARENA_MB: Final = 1024
PICTURES_A_WORKER: Final = 4
"""Of the largest pictures there are, the arena holds so many for each worker."""


@dataclass(frozen=True)
class Start:
    """The settings with nothing left to choose here, and what the model folder says.

    Attributes:
        settings: `arena_mb` is chosen.
        family: `model_type`.
        picture_tokens: Vision tokens of the largest picture that is looked at.
        own_picture_tokens: The same by the folder's own bound.
        clip_frames: Frames of a clip that are looked at, at most; 0 where the model takes no clips.
        brings_code: Whether the folder names code of its own, which is not run.
    """

    settings: Settings
    family: str
    picture_tokens: int
    own_picture_tokens: int
    clip_frames: int
    brings_code: bool

    @classmethod
    def of(cls, settings: Settings) -> Start:
        """Look into the model folder. Raises `SettingsError` for one that is not known."""
        try:
            folder = ModelFolder(Path(settings.model))
            family = load_family(folder, settings.largest_picture)
            picture_tokens = largest_item_tokens(family)
        except ServiceError as error:
            raise SettingsError(f"--model: {error.message}") from None
        own = largest_item_tokens(load_family(folder))
        bound = settings.max_picture_tokens
        if bound and picture_tokens > bound and picture_tokens == own:
            raise SettingsError(
                f"--max-picture-tokens {bound}: this model ({folder.model_type}) takes its pictures in sizes of its "
                f"own, up to {own} tokens each; leave the option out"
            )
        frames = min(family.clips.max_frames, settings.max_video_frames) if family.clips is not None else 0
        if not settings.arena_mb:
            wanted = settings.num_workers * PICTURES_A_WORKER * family.max_pixel_bytes // MEBIBYTE
            arena_mb = max(min(wanted, MOST_ARENA_MB, available_memory() // 8 // MEBIBYTE), LEAST_ARENA_MB)
            settings = msgspec.structs.replace(settings, arena_mb=arena_mb)
        return cls(settings, folder.model_type, picture_tokens, own, frames, folder.brings_code)

    def lines(self, facts: Mapping[str, Any]) -> Iterator[str]:
        """The table. `facts`: what the engine said when it was ready."""
        settings = self.settings
        threads = f" with {facts['threads']} of its threads" if facts["device"] == "cpu" else ""
        context, own = facts["context"], facts["model_context"]
        yield f"model    {settings.model_name} ({settings.model})"
        yield f"runs as  {self.family} in {facts['dtype']} on {facts['device']}{threads}"
        if facts["device"] == "cpu":
            yield f"kernel   {facts['kernel']}"
        if context == own:
            yield f"context  {context:,} tokens, prompt and answer"
        else:
            why = "as asked for" if settings.max_context else "what the KV cache holds; --kv-tokens makes it larger"
            yield f"context  {context:,} tokens, prompt and answer, of the model's {own:,}: {why}"
        yield f"KV cache {facts['kv_tokens']:,} tokens, {_size(facts['kv_bytes'])}"
        clips = f"; {self.clip_frames:,} frames of a clip" if self.clip_frames else "; no clips"
        yield f"pictures up to {self.picture_tokens:,} tokens each, {settings.max_images:,} in a request{clips}"
        if self.picture_tokens < self.own_picture_tokens:
            own_tokens = f"{self.own_picture_tokens:,}"
            yield f"         larger ones are made smaller; --max-picture-tokens allows the model's own {own_tokens}"
        if facts["pace_ms"]:
            alone_ms, most_ms = facts["pace_ms"]
            yield f"steps    {alone_ms} ms for {facts['pace_rows']} streams; with new pictures and prompts {most_ms} ms"
        else:
            yield "steps    take new pictures and prompts at once (--ttft-target-ms 0): streams wait for them"
        cache = _size(facts["vision_cache_bytes"])
        yield f"memory   vision cache {cache}, pixel arena {_size(settings.arena_bytes)}"
        if facts["device"] != "cpu":
            parts = [f"{part} {seconds:.1f} s" for part, seconds in facts["start_s"].items() if seconds >= 0.05]
            yield f"start    {', '.join(parts)}"
        if self.brings_code:
            yield "note     the model folder brings code of its own (auto_map), which is never run"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MEBIBYTE:.0f} MiB"
