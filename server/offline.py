"""The Python API: pictures and clips in, text out, in this process and without a server.

    with Beholder() as beholder:
        print(beholder.caption("cat.jpg").text)

It drives the stages that the server's processes wrap, so there is no second code path:

    Job ─▶ Preparer ─▶ Engine ─▶ Detokenizer ─▶ deltas
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.video_formats import is_video
from preprocess.wire import (
    ClipInfo,
    Delta,
    EngineRequest,
    GenerationOptions,
    ImageInfo,
    ImagePart,
    Job,
    Lease,
    Message,
    OutputStart,
    Pixels,
    Prepared,
    Refused,
    Rejected,
    Segmenting,
    TextPart,
    Usage,
    VideoPart,
)
from server.complaints import invalid
from server.decision_models import Decision
from server.decisions import OPTIONS as DECISION_OPTIONS
from server.decisions import decisions_of, questions_of, weighed
from server.dispatcher import sequences_of
from server.faults import rejection
from server.intake import MAX_FPS, messages_of
from server.options.option import SettingsError, nearest
from server.presets import ask_preset, find_preset, load_presets, values_with_preset
from server.request_models import DEFAULT_CLIP_PROMPT, DEFAULT_PROMPT
from server.sampling_rules import sampling_options
from server.settings import MEBIBYTE, OFFLINE_OPTIONS, Settings
from server.subtitles import Cue

if TYPE_CHECKING:
    import PIL.Image
    import torch

Picture: TypeAlias = "str | os.PathLike[str] | bytes | PIL.Image.Image | Clip"
"""A file, an encoded picture, or a Pillow image; or a clip: a video file is known as one by its first bytes."""

_PNG_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_NO_LIMIT: Final = 1 << 40
SESSION: Final = "offline"
"""All requests of one `Beholder` are one session: what it said of a picture helps to guess what it says of the next."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip, where more is to be said of it than its file, or where an animated picture shall be one.

    Attributes:
        source: A file, or encoded bytes.
        fps: Frames a second that are looked at; 0: as the model's own processor does.
        max_frames: Frames that are looked at, at most; 0: likewise.
    """

    source: str | os.PathLike[str] | bytes
    fps: float = 0.0
    max_frames: int = 0


class Caption(msgspec.Struct, frozen=True):
    """What was said about one request, what it cost, and how long it took."""

    text: str
    finish_reason: str
    images: list[ImageInfo]
    usage: Usage
    image_decode_ms: float
    preprocess_ms: float
    ttft_ms: float
    total_ms: float
    clips: list[ClipInfo] = msgspec.field(default_factory=list)


class _Running:
    """One request in the engine, and the deltas that nobody has taken yet."""

    def __init__(self, request_id: str, prepared: Prepared, started_s: float) -> None:
        self.request_id = request_id
        self.prepared = prepared
        self.started_s = started_s
        self.first_token_s: float | None = None
        self.deltas: deque[Delta] = deque()
        self.text: list[str] = []
        self.last: Delta | None = None

    def put(self, delta: Delta) -> None:
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = time.monotonic()
        if delta.text:
            self.text.append(delta.text)
        if delta.finish_reason is not None:
            self.last = delta
        self.deltas.append(delta)

    def caption(self) -> Caption:
        """The finished answer. Raises what made it fail."""
        assert self.last is not None
        if self.last.error is not None:
            raise rejection(self.last.error)
        if self.last.usage is None or self.last.finish_reason is None:
            raise ServiceError("This Beholder was closed before the answer was whole.", code="closed")
        now = time.monotonic()
        return Caption(
            text="".join(self.text),
            finish_reason=self.last.finish_reason,
            images=self.prepared.images,
            usage=self.last.usage,
            image_decode_ms=self.prepared.decode_ms,
            preprocess_ms=self.prepared.preprocess_ms,
            ttft_ms=((self.first_token_s or now) - self.started_s) * 1e3,
            total_ms=(now - self.started_s) * 1e3,
            clips=self.prepared.clips,
        )


class Beholder:
    """A model, loaded and ready to look at pictures.

    Requests that run at the same time share the engine's steps, from whichever thread they come.

    Args:
        model: Folder or hub name; None takes the bundled model.
        settings: All options at once, instead of the two others.
        **options: Options of `beholder caption`, such as ``threads=4``.

    Raises:
        SettingsError: An option is unknown, has no use without a server, or has a value that cannot be.
        ServiceError: The model folder cannot be used.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, settings: Settings | None = None, **options: object
    ) -> None:
        for name in options:
            if name not in OFFLINE_OPTIONS:
                raise SettingsError(f"Unknown option {name}.{nearest(name, list(OFFLINE_OPTIONS))}")
        if settings is None:
            settings = Settings.load({"model": None if model is None else os.fspath(model), **options})
        elif model is not None or options:
            raise SettingsError("Either `settings` or single options can be given, not both")
        self.settings = settings.resolve_model()
        load_presets(self.settings.presets)  # a broken file is refused now

        from engine.core import Engine  # imports torch
        from engine.limits import with_vision_cache
        from engine.load import load_runner
        from preprocess.detokenise import Detokenizer
        from preprocess.prepare import Preparer

        config = msgspec.structs.replace(
            self.settings.engine_config(), max_waiting=_NO_LIMIT, max_waiting_tokens=_NO_LIMIT
        )
        self._preparer = Preparer(self.settings.preprocess_config(), None)
        runner = load_runner(config)
        self._engine = Engine(with_vision_cache(config, runner), runner)
        self._preparer.limit_context(self._engine.max_context)
        self._detokenizer = Detokenizer(config.model)
        self._running: dict[str, _Running] = {}
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Beholder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every running request: whoever waits for one, in another thread, gets an error. What was loaded is freed
        with this object.
        """
        with self._lock:
            self._closed = True
            self._engine.reset()
            self._detokenizer.reset()
            for running in self._running.values():
                running.put(Delta(running.request_id, "", [], finish_reason="abort"))
            self._running.clear()

    # ---- what people call --------------------------------------------------------------------------------------------

    def caption(self, picture: Picture | Sequence[Picture], prompt: str | None = None, **sampling: object) -> Caption:
        """Describe one picture or clip, or several together.

        Args:
            picture: A file, encoded bytes, a Pillow image or a `Clip`; a list of them is looked at together.
            prompt: What to ask; by default for a description.
            **sampling: `max_tokens`, `temperature`, `seed`, `stop` and the other sampling fields of the HTTP interface;
                `response_format` (a pydantic model too) and `structured_outputs`; `preset`.

        Raises:
            ClientError: The picture or a field cannot be served.
        """
        return self._finish(self._submit(*self._asked(picture, prompt, sampling)))

    def chat(self, messages: Sequence[Mapping[str, object]], **sampling: object) -> Caption:
        """Answer a conversation.

        Args:
            messages: As in OpenAI's chat completions; besides, a part ``{"type": "image", "image": …}`` takes whatever
                `caption` takes, and so does ``{"type": "video", "video": …}`` for clips.
            **sampling: As for `caption`.
        """
        turns = messages_of(_with_data_urls(messages, self._max_bytes), self.settings)
        values = dict(sampling)
        name = values.pop("preset", None)
        if name is not None:
            preset = find_preset(str(name), self.settings.presets)
            turns, values = ask_preset(turns, preset), values_with_preset(values, preset)
        return self._finish(self._submit(turns, sampling_options(values)))

    def decide(
        self,
        picture: Picture | Sequence[Picture],
        questions: Sequence[str | Mapping[str, object]],
        *,
        context: str = "",
    ) -> list[Decision]:
        """Answer typed questions with probabilities, without writing anything.

        Args:
            picture: As for `caption`.
            questions: Yes/no questions as strings, or dictionaries as in `POST /v1/decisions`.
            context: What the model is told before each question.
        """
        checked = questions_of(questions)
        message = _question(picture, f"{context}\n" if context else "", self._max_bytes)[0]
        content = message.content if context else message.content[:-1]
        started_s = time.monotonic()
        request_id = f"offline-{next(self._serial)}"
        job = Job(
            request_id,
            [Message("user", content)],
            DECISION_OPTIONS,
            Lease(),
            started_s,
            questions=[weighed(question) for question in checked],
        )
        prepared = self._prepare(job)
        running: list[_Running] = []
        scores: dict[int, list[float]] = {}
        try:
            for index, sequence in enumerate(sequences_of(prepared, 1)):
                wanted = msgspec.structs.replace(sequence, request_id=f"{request_id}.{index}")
                running.append(self._start(prepared, wanted, started_s))
            while any(item.last is None for item in running):
                self._step()
            for index, item in enumerate(running):
                item.caption()  # raises what made it fail
                for delta in item.deltas:
                    for token in delta.logprobs:
                        scores[index] = [logprob for _, _, logprob in token.top]
        finally:
            for item in running:
                self._cancel(item)
        return decisions_of(checked, prepared.branches, scores)

    def timed_captions(
        self,
        clip: str | os.PathLike[str] | bytes | Clip,
        prompt: str | None = None,
        *,
        segment_s: float = 0.0,
        **sampling: object,
    ) -> list[Cue]:
        """Describe a clip part by part; all parts run side by side.

        Args:
            clip: A file, encoded bytes or a `Clip`.
            prompt: What to ask about each part; by default for a description.
            segment_s: How long each part is, in seconds; 0: by the length of the clip.
            **sampling: As for `caption`.

        Returns:
            What is said of which time; `server.subtitles` makes files of it.
        """
        part = _video_part(clip if isinstance(clip, Clip) else Clip(clip), self._max_bytes)
        prompt, options = self._prompt_and_options(prompt, sampling)
        messages = [Message("user", [part, TextPart(DEFAULT_CLIP_PROMPT if prompt is None else prompt)])]
        running = self._submit_all(messages, options, Segmenting(segment_s))
        try:
            while any(item.last is None for item in running):
                self._step()
        finally:
            for item in running:
                self._cancel(item)
        times = running[0].prepared.segments
        return [Cue(*pair, item.caption().text.strip()) for pair, item in zip(times, running, strict=True)]

    def stream(
        self, picture: Picture | Sequence[Picture], prompt: str | None = None, **sampling: object
    ) -> Iterator[str]:
        """Like `caption`, but gives the text piece by piece. Closing the iterator stops the work.

        Refusals are raised here, before the first piece is asked for.
        """
        return self._pieces(self._submit(*self._asked(picture, prompt, sampling)))

    def caption_all(
        self, pictures: Iterable[Picture], prompt: str | None = None, **sampling: object
    ) -> Iterator[Caption | BeholderError]:
        """Describe many pictures, as many at once as the engine runs, and give the answers in order as they are ready.

        One picture that cannot be served does not stop the others: its place holds the error.
        """
        prompt, options = self._prompt_and_options(prompt, sampling)
        waiting = iter(pictures)
        running: deque[_Running | BeholderError] = deque()
        exhausted = False
        try:
            while True:
                while not exhausted and self._num_active(running) < self.settings.max_running:
                    picture = next(waiting, None)
                    if picture is None:
                        exhausted = True
                        break
                    try:
                        running.append(self._submit(_question(picture, prompt, self._max_bytes), options))
                    except BeholderError as error:
                        running.append(error)
                    self._step()  # those that run need not wait until all are prepared
                while running and (isinstance(running[0], BeholderError) or running[0].last is not None):
                    yield _outcome(running.popleft())
                if exhausted and not running:
                    return
                self._step()
        finally:
            for left in running:
                if isinstance(left, _Running):
                    self._cancel(left)

    def _asked(
        self, picture: Picture | Sequence[Picture], prompt: str | None, sampling: Mapping[str, object]
    ) -> tuple[list[Message], GenerationOptions]:
        prompt, options = self._prompt_and_options(prompt, sampling)
        return _question(picture, prompt, self._max_bytes), options

    def _prompt_and_options(
        self, prompt: str | None, sampling: Mapping[str, object]
    ) -> tuple[str | None, GenerationOptions]:
        """What a caption asks, with the preset that it names."""
        values = dict(sampling)
        name = values.pop("preset", None)
        if name is None:
            return prompt, sampling_options(values)
        preset = find_preset(str(name), self.settings.presets)
        return preset.prompt_for(prompt), sampling_options(values_with_preset(values, preset))

    # ---- the stages --------------------------------------------------------------------------------------------------

    def _submit(self, messages: list[Message], options: GenerationOptions) -> _Running:
        return self._submit_all(messages, options)[0]

    def _submit_all(
        self, messages: list[Message], options: GenerationOptions, segmenting: Segmenting | None = None
    ) -> list[_Running]:
        """One request, or one for each part of a clip."""
        started_s = time.monotonic()
        request_id = f"offline-{next(self._serial)}"
        job = Job(request_id, messages, options, Lease(), started_s, session_id=SESSION, segmenting=segmenting)
        prepared = self._prepare(job)
        submitted: list[_Running] = []
        try:
            for index, request in enumerate(sequences_of(prepared, 1)):
                wanted = msgspec.structs.replace(request, request_id=f"{request_id}.{index}")
                submitted.append(self._start(prepared, wanted, started_s))
        except BeholderError:
            for running in submitted:
                self._cancel(running)
            raise
        return submitted

    def _prepare(self, job: Job) -> Prepared:
        prepared = self._preparer.prepare(job)
        if isinstance(prepared, Refused):
            raise rejection(prepared)
        return prepared

    def _start(self, prepared: Prepared, request: EngineRequest, started_s: float) -> _Running:
        running = _Running(request.request_id, prepared, started_s)
        with self._lock:
            if self._closed:
                raise ServiceError("This Beholder was closed; make another one.", code="closed")
            admission = self._engine.submit(request, _pixels)
            if isinstance(admission, Rejected):
                raise rejection(admission)
            self._running[request.request_id] = running
        return running

    def _step(self) -> None:
        """One engine step for all requests; what it made goes to those that it belongs to."""
        with self._lock:
            for output in self._engine.step():
                if isinstance(output, OutputStart):
                    self._detokenizer.start(output)
                    continue
                deltas, stops = self._detokenizer.feed(output)
                for stop in stops:
                    self._engine.stop(stop.request_id, stop.num_tokens)
                for delta in deltas:
                    running = self._running.get(delta.request_id)
                    if running is not None:
                        running.put(delta)
                        if running.last is not None:
                            del self._running[delta.request_id]

    def _finish(self, running: _Running) -> Caption:
        try:
            while running.last is None:
                self._step()
        finally:
            self._cancel(running)
        return running.caption()

    def _pieces(self, running: _Running) -> Iterator[str]:
        try:
            while True:
                while running.deltas:
                    text = running.deltas.popleft().text
                    if text:
                        yield text
                if running.last is not None:
                    break
                self._step()
        finally:
            self._cancel(running)
        running.caption()  # raises what made it fail

    def _cancel(self, running: _Running) -> None:
        """Stop a request that has not finished; its memory is free after the next step."""
        with self._lock:
            if self._running.pop(running.request_id, None) is None:
                return
            self._engine.abort(running.request_id)
        self._step()

    @property
    def _max_bytes(self) -> int:
        """Of an encoded picture or clip: which of the two a file is, it tells when it has been read."""
        return int(max(self.settings.max_image_mb, self.settings.max_video_mb) * MEBIBYTE)

    @staticmethod
    def _num_active(running: Iterable[_Running | BeholderError]) -> int:
        return sum(isinstance(item, _Running) and item.last is None for item in running)


def _outcome(item: _Running | BeholderError) -> Caption | BeholderError:
    if isinstance(item, BeholderError):
        return item
    try:
        return item.caption()
    except BeholderError as error:
        return error


def _pixels(pixels: Pixels) -> torch.Tensor:
    """uint8 (tiles, height, width, 3)."""
    import torch

    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)


# ---- what people give -----------------------------------------------------------------------------------------------


def _question(picture: Picture | Sequence[Picture], prompt: str | None, max_bytes: int) -> list[Message]:
    pictures = picture if isinstance(picture, (list, tuple)) else [picture]
    if not pictures:
        raise ClientError("There is no picture; expected at least one.", code="image_missing", param="picture")
    parts = [_media_part(item, max_bytes) for item in pictures]
    if prompt is None:
        prompt = DEFAULT_CLIP_PROMPT if any(isinstance(part, VideoPart) for part in parts) else DEFAULT_PROMPT
    if not isinstance(prompt, str):
        raise invalid("prompt", f"`prompt` is of type {type(prompt).__name__}; expected a string.")
    return [Message("user", [*parts, TextPart(prompt)])]


def _media_part(item: object, max_bytes: int) -> ImagePart | VideoPart:
    if isinstance(item, Clip):
        return _video_part(item, max_bytes)
    data = _encoded(item, max_bytes)
    return VideoPart(data=data) if is_video(data[:64]) else ImagePart(data=data)


def _video_part(clip: Clip, max_bytes: int) -> VideoPart:
    if not (0 <= clip.fps <= MAX_FPS and clip.max_frames >= 0):
        raise ClientError(
            f"fps {clip.fps:g} and max_frames {clip.max_frames}: expected 0 to {MAX_FPS} and nothing below 0.",
            code="invalid_value",
        )
    return VideoPart(data=_encoded(clip.source, max_bytes), fps=clip.fps, max_frames=clip.max_frames)


def _encoded(picture: object, max_bytes: int) -> bytes:
    """The bytes of a picture in a file format; of a file at most one more than `max_bytes`, which is then refused for
    its size (a device such as /dev/zero never ends).

    Raises:
        ClientError: The file cannot be read, or it is no picture at all.
    """
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return bytes(picture)
    if isinstance(picture, (str, os.PathLike)):
        try:
            with open(picture, "rb") as opened:
                return opened.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a possible file name"
            raise ClientError(f"{os.fspath(picture)!r} cannot be read: {reason}.", code="image_unreadable") from None
    import PIL.Image

    if not isinstance(picture, PIL.Image.Image):
        raise ClientError(
            f"A {type(picture).__name__} is no picture; expected a file name, encoded bytes or a Pillow image.",
            code="image_unreadable",
        )
    file = io.BytesIO()
    picture = _upright(picture)
    shown = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
    shown.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _upright(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Turned as its EXIF data says; where those are damaged, as it is."""
    import PIL.ImageOps

    try:
        return PIL.ImageOps.exif_transpose(picture)
    except Exception:  # EXIF comes from a file: reading it may raise anything
        return picture


def _with_data_urls(messages: Sequence[Mapping[str, object]], max_bytes: int) -> list[Any]:
    """The messages with every ``{"type": "image"}`` or ``"video"`` part as the URL part that it stands for."""
    return [
        {**message, "content": [_as_url(part, max_bytes) for part in content]}
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


_URL_FIELDS: Final = {"image": ("detail",), "video": ("fps", "max_frames")}


def _as_url(part: object, max_bytes: int) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _URL_FIELDS or set(part) - {"type", kind, *_URL_FIELDS[kind]}:
        return part
    data = base64.b64encode(_encoded(part.get(kind), max_bytes)).decode()
    fields = {name: part[name] for name in _URL_FIELDS[kind] if name in part}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:application/octet-stream;base64,{data}", **fields}}
