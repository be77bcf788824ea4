"""Whole jobs: pixels in the arena or inline, digests, spans, limits, and refusals that name the field at fault."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pictures import encode, smooth
from PIL import Image

from preprocess.arena import Arena
from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.errors import ServiceError
from preprocess.prepare import Preparer, max_pixel_bytes_per_image
from preprocess.wire import (
    Detail,
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    MediaItem,
    Message,
    Pixels,
    Prepared,
    Refused,
    TextPart,
)

Prepare = Callable[..., Prepared | Refused]

PHOTO = encode(smooth(320, 240), "JPEG")
OTHER = encode(smooth(200, 300, seed=1), "PNG")


def user(*parts: str | bytes, detail: Detail = "auto") -> list[Message]:
    """One user turn of text and pictures."""
    content = [TextPart(part) if isinstance(part, str) else ImagePart(part, detail=detail) for part in parts]
    return [Message("user", content)]


def prepared(answer: Prepared | Refused) -> Prepared:
    assert isinstance(answer, Prepared), answer
    return answer


def refused(answer: Prepared | Refused) -> Refused:
    assert isinstance(answer, Refused), answer
    return answer


def prompt_ids(answer: Prepared) -> list[int]:
    ids: list[int] = np.frombuffer(answer.request.prompt_ids, "<i8").tolist()
    return ids


def pixels_of(pixels: Pixels, arena: Arena | None = None) -> np.ndarray:
    size = int(np.prod(pixels.shape))
    data = pixels.inline or (bytes(arena.view(pixels.offset, size)) if arena else b"")
    return np.frombuffer(data, np.uint8).reshape(pixels.shape)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(1 << 20) as arena:
        yield arena


def job(messages: list[Message], lease: Lease = Lease(), **options: object) -> Job:  # noqa: B008 (frozen)
    return Job("r7", messages, GenerationOptions(**options), lease, 12.5, "camera-1", 3)  # type: ignore[arg-type]


def test_a_job_becomes_a_request(preparer: Preparer) -> None:
    answer = prepared(preparer.prepare(job(user(PHOTO, "What is this?"), max_tokens=20, stop=["x"], min_tokens=2)))
    request = answer.request
    assert (answer.request_id, request.request_id) == ("r7", "r7")
    assert (request.arrival_s, request.session_id, request.priority) == (12.5, "camera-1", 3)
    assert (request.text.stop, request.text.min_tokens) == (["x"], 2)
    assert (request.sampling.max_tokens, request.sampling.stop_token_ids) == (20, [6, 2])
    info = answer.images[0]
    assert (info.width, info.height, info.num_tokens) == (320, 240, 4)
    assert info.sha256 == hashlib.sha256(PHOTO).hexdigest()
    ids = prompt_ids(answer)
    item = request.media[0]
    assert item.num_tokens == 4 == ids.count(3)
    assert all(ids[start : start + length] == [3] * length for start, length in item.spans)
    assert 0 < answer.decode_ms <= answer.preprocess_ms


def test_text_alone(prepare: Prepare) -> None:
    answer = prepared(prepare(user("Hello")))
    assert (answer.request.media, answer.images, answer.arena_bytes) == ([], [], 0)


def test_bytes_and_a_data_url_are_the_same(prepare: Prepare) -> None:
    url = "data:image/gif;base64," + base64.b64encode(PHOTO).decode()  # a wrong type does not matter
    one = prepared(prepare(user(PHOTO)))
    two = prepared(prepare([Message("user", [ImagePart(data_url=url)])]))
    assert one.request.media == two.request.media
    assert one.images == two.images


def test_pixels_go_into_the_lease_and_are_the_same_inline(tiny_model: Path, arena: Arena) -> None:
    preparer = Preparer(PreprocessConfig(str(tiny_model)), arena)
    messages = user(PHOTO, "and", OTHER, detail="high")
    inline = prepared(preparer.prepare(job(messages)))
    assert inline.arena_bytes == 0
    lease = Lease(640, preparer.lease_bytes(2))
    shared = prepared(preparer.prepare(job(messages, lease)))
    assert 0 < shared.arena_bytes <= lease.size
    for one, two in zip(inline.request.media, shared.request.media, strict=True):
        assert (one.digest, one.spans) == (two.digest, two.spans)
        assert two.pixels.inline == b""
        assert two.pixels.offset % 64 == 0
        assert lease.offset <= two.pixels.offset < lease.offset + shared.arena_bytes
        assert np.array_equal(pixels_of(one.pixels), pixels_of(two.pixels, arena))
    assert bytes(arena.view(0, 640)) == bytes(640)


def test_what_does_not_fit_into_the_lease_goes_inline(tiny_model: Path, arena: Arena) -> None:
    preparer = Preparer(PreprocessConfig(str(tiny_model)), arena)
    answer = prepared(preparer.prepare(job(user(PHOTO, OTHER, PHOTO), Lease(64, 2 * 32 * 32 * 3))))
    where = [bool(item.pixels.inline) for item in answer.request.media]
    assert where == [False, False, True]
    assert answer.arena_bytes == 2 * 32 * 32 * 3


def test_the_bound_of_a_lease_holds_for_every_picture(tiny_model: Path) -> None:
    config = PreprocessConfig(str(tiny_model))
    preparer = Preparer(config, None)
    assert preparer.lease_bytes(1) == max_pixel_bytes_per_image(config)
    for size in [(1, 1), (500, 500), (500, 499), (20, 900), (900, 20), (128, 128)]:
        answer = prepared(preparer.prepare(job(user(encode(Image.new("RGB", size)), detail="high"))))
        assert len(answer.request.media[0].pixels.inline) <= preparer.lease_bytes(1)


def test_the_digest_names_bytes_and_options(tiny_model: Path, prepare: Prepare) -> None:
    def digest(answer: Prepared | Refused) -> bytes:
        item: MediaItem = prepared(answer).request.media[0]
        assert len(item.digest) == 32
        return item.digest

    exact = Preparer(PreprocessConfig(str(tiny_model), exact_decode=True), None)
    again = digest(prepare(user(PHOTO, "text"), temperature=0.5))
    low, high = (digest(prepare(user(PHOTO, detail=detail))) for detail in ("low", "high"))
    assert digest(prepare(user(PHOTO))) == again == low
    assert len({again, high, digest(prepare(user(OTHER))), digest(exact.prepare(job(user(PHOTO))))}) == 4


def test_pictures_keep_the_clients_order_in_any_turn(prepare: Prepare) -> None:
    messages = [
        Message("system", [TextPart("Look."), ImagePart(OTHER)]),
        Message("user", [TextPart("a"), ImagePart(PHOTO), TextPart("b"), ImagePart(OTHER)]),
        Message("assistant", [TextPart("c")]),
        Message("user", [ImagePart(PHOTO), TextPart("d")]),
    ]
    answer = prepared(prepare(messages))
    assert [info.width for info in answer.images] == [200, 320, 200, 320]
    starts = [item.spans[0][0] for item in answer.request.media]
    assert starts == sorted(starts)
    media = answer.request.media
    assert media[0].digest == media[2].digest != media[1].digest == media[3].digest


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_bad_picture_is_named_by_its_place(prepare: Prepare) -> None:
    answer = refused(prepare([*user(PHOTO), Message("user", [TextPart("x"), ImagePart(b"<html></html>")])]))
    assert (answer.request_id, answer.status, answer.code) == ("r1", 400, "image_format_unsupported")
    assert answer.param == "messages[1].content[1]"


def test_limits_are_the_configurations(tiny_model: Path) -> None:
    limits = MediaLimits(max_images=2, max_image_bytes=len(OTHER) - 1, max_image_pixels=320 * 240)
    preparer = Preparer(PreprocessConfig(str(tiny_model), limits), None)
    answer = refused(preparer.prepare(job(user(PHOTO, PHOTO, PHOTO))))
    assert (answer.code, answer.status) == ("too_many_images", 400)
    assert "3 pictures; at most 2" in answer.message
    answer = refused(preparer.prepare(job(user(OTHER))))
    assert (answer.code, answer.status) == ("image_too_large", 413)


def test_prompt_and_answer_must_fit_the_context(tiny_model: Path, prepare: Prepare) -> None:
    answer = refused(prepare(user(PHOTO, "hi"), max_tokens=1020))
    assert (answer.code, answer.param) == ("context_length_exceeded", "max_tokens")
    count = prepared(prepare(user(PHOTO, "hi"))).request.num_prompt_tokens
    assert f"The prompt has {count} tokens" in answer.message
    assert f"at most {1024 - count:,}" in answer.message
    assert prepared(prepare(user(PHOTO, "hi"), max_tokens=1024 - count)).request.sampling.max_tokens == 1024 - count
    assert prepared(prepare(user(PHOTO, "hi"))).request.sampling.max_tokens == 1024 - count
    small = Preparer(PreprocessConfig(str(tiny_model), max_context=64), None)
    answer = refused(small.prepare(job(user(PHOTO, detail="high"))))
    assert (answer.code, answer.param) == ("context_length_exceeded", "messages")
    assert "context is 64 tokens" in answer.message


def test_a_flood_of_text_is_refused_before_it_is_tokenised(prepare: Prepare) -> None:
    answer = refused(prepare(user("x" * 30_000_000)))
    assert answer.code == "context_length_exceeded"


def test_options_are_checked_here_too(prepare: Prepare) -> None:
    assert refused(prepare(user("x"), temperature=9.0)).param == "temperature"
    assert refused(prepare(user("x"), logit_bias={512: 1.0})).param == "logit_bias"
    assert prepared(prepare(user("x"), logit_bias={511: 1.0})).request.sampling.logit_bias == {511: 1.0}


def test_our_own_faults_are_500_and_say_nothing(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret at 0x7f00")

    monkeypatch.setattr(preparer._prompts, "encode", broken)
    answer = refused(preparer.prepare(job(user("x"))))
    assert (answer.status, answer.code) == (500, "preprocess_failed")
    assert "secret" not in answer.message
    assert "secret" in caplog.text


def test_too_little_memory_is_a_4xx(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(preparer._family, "fill", broken)
    assert refused(preparer.prepare(job(user(PHOTO)))).status == 413


# ---- start ----------------------------------------------------------------------------------------------------------


def test_the_profile(preparer: Preparer) -> None:
    profile = preparer.profile
    assert (profile.family, profile.max_context, profile.vocab_size) == ("smolvlm", 1024, 512)
    assert (profile.eos_ids, profile.image_token_id) == ((6, 2), 3)


def test_exact_decoding_turns_draft_off(tiny_model: Path) -> None:
    data = encode(smooth(1600, 1200), "JPEG")
    draft = prepared(Preparer(PreprocessConfig(str(tiny_model)), None).prepare(job(user(data))))
    exact = prepared(Preparer(PreprocessConfig(str(tiny_model), exact_decode=True), None).prepare(job(user(data))))
    assert draft.images == exact.images
    one, two = (pixels_of(answer.request.media[0].pixels).astype(int) for answer in (draft, exact))
    assert not np.array_equal(one, two)
    assert np.abs(one - two).mean() < 1


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_an_incomplete_folder_ends_the_start(tiny_model: Path, tmp_path: Path, missing: str) -> None:
    for path in tiny_model.iterdir():
        if path.name != missing and path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    with pytest.raises(ServiceError, match="cannot use the model folder"):
        Preparer(PreprocessConfig(str(tmp_path)), None)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json"]
)
def test_a_broken_file_ends_the_start(tiny_model: Path, tmp_path: Path, name: str) -> None:
    for path in tiny_model.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(ServiceError, match="cannot be read"):
        Preparer(PreprocessConfig(str(tmp_path)), None)


def test_no_torch_is_imported(tiny_model: Path) -> None:
    """A worker must start in a moment and stay small."""
    code = (
        "import sys, json\n"
        "import preprocess.arena, preprocess.options\n"
        "from preprocess.config import PreprocessConfig\n"
        "from preprocess.detokenise import Detokenizer\n"
        "from preprocess.prepare import Preparer\n"
        "Preparer(PreprocessConfig(sys.argv[1]), None), Detokenizer(sys.argv[1])\n"
        "print(json.dumps([name for name in ('torch', 'transformers', 'av') if name in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert json.loads(done.stdout) == []
