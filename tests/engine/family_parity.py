"""One family's tiny model in our engine and in transformers, on the same chats.

A chat goes the whole way: files → `Preparer` → `Engine`. transformers gets the same ids, pixels and positions, and
computes every logit in one forward over prompt and answer, with no cache. `tests/engine/parity_table.py` prints how far
the two are apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from clips import clip
from PIL import Image

from engine.batch import SampledToken
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.speculation.lengths import Always
from engine.speculation.replay import Replay
from preprocess.config import PreprocessConfig
from preprocess.prepare import Preparer
from preprocess.wire import (
    EngineRequest,
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    Message,
    Pixels,
    Prepared,
    Refused,
    TextPart,
    TokenEvents,
    VideoPart,
)
from tests.engine.late_results import Late
from tests.goldens.coded_clips import CodedClip

NEW_TOKENS: Final = 12


def picture(content: int, width: int, height: int) -> ImagePart:
    """A PNG of that size."""
    buffer = io.BytesIO()
    Image.fromarray(CodedClip(100, 10, width, height).frame(content)).save(buffer, "PNG")  # type: ignore[arg-type]
    return ImagePart(buffer.getvalue())


def user(*parts: ImagePart | VideoPart | str) -> Message:
    """A user's turn."""
    return Message("user", [TextPart(part) if isinstance(part, str) else part for part in parts])


def said(text: str) -> Message:
    """The model's turn."""
    return Message("assistant", [TextPart(text)])


_MP4: Final = clip("mp4", 60)
_WEBM: Final = clip("webm", 25, size=(96, 128))
_LONG: Final = "The quick brown fox jumps over the lazy dog while others look. " * 12

CASES: Final[dict[str, list[Message]]] = {
    "text only": [user("How many squares are there?")],
    "picture before text": [user(picture(1, 90, 60), "What is in this picture?")],
    "picture after text": [user("What is in this picture?", picture(2, 60, 90))],
    "several pictures": [user(picture(3, 64, 64), "and", picture(4, 30, 100), picture(3, 64, 64), "Compare them.")],
    "pictures in any turn": [
        user(picture(5, 80, 40), "What is this?"),
        said("A chair."),
        user("And this?", picture(6, 33, 31)),
        said("A cat."),
        user("Which one is older?"),
    ],
    "picture after long text": [user(_LONG, picture(7, 90, 60), "What is in this picture?")],
    "clip": [user(VideoPart(_MP4, max_frames=5), "What happens?")],
    "pictures and clips": [
        user(
            picture(8, 50, 60),
            VideoPart(_MP4, max_frames=4),
            "then",
            VideoPart(_WEBM, max_frames=2),
            picture(9, 60, 50),
            "What differs?",
        )
    ],
}
"""Chats by what they show."""


@dataclass(frozen=True)
class Answer:
    """Greedy output of one request: token ids, and the logits (tokens, vocab) that each was chosen by."""

    ids: list[int]
    logits: torch.Tensor


class Checked:
    """A family's tiny model, loaded here and there."""

    def __init__(self, folder: Path, *, kv_tokens: int = 2048) -> None:
        from transformers import AutoModelForImageTextToText

        self.folder = folder
        self.preparer = Preparer(PreprocessConfig(str(folder)), None)
        runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=kv_tokens, max_running=8))
        assert isinstance(runner, TorchRunner)
        self.runner = runner
        self.reference: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.takes_patches = hasattr(self.reference.config.vision_config, "temporal_patch_size")
        self._expected: dict[str, tuple[EngineRequest, Answer]] = {}

    def prepare(self, messages: list[Message], *, max_tokens: int = NEW_TOKENS, name: str = "r") -> Prepared | Refused:
        """A chat as a greedy request."""
        options = GenerationOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.preparer.prepare(Job(name, messages, options, Lease(), 0.0))

    def request(self, case: str, *, max_tokens: int = NEW_TOKENS) -> EngineRequest:
        """A case as a greedy request."""
        prepared = self.prepare(CASES[case], max_tokens=max_tokens, name=case)
        assert isinstance(prepared, Prepared), prepared
        return prepared.request

    def shows(self, case: str) -> bool:
        """Whether the family looks at all that a case shows: clips are not everybody's."""
        has_clip = any(isinstance(part, VideoPart) for message in CASES[case] for part in message.content)
        return not has_clip or self.preparer._family.clips is not None

    # ---- ours --------------------------------------------------------------------------------------------------------

    def engine(
        self,
        *,
        chunk: int,
        prefix_cache: bool = False,
        script: Mapping[str, Sequence[int]] | None = None,
        accuracy: float = 1.0,
        branches: int = 0,
        late: bool = False,
    ) -> Engine:
        """An engine over the loaded model that proves its invariants after every step.

        `script`: it drafts these answers, four tokens a step, each as it stands there with this probability.
        `branches`: it guesses so many of them twice, and twice as many in all. `late`: the model launches, and tells
        its results a step late.
        """
        config = EngineConfig(
            "",
            max_batched_tokens=chunk,
            prefix_cache=prefix_cache,
            check=True,
            max_running=8,
            speculation="none" if script is None else "auto",
        )
        engine = Engine(config, Late(self.runner) if late else self.runner)
        if script is not None:
            engine.speculator.sources = [Replay(script, accuracy, self.runner.vocab_size, branches=branches)]
            engine.speculator.controller = Always(8 if branches else 4)
        return engine

    def answer(
        self,
        request: EngineRequest,
        *,
        chunk: int = 4096,
        retract_after: tuple[int, ...] = (),
        drafts: Sequence[int] | None = None,
    ) -> Answer:
        """What our engine says to a request alone, retracted whenever so many tokens are out, with these `drafts`."""
        engine = self.engine(chunk=chunk, script=None if drafts is None else {request.request_id: drafts})
        logits: list[torch.Tensor] = []
        compute, step = self.runner.logits, self.runner.step

        def record(rows: Any) -> torch.Tensor:
            logits.append(compute(rows))
            return logits[-1]

        def run_step(rows: Any) -> list[SampledToken]:
            num_known = len(logits)
            tokens = step(rows)
            if len(logits) == num_known and any(row.sampling for row in rows):
                record(rows)  # a greedy native step makes them for nobody else
            return tokens

        self.runner.logits, self.runner.step = record, run_step  # type: ignore[method-assign]
        try:
            engine.submit(request, pixels_of)
            ids = run(engine, retract_after=retract_after)[request.request_id]
        finally:
            self.runner.logits, self.runner.step = compute, step  # type: ignore[method-assign]
        assert engine.stats().num_retracted == len(retract_after)
        return Answer(ids, torch.cat(logits))

    # ---- transformers' processor -------------------------------------------------------------------------------------

    def processed(self, case: str) -> tuple[list[int], torch.Tensor]:
        """Ids and pixels that transformers' own processor and chat template make of a case with pictures only."""
        from transformers import Idefics3Processor, PreTrainedTokenizerFast, Qwen2VLProcessor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        turns, images = [], []
        for message in CASES[case]:
            parts: list[dict[str, str]] = []
            for part in message.content:
                if isinstance(part, ImagePart):
                    images.append(Image.open(io.BytesIO(part.data)).convert("RGB"))
                    parts.append({"type": "image"})
                else:
                    assert isinstance(part, TextPart)
                    parts.append({"type": "text", "text": part.text})
            turns.append({"role": message.role, "content": parts})
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if self.takes_patches:
            images_of = Qwen2VLImageProcessorPil.from_pretrained(self.folder)
            made = images_of(images, return_tensors="pt")
            me = SimpleNamespace(image_processor=images_of, image_token="<|image_pad|>")
            for index in range(len(images)):
                shown = Qwen2VLProcessor.replace_image_token(me, made, index)
                text = text.replace("<|image_pad|>", shown.replace("<|image_pad|>", "\0"), 1)
            ids = tokenizer(text.replace("\0", "<|image_pad|>"))["input_ids"]
        else:
            processor = Idefics3Processor(
                Idefics3ImageProcessorPil.from_pretrained(self.folder), tokenizer, image_seq_len=4
            )
            made = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
            ids = made["input_ids"][0].tolist()
        return ids, made["pixel_values"]

    # ---- transformers' model -----------------------------------------------------------------------------------------

    def expected(self, case: str) -> tuple[EngineRequest, Answer]:
        """The request of a case, and transformers' greedy answer to it."""
        if case not in self._expected:
            request = self.request(case)
            ids: list[int] = []
            for _ in range(NEW_TOKENS):
                ids.append(int(self.reference_logits(request, ids)[-1].argmax()))
            self._expected[case] = request, Answer(ids, self.reference_logits(request, ids[:-1]))
        return self._expected[case]

    def reference_logits(self, request: EngineRequest, ids: list[int]) -> torch.Tensor:
        """(len(ids) + 1, vocab): what transformers expects after the prompt and after each of `ids`."""
        prompt = np.frombuffer(request.prompt_ids, "<i8").tolist()
        inputs = {"input_ids": torch.tensor([prompt + ids]), **self.reference_media(request)}
        if request.positions:
            inputs["position_ids"] = all_positions(request, len(prompt) + len(ids))[:, None]
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(**inputs, use_cache=False).logits
        return logits[0, len(prompt) - 1 :]

    def reference_media(self, request: EngineRequest) -> dict[str, torch.Tensor]:
        """A request's pictures and clips as the reference model takes them."""
        items = [pixels_of(item.pixels) for item in request.media]
        if not items:
            return {}
        values = [self.normalised(item) for item in items]
        if not self.takes_patches:
            return {"pixel_values": torch.cat(values)[None]}
        pictures = [value for value in values if len(value) == 1]
        frames = [value for value in values if len(value) > 1]
        media = {}
        if pictures:
            media["pixel_values"], media["image_grid_thw"] = self.patches(pictures)
        if frames:
            media["pixel_values_videos"], media["video_grid_thw"] = self.patches(frames)
        return media

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32 (tiles or frames, 3, height, width)."""
        how = self.preparer.profile.normalisation
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (how.mean, how.std))
        return (pixels.permute(0, 3, 1, 2).float() * how.scale - mean) / std

    def patches(self, items: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Items as the Qwen processors lay patches out, and their grids: a lone frame is taken twice."""
        config = self.reference.config.vision_config
        size, merge, frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        rows, grids = [], []
        for item in items:
            clip = item.expand(frames, -1, -1, -1)
            h, w = clip.shape[2] // size, clip.shape[3] // size
            cut = clip.view(frames, 3, h // merge, merge, size, w // merge, merge, size)
            rows.append(cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(h * w, -1))
            grids.append([1, h, w])
        return torch.cat(rows), torch.tensor(grids)

    def reference_embeddings(self, request: EngineRequest) -> list[torch.Tensor]:
        """What transformers' encoder makes of each item: (tokens, hidden × (1 + taps))."""
        embeddings: list[torch.Tensor] = []
        with torch.inference_mode():
            for item in request.media:
                media = self.reference_media(EngineRequest("", b"", [item], request.sampling, request.text, 0.0))
                if "pixel_values_videos" in media:
                    found = self.reference.get_video_features(*media.values(), return_dict=True)
                else:
                    found = self.reference.get_image_features(*media.values(), return_dict=True)
                made = found.pooler_output
                main = torch.cat(list(made)) if self.takes_patches else made.flatten(0, 1)
                embeddings.append(torch.cat([main, *(getattr(found, "deepstack_features", None) or [])], dim=1))
        return embeddings


def pixels_of(pixels: Pixels) -> torch.Tensor:
    """uint8, of inline bytes."""
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)


def all_positions(request: EngineRequest, length: int) -> torch.Tensor:
    """int64 (3, length): those that the request brings, and all that follow from them."""
    given = torch.from_numpy(np.frombuffer(request.positions, "<i4").reshape(3, -1).astype(np.int64))
    rest = torch.arange(length - given.shape[1]) + given.max() + 1
    return torch.cat([given, rest.expand(3, -1)], dim=1)


def run(
    engine: Engine, *, retract_after: tuple[int, ...] = (), watch: Callable[[Engine], None] | None = None
) -> dict[str, list[int]]:
    """Step until nothing is left: output ids by request. Retracts the first when it has said so many tokens."""
    waiting = list(retract_after)
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        running = engine.scheduler.running
        if waiting and running and len(running[0].output_ids) >= waiting[0]:
            waiting.pop(0)
            engine.scheduler.retract(running[0])
        if watch is not None:
            watch(engine)
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                assert event.error is None, event.error
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
    engine.check()
    return outputs
