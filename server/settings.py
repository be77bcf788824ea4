"""All options together: where their values come from, whether they fit each other, and what is made of them.

`server.options` declares them, and `beholder serve --help` is made from that. The command line beats the environment,
which beats the default. Knows nothing about torch, sockets or processes; the launcher sends `Settings` to its children
as JSON.
"""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from engine.config import EngineConfig
from preprocess.config import MediaLimits, PictureBound, PreprocessConfig
from server.model_source import ModelSourceError, default_model_name, model_folder
from server.options.option import (
    ENVIRONMENT_PREFIX,
    Field,
    Option,
    SettingsError,
    environment_name,
    fields_of,
    flag_name,
    is_service_link,
    nearest,
    parse,
)
from server.options.stream import StreamOptions

_log = logging.getLogger("beholder.settings")
CLIENT_VARIABLES: Final = frozenset({"BEHOLDER_URL", "BEHOLDER_KEY"})
"""What samples/clients read: whoever exported them for those may start a server all the same."""
MEBIBYTE: Final = 1 << 20
MIN_CONTEXT: Final = 16
"""A chat template alone takes that many tokens."""
LEAST_WORKERS: Final = 2
MOST_WORKERS: Final = 16
CPU_ENCODER_OPERATIONS: Final = 11 * 10**12
"""Of the encoder over one picture: what that of Qwen2-VL takes for 1,280 vision tokens (a megapixel, and the default of
transformers' processor), or minutes of a CPU. The 16,384 tokens that published folders allow would take it hours."""


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver. Never imports torch, which would know for sure."""
    return Path("/dev/nvidiactl").exists()


class Settings(StreamOptions, frozen=True, kw_only=True):
    """All options. Make one with `load`, which checks every value; `resolve_model` turns `model` into a folder."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option("Least severe log line that is written.")
    ] = "info"

    @classmethod
    def load(cls, given: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
        """Merge and check all sources.

        Args:
            given: Options by name from the command line or the Python API; strings are parsed, None means not given.
            environment: Variables to read ``BEHOLDER_…`` from, usually `os.environ`; others are not looked at.

        Raises:
            SettingsError: An unknown option or variable, or a value that cannot be.
        """
        values: dict[str, object] = {}
        for variable, text in (environment or {}).items():
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable in CLIENT_VARIABLES:
                continue
            if is_service_link(variable, text):
                _log.warning(
                    "%s=%s is Kubernetes' address of a service and no option: left aside (enableServiceLinks: false in "
                    "the pod's specification keeps it away)",
                    variable,
                    text[:200],
                )
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in OPTIONS or variable != variable.upper():
                known = [environment_name(option) for option in OPTIONS]
                raise SettingsError(f"Unknown environment variable {variable}.{nearest(variable, known)}")
            if text != "":  # An empty variable is how compose files say "not set".
                values[name] = parse(OPTIONS[name], text, source=variable)
        for name, value in (given or {}).items():
            if name not in OPTIONS:
                raise SettingsError(f"Unknown option {name}.{nearest(name, list(OPTIONS))}")
            if value is not None:
                values[name] = parse(OPTIONS[name], value, source=flag_name(name))
        settings = msgspec.convert(values, cls)
        settings._check_together()
        return settings

    def __repr__(self) -> str:
        """Without the API key: this may end up in a log."""
        shown = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "api_key"}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _check_together(self) -> None:
        for origin in self.allowed_origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and (not separator or not scheme or not rest or "/" in rest):
                raise SettingsError(f"--allowed-origins: {origin!r} is no origin; expected such as https://example.org")
        for host in self.allowed_hosts:
            if "/" in host or "@" in host:
                raise SettingsError(f"--allowed-hosts: {host!r} is no host name; expected such as beholder.example.org")
        if 0 < self.max_context < MIN_CONTEXT:
            raise SettingsError(f"--max-context: expected 0 or at least {MIN_CONTEXT} tokens, got {self.max_context}")
        if not self.host:
            raise SettingsError("--host: expected an address to listen on, such as 127.0.0.1, got an empty string")
        if not self.image_store_mb and self.image_ttl_s != Settings().image_ttl_s:
            raise SettingsError("--image-ttl-s is how long uploads stay, and --image-store-mb 0 keeps none: drop it")
        if self.max_image_mb > self.max_body_mb:
            raise SettingsError(
                f"--max-image-mb {self.max_image_mb:g} is larger than --max-body-mb {self.max_body_mb:g}, "
                "so such a picture could never arrive: raise --max-body-mb or lower --max-image-mb"
            )
        if self.api_key and not all("!" <= character <= "~" for character in self.api_key):
            raise SettingsError("--api-key: expected printable ASCII characters without spaces")
        self._check_drafters()

    def _check_drafters(self) -> None:
        if self.draft_model and self.draft_head:
            raise SettingsError("--draft-model and --draft-head: expected one of them")
        if self.speculation == "draft-model" and not self.draft_model:
            raise SettingsError("--speculation draft-model: name the model with --draft-model")
        for flag, given, mode in (
            ("--draft-model", self.draft_model, "draft-model"),
            ("--draft-head", self.draft_head, "head"),
        ):
            if given and self.speculation not in ("auto", mode):
                raise SettingsError(
                    f"{flag}: with --speculation {self.speculation} it would never guess; expected auto or {mode}"
                )

    @property
    def max_body_bytes(self) -> int:
        """Cap of a request body in bytes."""
        return int(self.max_body_mb * MEBIBYTE)

    @property
    def stream_message_bytes(self) -> int:
        """Cap of one WebSocket message in bytes."""
        return int(self.stream_max_message_mb * MEBIBYTE)

    @property
    def arena_bytes(self) -> int:
        """Size of the shared-memory arena in bytes. Call `server.start_table.Start.of` first, which replaces 0."""
        return self.arena_mb * MEBIBYTE

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model will run on the CPU."""
        return self.device == "cpu" or (self.device == "auto" and not has_gpu())

    @property
    def num_workers(self) -> int:
        """`workers` with 0 replaced: on a CPU the model needs the cores itself."""
        if self.workers:
            return self.workers
        return (
            LEAST_WORKERS if self.is_on_cpu else max(LEAST_WORKERS, min((os.cpu_count() or 1) * 5 // 8, MOST_WORKERS))
        )

    @property
    def largest_picture(self) -> PictureBound:
        """`max_picture_tokens`, with 0 replaced by the encoder's work where that takes a CPU long."""
        on_cpu = self.is_on_cpu and not self.max_picture_tokens
        return PictureBound(self.max_picture_tokens, CPU_ENCODER_OPERATIONS if on_cpu else 0)

    @property
    def scheme(self) -> str:
        """Of the server's address."""
        return "https" if self.tls_certificate else "http"

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.served_model_name[0] if self.served_model_name else default_model_name(self.model)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name by which a request may ask for the model."""
        return self.served_model_name or (self.model_name,)

    def engine_config(self) -> EngineConfig:
        """What the engine process is started with. Call `resolve_model` first."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            max_running=self.max_running,
            max_context=self.max_context,
            max_batched_tokens=self.max_batched_tokens,
            itl_target_ms=self.itl_target_ms,
            ttft_target_ms=self.ttft_target_ms,
            kv_tokens=self.kv_tokens,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            vision_cache_bytes=int(self.vision_cache_mb * MEBIBYTE),
            largest=self.largest_picture,
            prefix_cache=self.prefix_cache,
            speculation=self.speculation,
            draft_model=self.draft_model,
            draft_head=self.draft_head,
        )

    def preprocess_config(self) -> PreprocessConfig:
        """What a preprocess worker is started with. Call `resolve_model` first."""
        return PreprocessConfig(
            model=self.model,
            limits=MediaLimits(
                max_image_bytes=int(self.max_image_mb * MEBIBYTE),
                max_image_pixels=self.max_image_pixels,
                max_image_side=self.max_image_side,
                max_images=self.max_images,
                max_video_bytes=int(self.max_video_mb * MEBIBYTE),
                max_video_pixels=self.max_video_pixels,
                max_video_s=self.max_video_s,
                max_video_frames=self.max_video_frames,
                deadline_s=self.preprocess_deadline_s,
                memory_bytes=self.preprocess_memory_mb * MEBIBYTE,
            ),
            max_context=self.max_context,
            exact_decode=self.exact_decode,
            largest=self.largest_picture,
        )

    def resolve_model(self) -> Settings:
        """The same settings with `model` and what guesses for it folders that exist, `served_model_name` filled and
        `presets` absolute.

        A hub name is downloaded (weights as safetensors, tokenizer, configuration; never code or pickles).

        Raises:
            SettingsError: No such folder, no such model, or no way to reach the hub: one line that says so.
        """
        names = self.served_model_name or (default_model_name(self.model),)
        presets = str(Path(self.presets).absolute()) if self.presets else ""  # children may stand elsewhere
        return msgspec.structs.replace(
            self,
            model=_folder("--model", self.model),
            draft_model=_folder("--draft-model", self.draft_model) if self.draft_model else "",
            draft_head=_folder("--draft-head", self.draft_head) if self.draft_head else "",
            served_model_name=names,
            presets=presets,
        )


def _folder(flag: str, model: str) -> str:
    """Of a model that an option names, downloaded where that is needed."""
    try:
        return str(model_folder(model))
    except ModelSourceError as error:
        raise SettingsError(f"{flag}: {error}") from None


OPTIONS: Final[Mapping[str, Field]] = types.MappingProxyType(fields_of(Settings))

# What one process without a server has a use for: the options of `beholder caption` and of the Python API.
OFFLINE_OPTIONS: Final = (
    "model",
    "presets",
    "max_image_mb",
    "max_image_pixels",
    "max_image_side",
    "max_images",
    "max_picture_tokens",
    "max_video_mb",
    "max_video_pixels",
    "max_video_s",
    "max_video_frames",
    "exact_decode",
    "device",
    "dtype",
    "threads",
    "max_running",
    "max_context",
    "max_batched_tokens",
    "kv_tokens",
    "vision_cache_mb",
    "prefix_cache",
    "speculation",
    "draft_model",
    "draft_head",
)
