"""A clip, from its file to the words, against transformers on the same frames and the same prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from clips import clip
from tokenizers import Tokenizer

from beholder import Beholder
from preprocess.config import PreprocessConfig
from preprocess.prepare import Preparer
from preprocess.wire import GenerationOptions, Job, Lease, Message, Prepared, TextPart, VideoPart

NEW_TOKENS = 12


@pytest.mark.parametrize("max_frames", [1, 2, 5])
def test_the_words_about_a_clip_are_those_of_transformers(tiny_model: Path, max_frames: int) -> None:
    from transformers import AutoModelForImageTextToText

    data = clip("mp4", 125)
    part = VideoPart(data, max_frames=max_frames)
    messages = [Message("user", [part, TextPart("What happens?")])]
    job = Job("r", messages, GenerationOptions(), Lease(), 0.0)
    prepared = Preparer(PreprocessConfig(str(tiny_model)), None).prepare(job)
    assert isinstance(prepared, Prepared)
    request = prepared.request
    assert len(request.media) == max_frames
    prompt = torch.from_numpy(np.frombuffer(request.prompt_ids, "<i8").copy())[None]
    frames = [np.frombuffer(item.pixels.inline, np.uint8).reshape(item.pixels.shape) for item in request.media]
    pixel_values = (torch.from_numpy(np.concatenate(frames)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        generated = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            pixel_values=pixel_values[None],
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
    words = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode(generated[0, prompt.shape[1] :].tolist())
    question = {"type": "text", "text": "What happens?"}
    content = [{"type": "video", "video": data, "max_frames": max_frames}, question]
    with Beholder(tiny_model, dtype="float32", threads=1) as beholder:
        answer = beholder.chat([{"role": "user", "content": content}], temperature=0, max_tokens=NEW_TOKENS)
    assert answer.text == words
