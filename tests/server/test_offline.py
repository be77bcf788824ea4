"""The Python API on a tiny model: the same answers alone, streamed and batched."""

from __future__ import annotations

import io
import itertools
import threading

import pytest
from PIL import Image

import beholder as api
from beholder import BeholderError, Caption, ClientError, ServiceError, SettingsError

GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def picture(seed, size=(48, 32)):
    colours = [(seed * 40 + x * 5 + y * 3) % 256 for y in range(size[1]) for x in range(size[0])]
    image = Image.new("L", size)
    image.putdata(colours)
    return image.convert("RGB")


def encoded(image, form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def beholder(tiny_model):
    with api.Beholder(tiny_model, dtype="float32", threads=1) as beholder:
        yield beholder
        assert not beholder._running
        beholder._engine.check()


def test_files_bytes_and_images_are_the_same_picture(beholder, tmp_path):
    image = picture(1)
    file = tmp_path / "a.png"
    file.write_bytes(encoded(image))
    answers = [beholder.caption(source, **GREEDY) for source in (file, str(file), encoded(image), image, [image])]
    assert len({answer.text for answer in answers}) == 1
    first = answers[0]
    assert (first.images[0].width, first.images[0].height) == (48, 32)
    assert (first.finish_reason, first.usage.completion_tokens) == ("length", 6)
    assert 0 < first.ttft_ms <= first.total_ms


def test_a_pillow_image_is_turned_as_its_file_is(beholder):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture(1).save(file, "JPEG", exif=exif)
    image = Image.open(io.BytesIO(file.getvalue()))
    sizes = [beholder.caption(source, **GREEDY).images[0] for source in (file.getvalue(), image)]
    assert [(size.width, size.height) for size in sizes] == [(32, 48)] * 2


def test_a_prompt_that_is_no_string_is_refused_by_name(beholder):
    with pytest.raises(api.ClientError, match="`prompt` is of type int"):
        beholder.caption(picture(1), 5)


def test_a_stream_says_the_same(beholder):
    pieces = list(beholder.stream(picture(1), **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == beholder.caption(picture(1), **GREEDY).text


def test_the_same_picture_again_is_a_cache_hit(beholder):
    fresh = beholder.caption(picture(91), **GREEDY)
    again = beholder.caption(picture(91), **GREEDY)
    assert fresh.usage.cached_tokens < again.usage.cached_tokens
    assert again.text == fresh.text


def test_pictures_in_another_order_are_another_question(beholder):
    first, second = picture(1), picture(5, (32, 64))
    there = beholder.caption([first, second], max_tokens=20, temperature=0, ignore_eos=True)
    back = beholder.caption([second, first], max_tokens=20, temperature=0, ignore_eos=True)
    assert [image.width for image in there.images] == [48, 32]
    assert there.text != back.text


def test_chat_and_caption_ask_the_same(beholder):
    image = picture(2)
    parts = [{"type": "image", "image": image, "detail": "auto"}, {"type": "text", "text": "Describe the picture."}]
    chat = beholder.chat([{"role": "user", "content": parts}], **GREEDY)
    assert chat.text == beholder.caption(image, **GREEDY).text
    follow_up = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": chat.text},
        {"role": "user", "content": "More?"},
    ]
    assert beholder.chat(follow_up, **GREEDY).usage.prompt_tokens > chat.usage.prompt_tokens


def test_many_at_once_answer_in_order_as_alone(beholder):
    pictures = [picture(seed) for seed in range(5)]
    alone = [beholder.caption(image, **GREEDY).text for image in pictures]
    steps = beholder._engine.stats().num_steps
    together = list(beholder.caption_all(iter(pictures), **GREEDY))
    assert [answer.text for answer in together] == alone
    assert beholder._engine.stats().num_steps - steps < 5 * 6, "they did not run together"


def test_a_bad_picture_does_not_stop_the_others(beholder):
    good = picture(1)
    answers = list(beholder.caption_all([good, b"no picture", "/nowhere.png", good], **GREEDY))
    assert [type(answer) for answer in answers] == [Caption, ClientError, ClientError, Caption]
    assert "/nowhere.png" in str(answers[2])
    assert "No such file" in str(answers[2])


def test_closing_a_stream_or_a_batch_stops_the_work(beholder):
    endless = {"max_tokens": 60, "ignore_eos": True}
    stream = beholder.stream(picture(1), **endless)
    next(stream)
    batch = beholder.caption_all([picture(seed) for seed in range(4)], max_tokens=3, ignore_eos=True)
    next(batch)
    assert beholder._engine.has_work
    stream.close()
    batch.close()
    beholder.stream(picture(2), **endless).close()  # of which nobody has asked for a word
    assert not beholder._running
    assert not beholder._engine.has_work
    beholder._engine.check()


def test_pictures_that_never_end_and_never_can_be_described_are_answered_as_they_come(beholder):
    answers = beholder.caption_all(itertools.repeat(b"no picture"), **GREEDY)
    assert all(isinstance(next(answers), ClientError) for _ in range(3))
    answers.close()


def test_streams_may_be_read_in_turns_and_in_threads(beholder):
    alone = [beholder.caption(picture(seed), **GREEDY).text for seed in (1, 2)]
    turns = [beholder.stream(picture(seed), **GREEDY) for seed in (1, 2)]
    said = ["", ""]
    for pieces in itertools.zip_longest(*turns, fillvalue=""):
        said = [text + piece for text, piece in zip(said, pieces, strict=True)]
    assert said == alone

    answers = {}
    threads = [
        threading.Thread(target=lambda s=seed: answers.update({s: beholder.caption(picture(s), **GREEDY).text}))
        for seed in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[1], answers[2]] == alone


def test_a_stop_string_ends_the_text(beholder):
    whole = beholder.caption(picture(1), **GREEDY).text
    word = whole[len(whole) // 2 :][:2]
    cut = beholder.caption(picture(1), **GREEDY, stop=word)
    assert cut.text == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I", "I;16", "F", "HSV", "YCbCr"])
def test_pillow_images_of_every_mode_are_taken(beholder, mode):
    image = Image.new(mode, (20, 10)) if mode in {"LA", "I;16", "HSV"} else picture(1, (20, 10)).convert(mode)
    assert beholder.caption(image, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda b: b.caption(picture(1), max_tokens=0), "`max_tokens` is 0"),
        (lambda b: b.caption(picture(1), temprature=1), "Did you mean `temperature`?"),
        (lambda b: b.caption(picture(1), model="x"), "`model` is unknown"),
        (lambda b: b.caption(picture(1), seed="x"), "`seed`: expected `integer | null`, got `string`"),
        (lambda b: b.caption([]), "There is no picture"),
        (lambda b: b.caption(3), "A int is no picture"),
        (lambda b: b.caption("a\0b"), "cannot be read"),
        (lambda b: b.stream(b"junk"), "not a picture"),
        (lambda b: b.chat([]), "`messages` is empty"),
        (lambda b: b.chat([{"role": "bot", "content": "x"}]), "`messages[0].role` is 'bot'"),
        (lambda b: b.chat([{"role": "user", "content": [{"type": "image", "image": 3}]}]), "A int is no picture"),
        (lambda b: b.chat(["x"]), "`messages[0]`"),
    ],
)
def test_what_cannot_be_is_refused_in_words(beholder, ask, says):
    with pytest.raises(ClientError) as refusal:
        ask(beholder)
    assert says in str(refusal.value)
    assert not beholder._running


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 80}, "Unknown option port."),
        ({"thread": 1}, "Unknown option thread. Did you mean threads?"),
        ({"threads": -1}, "--threads: expected a whole number from 0 to 1024, got -1"),
    ],
)
def test_options_without_a_use_are_refused(tiny_model, options, says):
    with pytest.raises(SettingsError) as refusal:
        api.Beholder(tiny_model, **options)
    assert says in str(refusal.value)


def test_a_folder_that_holds_no_usable_model_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(BeholderError) as refusal:
        api.Beholder(tmp_path)
    assert isinstance(refusal.value, ServiceError)
    assert "nothing" in str(refusal.value)


def test_a_file_without_end_is_refused_for_its_size(beholder):
    with pytest.raises(ClientError, match="at most") as caught:
        beholder.caption("/dev/zero")
    assert caught.value.status == 413
