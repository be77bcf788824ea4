"""One chat → one request for the engine: pictures and clips as pixels, text and placeholders as ids.

A preprocess worker calls `Preparer.prepare` for each job; offline use calls the same. Knows nothing of sockets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from preprocess.arena import Arena
from preprocess.change import change, thumbnail
from preprocess.config import PreprocessConfig
from preprocess.decisions import MAX_BRANCHES, branches_of
from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.families import Family, load_family, mrope
from preprocess.grammar import CompiledGrammar, GrammarCompiler
from preprocess.image import encoded_bytes
from preprocess.media import Item, Media, aligned
from preprocess.model_folder import ModelFolder
from preprocess.options import Defaults, check_options, resolve
from preprocess.preview import previewed
from preprocess.text import PromptEncoder, PromptIds
from preprocess.wire import (
    Branch,
    EngineRequest,
    ImagePart,
    Job,
    Lease,
    Look,
    Looked,
    MediaItem,
    Message,
    Prepared,
    Preview,
    Previewed,
    Refused,
    TextOptions,
    TextPart,
    VideoPart,
)

if TYPE_CHECKING:
    from preprocess.families.layout import Normalisation

CLIP_SHARE: Final = 0.9
"""Of the context, that one clip may take; transformers' Qwen processors leave the same."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


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
    return aligned(load_family(ModelFolder(config.model), config.largest).max_pixel_bytes)


def pixel_bytes_per_clip(config: PreprocessConfig) -> int:
    """Pixels of a clip with the family's own number of frames: what to lease for each clip of a job."""
    clips = load_family(ModelFolder(config.model), config.largest).clips
    return clips.lease_bytes + ceil(clips.max_frames / clips.frames_per_item) * aligned(1) if clips is not None else 0


class Preparer:
    """Holds what a model folder says of pictures, text and sampling. Raises `ServiceError` for an unusable folder."""

    def __init__(self, config: PreprocessConfig, arena: Arena | None) -> None:
        folder = ModelFolder(config.model)
        self._config = config
        self._arena = arena
        self._family: Family = load_family(folder, config.largest)
        self._prompts = PromptEncoder(folder, self._family)
        after_text = self._prompts.answers_follow_text
        self._no_grammar = CompiledGrammar("", leading_space=after_text)
        self._grammars = GrammarCompiler(after_text=after_text)
        self._identity = _identity(folder, config)
        self.profile = _profile(folder, config, self._family, self._prompts)
        self._own_context = self.profile.max_context
        self._leave_room_for_text()
        self._defaults = Defaults.of(folder, self.profile.eos_ids, self.profile.vocab_size)

    def lease_bytes(self, num_images: int) -> int:
        """Bound of the pixel bytes of a job with so many pictures."""
        return num_images * aligned(self._family.max_pixel_bytes)

    def limit_context(self, max_context: int) -> None:
        """Prompt and answer of every job take at most so many tokens; 0 leaves it as it is."""
        if max_context and max_context != self.profile.max_context:
            self.profile = dataclasses.replace(self.profile, max_context=min(max_context, self._own_context))
            self._leave_room_for_text()

    def _leave_room_for_text(self) -> None:
        """A clip takes at most so much of the context, however many frames are looked at."""
        if self._family.clips is not None:
            self._family.clips.fit_into(int(self.profile.max_context * CLIP_SHARE))

    def prepare(self, job: Job) -> Prepared | Refused:
        """Prepare a job. What cannot be served comes back as `Refused`; nothing is raised."""
        return _guarded(job.request_id, lambda: self._prepare(job))

    def look(self, look: Look) -> Looked | Refused:
        """Compare a frame with an earlier one. Like `prepare`, raises nothing."""
        return _guarded(look.request_id, lambda: self._look(look))

    def preview(self, preview: Preview) -> Previewed | Refused:
        """Show what the model would see of a picture or clip. Like `prepare`, raises nothing."""
        return _guarded(preview.request_id, lambda: self._preview(preview))

    def _preview(self, preview: Preview) -> Previewed:
        media = Media(None, Lease(), self._family, self._identity, self._config)
        media.add(preview.part)
        return previewed(preview.request_id, media)

    def _look(self, look: Look) -> Looked:
        seen = thumbnail(encoded_bytes(ImagePart(data=look.data), self._config.limits), self._config.limits)
        return Looked(look.request_id, seen, change(look.reference, seen) if look.reference else None)

    def _prepare(self, job: Job) -> Prepared:
        started = time.monotonic()
        check_options(job.options)
        self.limit_context(job.max_context)
        self._check_amount(job)
        wanted = job.options.grammar
        grammar = self._no_grammar if wanted is None else self._grammars.compile(wanted)
        media = Media(self._arena, job.lease, self._family, self._identity, self._config)
        asked: list[tuple[list[str], list[Item]]]
        segments: list[tuple[float, float]] = []
        if job.segmenting is None:
            for param, part in _media_parts(job):
                with _at(param):
                    media.add(part)
            asked = [(media.placeholders, media.items)]
        else:
            param, part = self._only_clip(job)
            with _at(param):
                parts = media.add_segments(part, job.segmenting.seconds)
            asked = [([part.placeholder], part.items) for part in parts]
            segments = [(float(part.start_s), float(part.end_s)) for part in parts]
        tools = json.loads(job.options.tools) if job.options.tools else []
        requests: list[EngineRequest] = []
        branches: list[Branch] = []
        for placeholders, items in asked:
            encode = self._encoder(placeholders, items, tools)
            prompt, branches = self._branches(job, encode) if job.questions else (encode(job.messages), [])
            requests.append(self._request(job, prompt, items, grammar))
        return Prepared(
            request_id=job.request_id,
            request=requests[0],
            images=media.images,
            arena_bytes=media.arena_bytes,
            decode_ms=media.decode_s * 1e3,
            preprocess_ms=(time.monotonic() - started) * 1e3,
            clips=media.clips,
            further=requests[1:],
            segments=segments,
            branches=branches,
        )

    def _encoder(
        self, placeholders: Sequence[str], items: Sequence[Item], tools: Sequence[Any]
    ) -> Callable[[list[Message]], PromptIds]:
        """Encodes messages with these media in their places."""
        num_tokens = [item.layout.num_tokens for item in items]
        return lambda messages: self._prompts.encode(messages, placeholders, num_tokens, tools)

    def _request(self, job: Job, prompt: PromptIds, items: Sequence[Item], grammar: CompiledGrammar) -> EngineRequest:
        """One sequence."""
        sampling = resolve(job.options, self._defaults, len(prompt.ids), self.profile.max_context)
        placed = mrope.positions(items, prompt.spans) if self._family.has_three_axes and items else None
        return EngineRequest(
            request_id=job.request_id,
            prompt_ids=np.asarray(prompt.ids, dtype="<i8").tobytes(),
            media=[MediaItem(item.digest, item.pixels, spans) for item, spans in zip(items, prompt.spans, strict=True)],
            sampling=msgspec.structs.replace(sampling, grammar=grammar.text),
            text=TextOptions(
                stop=job.options.stop,
                include_stop_str_in_output=job.options.include_stop_str_in_output,
                skip_special_tokens=job.options.skip_special_tokens,
                strip_leading_space=grammar.leading_space,
                min_tokens=job.options.min_tokens,
            ),
            arrival_s=job.arrival_s,
            session_id=job.session_id,
            priority=job.priority,
            positions=placed.astype("<i4").tobytes() if placed is not None else b"",
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
                    "The model's chat template puts the pictures elsewhere for another question.",
                    code="preprocess_failed",
                    status=500,
                )
            spellings = [[self._prompts.encode_text(way) for way in option] for option in question.options]
            branches += branches_of(index, prompt.ids, spellings, next(iter(self.profile.eos_ids), 0), len(branches))
            if len(branches) > MAX_BRANCHES:
                raise ClientError(
                    f"The answers part at more than {MAX_BRANCHES} places; ask fewer questions or give fewer answers.",
                    code="too_many_answers",
                    param="questions",
                )
            if longest is None or len(prompt.ids) > len(longest.ids):
                longest = prompt
        assert longest is not None
        return longest, branches

    def _check_amount(self, job: Job) -> None:
        """Refuse what cannot fit before any of it is decoded."""
        num_images = sum(isinstance(part, ImagePart) for _, part in _media_parts(job))
        if num_images > self._config.limits.max_images:
            raise ClientError(
                f"The request has {num_images} pictures; at most {self._config.limits.max_images} are accepted.",
                code="too_many_images",
                param="messages",
            )
        least = self._prompts.least_tokens(job.messages)
        if least >= self.profile.max_context:
            raise ClientError(
                f"The text has at least {least:,} tokens; the model's context is {self.profile.max_context:,}.",
                code="context_length_exceeded",
                param="messages",
            )

    def _only_clip(self, job: Job) -> tuple[str, VideoPart]:
        parts = _media_parts(job)
        if len(parts) == 1 and isinstance(parts[0][1], VideoPart):
            return parts[0][0], parts[0][1]
        raise ClientError(
            f"Timed captions are made of one clip and no pictures; the request holds {len(parts)} clips and pictures.",
            code="invalid_value",
            param="messages",
        )


def _guarded(request_id: str, work: Callable[[], T]) -> T | Refused:
    """What `work` gives, or its refusal."""
    try:
        return work()
    except BeholderError as error:
        return Refused(request_id, error.message, error.status, error.code, error.param)
    except MemoryError:
        return Refused(
            request_id,
            "a picture or clip of this request needs more memory to decode than is allowed; send it smaller",
            status=413,
            code="image_too_large",
        )
    except Exception:
        _log.exception("preparing request %s failed", request_id)
        return Refused(request_id, "preparing the request failed on the server", status=500, code="preprocess_failed")


@contextmanager
def _at(param: str) -> Iterator[None]:
    """Names the request field in what goes wrong inside."""
    try:
        yield
    except BeholderError as error:
        error.param = error.param or param
        raise


def _media_parts(job: Job) -> list[tuple[str, ImagePart | VideoPart]]:
    """Pictures and clips in order, with the request field that each came in."""
    return [
        (f"messages[{turn}].content[{index}]", part)
        for turn, message in enumerate(job.messages)
        for index, part in enumerate(message.content)
        if not isinstance(part, TextPart)
    ]


def _profile(folder: ModelFolder, config: PreprocessConfig, family: Family, prompts: PromptEncoder) -> ModelProfile:
    text = folder.text_fields
    longest = text.integer("max_position_embeddings", family.default_context)
    vocab_size = text.integer("vocab_size", prompts.vocab_size)
    eos_ids = folder.eos_ids
    own = prompts.token_id(folder.named_tokens.get("eos_token", ""))
    if own is not None and own not in eos_ids:
        eos_ids = [*eos_ids, own]
    return ModelProfile(
        family=family.name,
        max_context=min(config.max_context, longest) if config.max_context else longest,
        vocab_size=vocab_size,
        eos_ids=tuple(token_id for token_id in eos_ids if 0 <= token_id < vocab_size),
        image_token_id=family.image_token_id,
        max_pixel_bytes=family.max_pixel_bytes,
        normalisation=family.normalisation,
    )


def _identity(folder: ModelFolder, config: PreprocessConfig) -> bytes:
    """What, besides a picture's own bytes and layout, decides its vision tokens."""
    settings = [folder.config, folder.image_processor_config, folder.video_processor_config, config.exact_decode]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
