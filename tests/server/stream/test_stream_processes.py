"""Live sessions over real processes and a real engine: reuse of context, still scenes, fairness, deaths, storms."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import struct
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import ENDLESS, PATIENCE_S, Served
from streaming import Camera, framed, picture
from tiny_models import FAMILIES
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    options = {"max_running": 32, "kv_tokens": 32_768, "stream_max_sessions": 200}
    with Served(tiny_model, held=True, dtype="float32", **options) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing(served: Served) -> Iterator[None]:
    """After each test nothing runs, waits, is leased or held."""
    yield
    served.wait_until_ready()
    served.wait_until_idle()


def run(story: Any, timeout_s: float = 150) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story, timeout_s)

    asyncio.run(limited())


def test_earlier_frames_are_computed_once(served: Served) -> None:
    run(_reuse_of_frames(served.url))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_earlier_frames_are_computed_once_where_positions_have_three_axes(family: str, tmp_path: Path) -> None:
    with Served(FAMILIES[family](tmp_path), dtype="float32", threads=1, workers=1) as other:
        run(_reuse_of_frames(other.url))


async def _reuse_of_frames(url: str) -> None:
    camera = await Camera(url).open(context_frames=4, prompt="What is new in the last of these pictures?")
    cached, tokens = [], []
    for number in range(12):
        usage = (await camera.ask(framed(number, picture(number))))["usage"]
        cached.append(usage["cached_tokens"])
        tokens.append(usage["input_tokens"])
        await asyncio.sleep(0.05)  # faster than 30 frames a second, and one would be dropped
    await camera.close()
    per_frame = tokens[1] - tokens[0]
    # 1, 2 … 8 frames, then 4 … 8: a prompt that grew by a frame computes that frame and the end of the template.
    assert tokens == [tokens[0] + per_frame * i for i in (*range(8), 3, 4, 5, 6)]
    for i in (*range(1, 8), 9, 10, 11):
        assert tokens[i] - cached[i] <= per_frame + (tokens[0] - per_frame) // 2
    assert cached[0] < per_frame
    assert 0 < cached[8] < cached[7]  # cut back: only what stands before the frames is the same


def test_answers_keep_to_the_shape_of_their_session_and_a_bad_schema_is_named(served: Served) -> None:
    async def story() -> None:
        camera = await Camera(served.url).open(preset="yes_no", prompt="Is it red?", ignore_eos=None, temperature=1)
        assert (await camera.ask(framed(1, picture(1))))["text"] in {"Yes", "No"}
        done = await camera.ask(structured_outputs={"choice": ["left", "right"]}, seed=1)
        assert done["text"] in {"left", "right"}
        bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "object", "not": {}}}}
        await camera.say("session.update", session={"response_format": bad})
        done = await camera.ask()
        assert (done["status"], done["error"]["param"]) == ("failed", "session.response_format.json_schema.schema")
        await camera.say("session.update", session={"response_format": None})
        assert (await camera.ask())["text"] in {"Yes", "No"}
        camera.check()
        await camera.close()

    run(story())


def test_max_pixels_makes_another_picture_of_a_frame(served: Served) -> None:
    async def story() -> None:
        camera = await Camera(served.url).open()
        large = picture(3, size=(640, 480))
        cached = []
        for max_pixels in (None, 640 * 480, 100, 100):
            await camera.say("session.update", session={"max_pixels": max_pixels})
            cached.append((await camera.ask(framed(len(cached), large)))["usage"]["cached_tokens"])
        await camera.close()
        assert cached[1] == cached[3] > cached[0]  # nothing to shrink: the same picture; then shrunk twice the same way
        assert cached[2] < cached[3]

    run(story())


def test_what_clients_do_wrong_is_not_written_down_as_a_fault(served: Served) -> None:
    async def story() -> None:
        address = served.url.replace("http", "ws")
        for path in ("/v1/stream", "/v1/realtime?model=other"):
            with pytest.raises(InvalidStatus):
                await connect(address + path)
        camera = await Camera(served.url).open()
        assert camera.socket is not None
        await camera.socket.send(b"\xff\xfe", text=True)
        await camera.socket.wait_closed()
        assert camera.socket.close_code == 1007

    before = served.text().count("ERROR")
    run(story())
    served.client.get("/v1/models")  # what the server had to write it has written
    assert served.text().count("ERROR") == before


def test_a_still_scene_costs_no_engine_work(tiny_model: Path) -> None:
    totals = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:mm_cache_queries_total")

    async def story(served: Served) -> None:
        camera = await Camera(served.url).open(trigger={"mode": "on_change"})
        await camera.send(picture(1, 10))
        usages = [(await camera.until("response.done"))["usage"]]
        for _ in range(25):
            await camera.send(picture(1, 10))
            await asyncio.sleep(0.04)
        stats = await camera.until("frames.stats")
        while stats["received"] < 26 or stats["pending"]:
            stats = await camera.until("frames.stats")
        assert stats["captioned"] == 1
        assert sum(stats["dropped"].values()) == 25
        assert stats["dropped"]["unchanged"] > 0
        sent = time.monotonic()
        await camera.send(picture(1, 100))  # the square has moved
        done = await camera.until("response.done")
        assert 0 < done["frame_age_ms"] < (time.monotonic() - sent) * 1e3
        usages.append(done["usage"])
        await camera.close()
        # What the engine did for the two frames that were described, which it tells a little later, and no more.
        expected = [sum(usage["input_tokens"] for usage in usages), sum(usage["output_tokens"] for usage in usages), 2]
        served.wait_for(lambda: served.metric(totals[1]) >= expected[1])
        assert [served.metric(name) for name in totals] == expected

    with Served(tiny_model, dtype="float32", threads=1, workers=1) as served:
        run(story(served))


def test_a_clip_in_parts_is_looked_at_as_one(served: Served) -> None:
    async def story() -> None:
        frames = [Image.open(io.BytesIO(picture(3, box))) for box in (0, 40, 80, 120)]
        clip = io.BytesIO()
        frames[0].save(clip, "GIF", save_all=True, append_images=frames[1:], duration=400)
        camera = await Camera(served.url).open()
        one = (await camera.ask(picture(3)))["usage"]["image_tokens"]
        data = clip.getvalue()
        for part, last in ((data[:500], False), (data[500:], True)):
            header = json.dumps({"k": "video", "mime": "image/gif", "last": last}).encode()
            await camera.send(struct.pack(">H", len(header)) + header + part)
        done = await camera.ask(prompt="What moves?")
        assert done["status"] == "incomplete", done
        assert done["usage"]["image_tokens"] > one
        await camera.close()

    run(story())


def test_a_fast_camera_does_not_starve_a_chat(served: Served) -> None:
    """Its chats are answered while frames never cease to come."""

    async def story() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as http:
            body = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 16, "ignore_eos": True}
            cameras = [await Camera(served.url).open(trigger={"mode": "continuous"}, max_tokens=64) for _ in range(2)]

            async def film(camera: Camera) -> None:
                for number in count():
                    await camera.send(framed(number, picture(number)))
                    await asyncio.sleep(1 / 30)

            async def watch(camera: Camera) -> None:
                with contextlib.suppress(ConnectionClosed):
                    while True:
                        await camera.next()

            films = [asyncio.ensure_future(film(camera)) for camera in cameras]
            for camera in cameras:
                await camera.until("response.done")
            watches = [asyncio.ensure_future(watch(camera)) for camera in cameras]
            for _ in range(10):
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            for camera in cameras:  # and they are served beside them
                while sum(event["type"] == "response.done" for event in camera.events) < 2:
                    await asyncio.sleep(0.01)
            assert not any(task.done() for task in films)
            for task in films:
                task.cancel()
            for camera in cameras:
                await camera.close()
            await asyncio.gather(*films, *watches, return_exceptions=True)
            for camera in cameras:
                camera.check()

    run(story())


def test_an_engine_killed_under_twenty_sessions_fails_each_once_and_all_go_on(served: Served) -> None:
    async def story() -> None:
        cameras = [
            await Camera(served.url).open(trigger={"mode": "continuous"}, max_tokens=ENDLESS, prompt=f"camera {number}")
            for number in range(20)
        ]
        for number, camera in enumerate(cameras):
            await camera.send(picture(number))
        await asyncio.gather(*(camera.until("response.output_text.delta") for camera in cameras))
        served.kill("engine")
        done = await asyncio.gather(*(camera.until("response.done") for camera in cameras))
        assert {event["status"] for event in done} == {"failed"}
        assert {event["error"]["code"] for event in done} == {"engine_restarting"}

        async def again(number: int, camera: Camera) -> None:
            """Frames keep coming; the first response that succeeds proves that the session goes on."""
            await camera.say("session.update", session={"max_tokens": 4})
            while True:
                await camera.send(picture(number))
                with contextlib.suppress(TimeoutError):
                    event = await camera.until("response.done", 2)
                    if event["status"] == "incomplete":
                        return
                    assert event["error"]["code"] in {"not_ready", "engine_restarting"}

        await asyncio.gather(*(again(number, camera) for number, camera in enumerate(cameras)))
        for camera in cameras:
            camera.check()
            await camera.close()

    run(story())


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["frame", "frame", "ask", "cut", "cut", "read", "wait"])),
    min_size=10,
    max_size=40,
)


@settings(max_examples=6, deadline=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_a_storm_of_lost_connections_loses_and_repeats_nothing(served: Served, steps: list[tuple[int, str]]) -> None:
    async def story() -> None:
        cameras = [await Camera(served.url).open(trigger={"mode": "continuous"}, max_tokens=24) for _ in range(4)]
        for number, step in steps:
            camera = cameras[number]
            if step == "frame":
                await camera.send(framed(number, picture(number)))
            elif step == "ask":
                await camera.say("response.create", response={"frame_ids": []})
            elif step == "cut":
                camera.cut()
                await camera.resume()
            elif step == "read":
                with contextlib.suppress(TimeoutError):
                    await camera.next(0.02)
            else:
                await asyncio.sleep(0.02)
        for camera in cameras:
            camera.cut()
            await camera.resume()
            await camera.say("session.update", session={"trigger": {"mode": "manual"}})
            await camera.ask(picture(1), metadata={"last": "one"})
            while camera.events[-1].get("metadata") != {"last": "one"}:
                await camera.until("response.done")
            camera.check()
            await camera.close()

    run(story())


def test_sigterm_tells_every_session_and_lets_its_response_finish(tiny_model: Path) -> None:
    async def story(server: Served) -> None:
        camera = await Camera(server.url).open(max_tokens=ENDLESS)
        await camera.send(picture(1))
        await camera.say("response.create")
        await camera.until("response.output_text.delta")
        server.process.send_signal(signal.SIGTERM)
        assert (await camera.until("session.going_away"))["reason"] == "draining"
        server.release("answers")
        assert (await camera.until("response.done"))["status"] == "incomplete"
        with pytest.raises(ConnectionClosed) as closed:
            await camera.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        camera.check()

    with Served(tiny_model, held=True) as server:
        run(story(server))
        assert server.process.wait(PATIENCE_S) == 0
