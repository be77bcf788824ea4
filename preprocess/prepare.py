"""One chat → one request for the engine: pictures decoded and laid out in pixels, text and placeholders as ids.

A preprocess worker calls `Preparer.prepare` for each job; offline use calls the same. Knows nothing of sockets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from preprocess.arena import ALIGNMENT, Arena
from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.decisions import MAX_BRANCHES, branches_of
from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.families import Family, load_family
from preprocess.grammar import CompiledGrammar, GrammarCompiler
from preprocess.image import decode, encoded_bytes
from preprocess.model_folder import ModelFolder
from preprocess.options import Defaults, check_options, resolve
from preprocess.text import PromptEncoder, PromptIds
from preprocess.wire import (
    Branch,
    EngineRequest,
    ImageInfo,
    ImagePart,
    Job,
    Lease,
    MediaItem,
    Message,
    Pixels,
    Prepared,
    Refused,
    TextOptions,
    TextPart,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from preprocess.families.layout import Normalisation, PictureLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What others need to know of a model folder, without reading it.

    Attributes:
        family: `model_type`.
        max_context: Prompt and answer together, in tokens.
        vocab_size: Text ids are below it.
        eos_ids: Ids that end an answer.
        image_token_id: Placeholder that vision tokens replace.
        max_pixel_bytes: Bound of one picture's pixels.
        normalisation: What the encoder does to uint8 pixels.
    """

    family: str
    max_context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    image_token_id: int
    max_pixel_bytes: int
    normalisation: Normalisation


def max_pixel_bytes_per_image(config: PreprocessConfig) -> int:
    """Bound of one picture's pixels, aligned as the arena wants them: what to lease for each picture of a job."""
    return _aligned(load_family(ModelFolder(config.model)).max_pixel_bytes)


class Preparer:
    """Holds what a model folder says of pictures, text and sampling. Raises `ServiceError` for an unusable folder."""

    def __init__(self, config: PreprocessConfig, arena: Arena | None) -> None:
        folder = ModelFolder(config.model)
        self._config = config
        self._arena = arena
        self._family: Family = load_family(folder)
        self._prompts = PromptEncoder(folder, self._family)
        self._answers_follow_text = self._prompts.answers_follow_text
        self._grammars = GrammarCompiler(after_text=self._answers_follow_text)
        self._identity = _identity(folder, config)
        self.profile = _profile(folder, config, self._family, self._prompts)
        self._defaults = Defaults.of(folder, self.profile.eos_ids, self.profile.vocab_size)

    def lease_bytes(self, num_images: int) -> int:
        """Bound of the pixel bytes of a job with so many pictures."""
        return num_images * _aligned(self._family.max_pixel_bytes)

    def prepare(self, job: Job) -> Prepared | Refused:
        """Prepare a job. What cannot be served comes back as `Refused`; nothing is raised."""
        try:
            return self._prepare(job)
        except BeholderError as error:
            return Refused(job.request_id, error.message, error.status, error.code, error.param)
        except MemoryError:
            return Refused(
                job.request_id,
                "a picture of this request needs more memory to decode than is allowed; send it smaller",
                status=413,
                code="image_too_large",
            )
        except Exception:
            _log.exception("preparing request %s failed", job.request_id)
            return Refused(
                job.request_id, "preparing the request failed on the server", status=500, code="preprocess_failed"
            )

    def _prepare(self, job: Job) -> Prepared:
        started = time.monotonic()
        check_options(job.options)
        self._check_amount(job)
        wanted = job.options.grammar
        grammar = CompiledGrammar("", False) if wanted is None else self._grammars.compile(wanted)
        pictures = _Pictures(self._arena, job.lease)
        for param, part in _image_parts(job):
            try:
                self._add_picture(pictures, part)
            except BeholderError as error:
                error.param = error.param or param
                raise
        layouts = pictures.layouts
        placeholders = [self._family.placeholder(layout) for layout in layouts]
        num_tokens = [layout.num_tokens for layout in layouts]

        tools = json.loads(job.options.tools) if job.options.tools else []

        def encode(messages: list[Message]) -> PromptIds:
            return self._prompts.encode(messages, placeholders, num_tokens, tools)

        prompt, branches = self._branches(job, encode) if job.questions else (encode(job.messages), [])
        sampling = resolve(job.options, self._defaults, len(prompt.ids), self.profile.max_context)
        sampling = msgspec.structs.replace(sampling, grammar=grammar.text)
        media = [
            MediaItem(digest, pixels, spans)
            for digest, pixels, spans in zip(pictures.digests, pictures.pixels, prompt.spans, strict=True)
        ]
        request = EngineRequest(
            request_id=job.request_id,
            prompt_ids=np.asarray(prompt.ids, dtype="<i8").tobytes(),
            media=media,
            sampling=sampling,
            text=TextOptions(
                stop=job.options.stop,
                include_stop_str_in_output=job.options.include_stop_str_in_output,
                skip_special_tokens=job.options.skip_special_tokens,
                strip_leading_space=self._answers_follow_text if wanted is None else grammar.leading_space,
                min_tokens=job.options.min_tokens,
            ),
            arrival_s=job.arrival_s,
            session_id=job.session_id,
            priority=job.priority,
        )
        return Prepared(
            request_id=job.request_id,
            request=request,
            images=pictures.infos,
            arena_bytes=pictures.arena_bytes,
            decode_ms=pictures.decode_s * 1e3,
            preprocess_ms=(time.monotonic() - started) * 1e3,
            branches=branches,
        )

    def _branches(self, job: Job, encode: Callable[[list[Message]], PromptIds]) -> tuple[PromptIds, list[Branch]]:
        """A job's questions as what the engine scores, and the longest of their prompts."""
        last = job.messages[-1]
        branches: list[Branch] = []
        longest: PromptIds | None = None
        for index, question in enumerate(job.questions):
            asked = Message(last.role, [*last.content, TextPart(question.text)])
            prompt = encode([*job.messages[:-1], asked])
            if longest is not None and prompt.spans != longest.spans:
                raise ServiceError(
                    "the model's chat template puts the pictures elsewhere for another question",
                    code="preprocess_failed",
                    status=500,
                )
            spellings = [[self._prompts.encode_text(way) for way in option] for option in question.options]
            branches += branches_of(index, prompt.ids, spellings, next(iter(self.profile.eos_ids), 0), len(branches))
            if len(branches) > MAX_BRANCHES:
                raise ClientError(
                    f"the answers part at more than {MAX_BRANCHES} places; ask fewer questions or give fewer answers",
                    code="too_many_answers",
                    param="questions",
                )
            if longest is None or len(prompt.ids) > len(longest.ids):
                longest = prompt
        assert longest is not None
        return longest, branches

    def _check_amount(self, job: Job) -> None:
        """Refuse what cannot fit before any of it is decoded."""
        num_images = sum(1 for _ in _image_parts(job))
        if num_images > self._config.limits.max_images:
            raise ClientError(
                f"the request has {num_images} pictures; at most {self._config.limits.max_images} are accepted",
                code="too_many_images",
                param="messages",
            )
        least = self._prompts.least_tokens(job.messages)
        if least >= self.profile.max_context:
            raise ClientError(
                f"the text has at least {least:,} tokens; the model's context is {self.profile.max_context:,}",
                code="context_length_exceeded",
                param="messages",
            )

    def _add_picture(self, pictures: _Pictures, part: ImagePart) -> None:
        started = time.monotonic()
        limits: MediaLimits = self._config.limits
        data = encoded_bytes(part, limits)
        family, detail = self._family, part.detail

        def draft_size(width: int, height: int) -> tuple[int, int]:
            return family.layout(width, height, detail).draft_size

        picture = decode(data, limits, None if self._config.exact_decode else draft_size)
        layout = family.layout(picture.width, picture.height, detail)
        pictures.decode_s += time.monotonic() - started
        family.fill(picture.image, layout, pictures.room_for(layout))
        sha256 = hashlib.sha256(data)
        pictures.digests.append(_digest(self._identity, layout, sha256.digest()))
        pictures.infos.append(ImageInfo(picture.width, picture.height, sha256.hexdigest(), layout.num_tokens))


@dataclass
class _Pictures:
    """The pictures of one job, as they are being prepared. Pixels go into the lease until one does not fit."""

    arena: Arena | None
    lease: Lease
    arena_bytes: int = 0
    decode_s: float = 0.0
    layouts: list[PictureLayout] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    infos: list[ImageInfo] = field(default_factory=list)
    _arrays: list[tuple[npt.NDArray[np.uint8], int | None]] = field(default_factory=list)

    def room_for(self, layout: PictureLayout) -> npt.NDArray[np.uint8]:
        """An array (tiles, height, width, 3) to fill."""
        start = _aligned(self.arena_bytes)
        if self.arena is not None and start + layout.num_bytes <= self.lease.size:
            offset: int | None = self.lease.offset + start
            self.arena_bytes = start + layout.num_bytes
            room = np.frombuffer(self.arena.view(self.lease.offset + start, layout.num_bytes), dtype=np.uint8)
        else:
            offset = None
            room = np.empty(layout.num_bytes, dtype=np.uint8)
        pixels = room.reshape(layout.shape)
        self.layouts.append(layout)
        self._arrays.append((pixels, offset))
        return pixels

    @property
    def pixels(self) -> list[Pixels]:
        """Where each picture's pixels are."""
        return [
            Pixels(layout.shape, inline=array.tobytes()) if offset is None else Pixels(layout.shape, offset)
            for layout, (array, offset) in zip(self.layouts, self._arrays, strict=True)
        ]


def _image_parts(job: Job) -> list[tuple[str, ImagePart]]:
    """Pictures in order, with the request field that each came in."""
    return [
        (f"messages[{turn}].content[{index}]", part)
        for turn, message in enumerate(job.messages)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def _profile(folder: ModelFolder, config: PreprocessConfig, family: Family, prompts: PromptEncoder) -> ModelProfile:
    text = folder.text_config
    longest = int(text.get("max_position_embeddings", 2048))
    eos_ids = folder.eos_ids
    own = prompts.token_id(folder.named_tokens.get("eos_token", ""))
    if own is not None and own not in eos_ids:
        eos_ids = [*eos_ids, own]
    return ModelProfile(
        family=family.name,
        max_context=min(config.max_context, longest) if config.max_context else longest,
        vocab_size=int(text.get("vocab_size", prompts.vocab_size)),
        eos_ids=tuple(eos_ids),
        image_token_id=family.image_token_id,
        max_pixel_bytes=family.max_pixel_bytes,
        normalisation=family.normalisation,
    )


def _identity(folder: ModelFolder, config: PreprocessConfig) -> bytes:
    """What, besides a picture's own bytes and layout, decides its vision tokens."""
    settings = [folder.config, folder.image_processor_config, config.exact_decode]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()


def _digest(identity: bytes, layout: PictureLayout, encoded_sha256: bytes) -> bytes:
    return hashlib.sha256(identity + encoded_sha256 + repr(layout).encode()).digest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
