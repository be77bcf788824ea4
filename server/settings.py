"""The one home of every option: its default, unit, check, help line and environment variable.

`beholder serve --help` is made from this declaration. The command line beats the environment, which beats the default.
Knows nothing about torch, sockets or processes; the launcher sends `Settings` to its children as JSON.
"""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from engine.config import EngineConfig
from preprocess.config import MediaLimits, PictureBound, PreprocessConfig
from server.model_source import ModelSourceError, default_model_name, model_folder

ENVIRONMENT_PREFIX: Final = "BEHOLDER_"
CLIENT_VARIABLES: Final = frozenset({"BEHOLDER_URL", "BEHOLDER_KEY"})
"""What samples/clients read: whoever exported them for those may start a server all the same."""
MEBIBYTE: Final = 1 << 20
PILLOW_MAX_PIXELS: Final = 178_956_970
"""Pillow opens no larger picture: twice its `MAX_IMAGE_PIXELS`, which is the whole process's and not ours to raise."""
MIN_CONTEXT: Final = 16
"""A chat template alone takes that many tokens."""


LEAST_WORKERS: Final = 2
MOST_WORKERS: Final = 16
CPU_ENCODER_OPERATIONS: Final = 11 * 10**12
"""Of the encoder over one picture: what that of Qwen2-VL takes for 1,280 vision tokens (a megapixel, and the default of
transformers' processor), or minutes of a CPU. The 16,384 tokens that published folders allow would take it hours."""


class SettingsError(Exception):
    """An option is unknown or has a value that cannot be. The message says what came and what is expected."""


class Option(msgspec.Struct, frozen=True):
    """What belongs to an option besides its name, type and default. `low` and `high` are inclusive bounds."""

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver. Never imports torch, which would know for sure."""
    return Path("/dev/nvidiactl").exists()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options. Make one with `load`, which checks every value; `resolve_model` turns `model` into a folder."""

    # -- model
    model: Annotated[
        str, Option("Model: a folder, or a name on the Hugging Face hub (owner/name). Empty: the bundled model.")
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        Option("Names that requests may use for the model; the first is the one answers carry. Empty: from the model."),
    ] = ()

    presets: Annotated[
        str, Option("Folder with presets of your own (*.json), beside those that come with the server.")
    ] = ""

    # -- network
    host: Annotated[str, Option("Address to listen on. 0.0.0.0 and :: listen on every interface.")] = "127.0.0.1"
    port: Annotated[int, Option("TCP port to listen on; 0 takes a free one.", low=0, high=65535)] = 8000
    api_key: Annotated[
        str, Option("Key that clients must send as 'Authorization: Bearer KEY' to /v1 and /metrics. Empty: no key.")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option("Further host names that clients may use for this server ('*': any). Guards against DNS rebinding."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Web origins (https://example.org) whose pages may call this server ('*': any). Same origin always may."
        ),
    ] = ()
    tls_certificate: Annotated[str, Option("Certificate (PEM file, with its chain) to serve https with.")] = ""
    tls_key: Annotated[str, Option("Private key (PEM file) of --tls-certificate.")] = ""
    https_self_signed: Annotated[
        bool,
        Option(
            "Serve https with a certificate that the server makes itself: pages of other machines then get the camera, "
            "after one warning. Needs beholder[ui]."
        ),
    ] = False
    ui: Annotated[bool, Option("The web UI at /ui, where beholder[ui] is installed.")] = True
    max_body_mb: Annotated[float, Option("Largest request body.", unit="MiB", low=0.001, high=4096)] = 64
    request_timeout_s: Annotated[
        float, Option("Longest time that one request may take, waiting included.", unit="s", low=0.1, high=86_400)
    ] = 600
    grace_s: Annotated[
        float, Option("How long running requests may go on after SIGTERM.", unit="s", low=0, high=3600)
    ] = 30

    hang_timeout_s: Annotated[
        float,
        Option(
            "A process that shows no sign of life for so long is ended and restarted; above any layer of a step.",
            unit="s",
            low=3,
            high=86_400,
        ),
    ] = 120

    # -- media
    workers: Annotated[
        int,
        Option(
            "Preprocess processes (decode, resize, tokenise); 0: 2, or by the cores where the model runs on a GPU.",
            low=0,
            high=256,
        ),
    ] = 0
    arena_mb: Annotated[
        int,
        Option(
            "Shared memory for pixels on their way to the engine; 0: by the model's largest picture.",
            unit="MiB",
            low=0,
            high=65_536,
        ),
    ] = 0
    max_image_mb: Annotated[float, Option("Largest encoded picture.", unit="MiB", low=0.001, high=2048)] = 32
    max_image_pixels: Annotated[
        int, Option("Most pixels (width x height) of one picture.", low=1, high=PILLOW_MAX_PIXELS)
    ] = 100_000_000
    max_image_side: Annotated[int, Option("Longest side of one picture.", unit="pixels", low=1, high=1_000_000)] = (
        32_768
    )
    max_images: Annotated[int, Option("Most pictures in one request.", low=1, high=4096)] = 16
    max_video_mb: Annotated[float, Option("Largest encoded clip.", unit="MiB", low=0.001, high=65_536)] = 64
    max_video_pixels: Annotated[
        int, Option("Most pixels (width x height) of a clip's frames.", low=1, high=4_000_000_000)
    ] = 36_000_000
    max_video_s: Annotated[float, Option("Longest clip.", unit="s", low=0.1, high=1_000_000)] = 14_400
    max_video_frames: Annotated[int, Option("Most frames of clips looked at in one request.", low=1, high=4096)] = 256
    max_picture_tokens: Annotated[
        int,
        Option(
            "Larger pictures and frames are made smaller, where a model keeps their size; 0: the model's own, on a CPU "
            "as many as its encoder gets through in minutes.",
            unit="vision tokens",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    image_store_mb: Annotated[
        float, Option("Memory for pictures uploaded to /v1/images; 0: none.", unit="MiB", low=0, high=65_536)
    ] = 256
    image_ttl_s: Annotated[
        float, Option("How long an uploaded picture stays without being used.", unit="s", low=1, high=2_592_000)
    ] = 3600
    preprocess_deadline_s: Annotated[
        float, Option("Longest time that preparing one request may take.", unit="s", low=0.1, high=3600)
    ] = 20
    preprocess_memory_mb: Annotated[
        int, Option("Most memory that a preprocess process may add while it works.", unit="MiB", low=64, high=1_048_576)
    ] = 2048
    exact_decode: Annotated[
        bool, Option("Decode large JPEGs at full scale: pixels then equal the model's own processor.")
    ] = False

    # -- engine
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Option("Where the model runs; auto is CUDA where there is a device, else the CPU."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("Type of weights and KV cache; auto is bfloat16 where the device is fast at it, else float32."),
    ] = "auto"
    threads: Annotated[
        int, Option("Threads of the engine on a CPU; 0: one less than the cores, at least one.", low=0, high=1024)
    ] = 0
    max_running: Annotated[int, Option("Most sequences that decode at once.", low=1, high=4096)] = 64
    max_context: Annotated[
        int,
        Option(
            "Longest prompt + answer; 0: the model's, or what the KV cache holds if that is less.",
            unit="tokens",
            low=0,
            high=16_777_216,
        ),
    ] = 0
    max_batched_tokens: Annotated[
        int,
        Option(
            "Token budget of one step: decode first, then prefill; 0: 512 on a CPU, 4096 on a GPU.",
            unit="tokens",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    kv_tokens: Annotated[
        int, Option("Size of the KV cache; 0: chosen from memory.", unit="tokens", low=0, high=1_073_741_824)
    ] = 0
    max_waiting: Annotated[
        int, Option("Most requests that wait for the engine; one more gets 429.", low=1, high=1_000_000)
    ] = 256
    max_waiting_tokens: Annotated[
        int,
        Option("Most prompt tokens that wait for the engine; more gets 429.", unit="tokens", low=1, high=1_073_741_824),
    ] = 262_144
    vision_cache_mb: Annotated[
        float,
        Option(
            "Memory for finished picture embeddings; 0: by the model's largest picture.",
            unit="MiB",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Option("Keep computed prompts, so that the next request with the same start is fast.")
    ] = True
    speculation: Annotated[
        Literal["auto", "none", "ngram", "echo", "grammar", "habit", "draft-model", "head"],
        Option(
            "Who guesses tokens ahead, so that a step can check several: the request's own text (ngram), the session's "
            "earlier answers (echo), the answer's grammar, what the model keeps saying (habit), a smaller model "
            "(draft-model), a head trained for the model (head); auto: all that there are, where it pays, and on a GPU "
            "none yet. No guess changes an answer."
        ),
    ] = "auto"
    draft_model: Annotated[
        str,
        Option(
            "A smaller model of the same vocabulary that guesses tokens ahead: a folder, or a name on the Hugging Face "
            "hub. Empty: none."
        ),
    ] = ""
    draft_head: Annotated[
        str,
        Option(
            "A head in the layout of EAGLE-3, trained for the model, that guesses tokens ahead: a folder, or a name on "
            "the Hugging Face hub. Empty: the folder 'head' in the model's, if there is one."
        ),
    ] = ""

    # -- live streams
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

    # -- logging
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
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in OPTIONS or variable != variable.upper():
                known = [environment_name(option) for option in OPTIONS]
                raise SettingsError(f"Unknown environment variable {variable}.{nearest(variable, known)}")
            if text != "":  # An empty variable is how compose files say "not set".
                values[name] = parse(name, text, source=variable)
        for name, value in (given or {}).items():
            if name not in OPTIONS:
                raise SettingsError(f"Unknown option {name}.{nearest(name, list(OPTIONS))}")
            if value is not None:
                values[name] = parse(name, value, source=flag_name(name))
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


def flag_name(name: str) -> str:
    """``max_body_mb`` → ``--max-body-mb``."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """``max_body_mb`` → ``BEHOLDER_MAX_BODY_MB``."""
    return ENVIRONMENT_PREFIX + name.upper()


def nearest(name: str, known: list[str]) -> str:
    """`` Did you mean …?`` for the closest known name, or nothing when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


class Field(msgspec.Struct, frozen=True):
    """An option as `load` and the command line need it. `kind` is the plain type: str, int, float, bool or tuple."""

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    option: Option


def _fields() -> dict[str, Field]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    fields = {}
    for field in msgspec.structs.fields(Settings):
        annotated, option = typing.get_args(hints[field.name])
        origin = typing.get_origin(annotated)
        choices = typing.get_args(annotated) if origin is Literal else ()
        kind = str if origin is Literal else (origin or annotated)
        fields[field.name] = Field(field.name, kind, choices, field.default, option)
    return fields


OPTIONS: Final[Mapping[str, Field]] = types.MappingProxyType(_fields())

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

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def parse(name: str, value: object, *, source: str) -> object:
    """One option's value from a string or a Python value, checked.

    Raises:
        SettingsError: Names `source`, the value and what is expected.
    """
    field = OPTIONS[name]
    shown = "a value" if name == "api_key" else repr(value)
    refusal = SettingsError(f"{source}: expected {expected(field)}, got {shown}")
    if field.kind is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise refusal
        return tuple(item.strip() for item in items if item.strip())
    if field.kind is bool:
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in _TRUE + _FALSE:
            raise refusal
        return word in _TRUE
    if field.kind is str:
        text = str(value) if isinstance(value, Path) else value
        if not isinstance(text, str) or "\0" in text or (field.choices and text not in field.choices):
            raise refusal
        return text
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refusal
    try:
        number = field.kind(value.replace("_", "") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        raise refusal from None
    if isinstance(value, float) and number != value:  # int(2.5) would be accepted silently
        raise refusal
    if not math.isfinite(number):
        raise refusal
    option = field.option
    if (option.low is not None and number < option.low) or (option.high is not None and number > option.high):
        raise refusal
    return number


def expected(field: Field) -> str:
    """What an option takes, in words."""
    if field.choices:
        return "one of " + ", ".join(field.choices)
    if field.kind is bool:
        return "true or false"
    if field.kind is tuple:
        return "words with commas between them"
    if field.kind is str:
        return "a string"
    kind = "a whole number" if field.kind is int else "a number"
    unit = f" of {field.option.unit}" if field.option.unit else ""
    low, high = field.option.low, field.option.high
    return f"{kind}{unit} from {low:.12g} to {high:.12g}" if low is not None else kind
