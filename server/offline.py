"""The Python API: pictures and clips in, text out, in this process and without a server.

    with Beholder() as beholder:
        print(beholder.caption("cat.jpg").text)

It drives the stages that the server's processes wrap (`server.stages`), so there is no second code path.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import msgspec

from preprocess.errors import BeholderError
from preprocess.wire import GenerationOptions, Job, Lease, Message, Segmenting, TextPart
from server.decision_models import Decision
from server.decisions import OPTIONS as DECISION_OPTIONS
from server.decisions import decisions_of, questions_of, weighed
from server.intake import messages_of
from server.offline_media import Clip, Picture, question_of, video_part, with_data_urls
from server.options.option import SettingsError, nearest
from server.presets import ask_preset, find_preset, load_presets, values_with_preset
from server.request_models import DEFAULT_CLIP_PROMPT
from server.sampling_rules import sampling_options
from server.sequences import sequences_of
from server.settings import MEBIBYTE, OFFLINE_OPTIONS, Settings
from server.stages import Caption, Running, Stages
from server.subtitles import Cue


class Beholder(Stages):
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
        super().__init__(self.settings)

    def __enter__(self) -> Beholder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

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
        turns = messages_of(with_data_urls(messages, self._max_bytes), self.settings)
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
        message = question_of(picture, f"{context}\n" if context else "", self._max_bytes)[0]
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
        running: list[Running] = []
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
        part = video_part(clip if isinstance(clip, Clip) else Clip(clip), self._max_bytes)
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
        pieces = self._pieces(self._submit(*self._asked(picture, prompt, sampling)))
        next(pieces)
        return pieces

    def caption_all(
        self, pictures: Iterable[Picture], prompt: str | None = None, **sampling: object
    ) -> Iterator[Caption | BeholderError]:
        """Describe many pictures, as many at once as the engine runs, and give the answers in order as they are ready.

        One picture that cannot be served does not stop the others: its place holds the error.
        """
        prompt, options = self._prompt_and_options(prompt, sampling)
        waiting = iter(pictures)
        running: deque[Running | BeholderError] = deque()
        exhausted = False
        try:
            while True:
                while not (exhausted or _is_outcome(running)) and self._num_active(running) < self.settings.max_running:
                    picture = next(waiting, None)
                    if picture is None:
                        exhausted = True
                        break
                    try:
                        running.append(self._submit(question_of(picture, prompt, self._max_bytes), options))
                    except BeholderError as error:
                        running.append(error)
                    self._step()  # those that run need not wait until all are prepared
                while _is_outcome(running):
                    yield _outcome(running.popleft())
                if running:
                    self._step()
                elif exhausted:
                    return
        finally:
            for left in running:
                if isinstance(left, Running):
                    self._cancel(left)

    def _asked(
        self, picture: Picture | Sequence[Picture], prompt: str | None, sampling: Mapping[str, object]
    ) -> tuple[list[Message], GenerationOptions]:
        prompt, options = self._prompt_and_options(prompt, sampling)
        return question_of(picture, prompt, self._max_bytes), options

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

    @property
    def _max_bytes(self) -> int:
        """Of an encoded picture or clip: which of the two a file is, it tells when it has been read."""
        return int(max(self.settings.max_image_mb, self.settings.max_video_mb) * MEBIBYTE)

    @staticmethod
    def _num_active(running: Iterable[Running | BeholderError]) -> int:
        return sum(isinstance(item, Running) and item.last is None for item in running)


def _is_outcome(running: Sequence[Running | BeholderError]) -> bool:
    """Whether the first of them has come to its end."""
    return bool(running) and (isinstance(running[0], BeholderError) or running[0].last is not None)


def _outcome(item: Running | BeholderError) -> Caption | BeholderError:
    if isinstance(item, BeholderError):
        return item
    try:
        return item.caption()
    except BeholderError as error:
        return error
