"""Previews: the pixels are those that a request would bring to the encoder, and no model runs for them."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clips import clip
from PIL import Image
from serving import Served

from preprocess.config import PreprocessConfig
from preprocess.errors import ClientError
from preprocess.prepare import Preparer
from preprocess.wire import (
    ChildState,
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    Message,
    Prepared,
    Preview,
    Previewed,
    VideoPart,
)
from preprocess.wire.framing import job_of
from server.dispatcher import Dispatcher

CLIP = clip("mp4", 100)  # 4 s


def picture(size: tuple[int, int] = (100, 60), orientation: int = 1) -> bytes:
    """A smooth picture, red to the left, so that turning it shows."""
    across = np.linspace(255, 0, size[0])[None, :].repeat(size[1], 0)
    down = np.linspace(0, 255, size[1])[:, None].repeat(size[0], 1)
    image = Image.fromarray(np.stack([across, down, np.full_like(across, 90)], -1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = io.BytesIO()
    image.save(encoded, "PNG", exif=exif)
    return encoded.getvalue()


def pixels(tile: dict[str, Any]) -> np.ndarray:
    kind, _, data = tile["url"].partition(",")
    assert kind == "data:image/webp;base64"
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=int)
    assert image.shape == (tile["height"], tile["width"], 3)
    return image


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, workers=1, threads=1) as served:
        yield served


def encoder_input(tiny_model: Path, part: ImagePart | VideoPart) -> list[np.ndarray]:
    """What a request with this part brings to the encoder."""
    job = Job("r1", [Message("user", [part])], GenerationOptions(max_tokens=1), Lease(), 0.0)
    prepared = Preparer(PreprocessConfig(str(tiny_model)), None).prepare(job)
    assert isinstance(prepared, Prepared)
    arrays = [np.frombuffer(item.pixels.inline, np.uint8).reshape(item.pixels.shape) for item in prepared.request.media]
    return [tile.astype(int) for array in arrays for tile in array]


@pytest.mark.parametrize("detail", ["low", "high"])
def test_tiles_are_what_the_encoder_gets(served: Served, tiny_model: Path, detail: Any) -> None:
    data = picture(orientation=6)
    shown = served.client.post("/v1/previews", files={"file": ("a.png", data)}, data={"detail": detail}).json()
    assert (shown["image"]["width"], shown["image"]["height"]) == (60, 100), "turned by its EXIF orientation"
    wanted = encoder_input(tiny_model, ImagePart(data=data, detail=detail))
    places = [(tile["row"], tile["column"]) for tile in shown["tiles"]]
    grid = [(row, column) for row in range(1, shown["rows"] + 1) for column in range(1, shown["columns"] + 1)]
    assert places == [*grid, (0, 0)]
    assert len(places) == len(wanted) == (1 if detail == "low" else shown["rows"] * shown["columns"] + 1)
    for tile, array in zip(shown["tiles"], wanted, strict=True):
        assert np.abs(pixels(tile) - array).mean() < 4
    assert shown["image"]["num_tokens"] % len(places) == 0


def test_frames_are_what_the_encoder_gets(served: Served, tiny_model: Path) -> None:
    shown = served.client.post("/v1/previews", files={"video": ("a.mp4", CLIP)}, data={"max_frames": "3"}).json()
    wanted = encoder_input(tiny_model, VideoPart(data=CLIP, max_frames=3))
    assert [frame["time_s"] for frame in shown["frames"]] == shown["clip"]["frame_times_s"]
    assert len(shown["frames"]) == len(wanted) == 3
    for frame, array in zip(shown["frames"], wanted, strict=True):
        assert np.abs(pixels(frame) - array).mean() < 6


def test_every_way_to_send_a_picture_shows_the_same(served: Served) -> None:
    data = picture()
    client = served.client
    as_form = client.post("/v1/previews", files={"file": ("a.png", data)}).json()
    as_body = client.post("/v1/previews", content=data, headers={"content-type": "image/png"}).json()
    as_json = client.post("/v1/previews", json={"image": base64.b64encode(data).decode()}).json()
    upload = client.post("/v1/images", content=data, headers={"content-type": "image/png"}).json()["id"]
    by_id = client.post("/v1/previews", json={"image": upload}).json()
    assert as_form == as_body == as_json == by_id
    assert as_form["object"] == "preview"


def test_the_engine_does_nothing_for_a_preview(served: Served) -> None:
    before = served.metric("vllm:mm_cache_queries_total")
    assert served.client.post("/v1/previews", files={"file": ("a.png", picture((7, 9)))}).status_code == 200
    assert served.metric("vllm:mm_cache_queries_total") == before


@pytest.mark.parametrize(
    ("request_fields", "status", "code", "param"),
    [
        ({"files": {"file": ("a.png", b"no picture")}}, 400, "image_format_unsupported", "file"),
        ({"files": {"file": ("a.png", b"\x89PNG\r\n\x1a\nbroken")}}, 400, "image_truncated", "file"),
        ({"json": {}}, 400, "image_missing", "image"),
        ({"json": {"image": "file-" + "0" * 32}}, 404, "image_not_found", "image"),
        ({"json": {"image": "AAAA", "video": "AAAA"}}, 400, "too_many_images", "video"),
        ({"json": {"image": "AAAA", "prompt": "?"}}, 400, "unknown_parameter", "prompt"),
        ({"json": {"image": "AAAA", "fps": 2}}, 400, "invalid_value", "fps"),
        ({"json": {"image": "https://example.org/a.png"}}, 400, "remote_url_not_supported", "image"),
        ({"json": {"image": "AAAA"}, "params": {"detail": "low"}}, 400, "invalid_value", "detail"),
        ({"files": {"file": ("a.png", b"x")}, "data": {"temperature": "1"}}, 400, "unknown_parameter", "temperature"),
        ({"files": {"file": ("a.png", b"x")}, "data": {"detail": "huge"}}, 400, "invalid_value", "detail"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type", None),
    ],
)
def test_refusals_name_the_field(
    served: Served, request_fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = served.client.post("/v1/previews", **request_fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error["message"]


def test_usage_tells_of_each_picture_what_was_cached(served: Served) -> None:
    def part(data: bytes) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    def ask(*pictures: bytes) -> list[dict[str, int]]:
        content = [*map(part, pictures), {"type": "text", "text": "What?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "ignore_eos": True}
        answer = served.client.post("/v1/chat/completions", json=body)
        details = answer.json()["usage"]["prompt_tokens_details"]
        media: list[dict[str, int]] = details["media"]
        assert sum(item["num_tokens"] for item in media) == details["image_tokens"]
        return media

    first, second = picture((31, 30)), picture((30, 33))
    assert ask(first) == [{"num_tokens": 4, "cached_tokens": 0}]
    assert ask(first, second) == [{"num_tokens": 4, "cached_tokens": 4}, {"num_tokens": 4, "cached_tokens": 0}]
    assert ask(second, first)[0]["cached_tokens"] == 0, "a picture is in the cache behind what stood before it"


# ---- the dispatcher's side ------------------------------------------------------------------------------------------


def test_a_preview_that_kills_its_worker_twice_is_refused_and_leaves_nothing() -> None:
    async def story() -> None:
        import msgspec

        sent: list[Preview] = []

        def send(name: str, *frames: bytes) -> None:
            if name.startswith("worker"):
                job = job_of(frames)
                assert isinstance(job, Preview)
                sent.append(job)

        dispatcher = Dispatcher(
            send, num_workers=1, arena_size=1 << 16, pixel_bytes_per_image=1, max_waiting=4, max_waiting_bytes=1 << 20
        )

        def tell(message: msgspec.Struct) -> None:
            dispatcher.receive(msgspec.msgpack.encode(message))

        tell(ChildState("preprocess", 0, up=True))
        asked = asyncio.ensure_future(dispatcher.preview(ImagePart(data=b"evil")))
        await asyncio.sleep(0)
        for generation in (1, 2):
            tell(ChildState("preprocess", 0, up=False, reason="signal SIGSEGV"))
            tell(ChildState("preprocess", 0, up=True, generation=generation))
        with pytest.raises(ClientError, match="could not be decoded safely") as refused:
            await asked
        assert (refused.value.status, refused.value.code) == (422, "image_undecodable")
        assert [preview.part for preview in sent] == [ImagePart(data=b"evil")] * 2

        left = asyncio.ensure_future(dispatcher.preview(ImagePart(data=b"slow")))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        tell(Previewed(sent[-1].request_id, []))
        assert (dispatcher.num_open, dispatcher.arena_bytes_used) == (0, 0)

    asyncio.run(story())
