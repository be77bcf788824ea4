"""Live sessions over real processes and a real engine: reuse of context, still scenes, fairness, deaths, storms."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import Served
from streaming import Camera, framed, picture
from tiny_models import FAMILIES
from websockets.exceptions import ConnectionClosed

REPORT_S = 1.3
"""An idle engine tells its totals at the latest after so long."""


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, dtype="float32", max_running=32, kv_tokens=16_384, stream_max_sessions=200) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing(served: Served) -> Iterator[None]:
    """After each test nothing runs, waits, is leased or held."""
    yield
    served.wait_until_ready()
    names = [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "beholder_arena_used_bytes",
    ]
    deadline = time.monotonic() + 10
    while any(values := [served.metric(name) for name in names]):
        assert time.monotonic() < deadline, values
        time.sleep(0.1)


def run(story: Any, timeout_s: float = 90) -> None:
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


def test_a_still_scene_costs_no_engine_work(served: Served) -> None:
    async def story() -> None:
        camera = await Camera(served.url).open(trigger={"mode": "on_change"})
        steps = served.metric("beholder_engine_steps_total")
        await camera.send(picture(1, 10))
        await camera.until("response.done")
        await asyncio.sleep(REPORT_S)
        after_first = served.metric("beholder_engine_steps_total")
        assert after_first > steps
        for _ in range(25):
            await camera.send(picture(1, 10))
            await asyncio.sleep(0.04)
        stats = await camera.until("frames.stats")
        while stats["received"] < 26:
            stats = await camera.until("frames.stats")
        assert stats["captioned"] == 1
        assert stats["dropped"].get("unchanged", 0) + stats["dropped"].get("replaced", 0) == 25
        await asyncio.sleep(REPORT_S)
        assert served.metric("beholder_engine_steps_total") == after_first
        await camera.send(picture(1, 100))  # the square has moved
        await camera.until("response.done")
        assert camera.events[-1]["frame_age_ms"] < 5000
        await camera.close()

    run(story())


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
    async def story() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
            body = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 16, "ignore_eos": True}

            async def chat() -> float:
                started = time.monotonic()
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200
                return time.monotonic() - started

            alone = sorted([await chat() for _ in range(5)])[2]
            cameras = [await Camera(served.url).open(trigger={"mode": "continuous"}, max_tokens=64) for _ in range(2)]

            async def film(camera: Camera) -> None:
                for number in range(1000):
                    await camera.send(framed(number, picture(number)))
                    await asyncio.sleep(1 / 30)

            async def watch(camera: Camera) -> None:
                with contextlib.suppress(ConnectionClosed):
                    while True:
                        await camera.next()

            films = [asyncio.ensure_future(film(camera)) for camera in cameras]
            watches = [asyncio.ensure_future(watch(camera)) for camera in cameras]
            await asyncio.sleep(0.5)
            times = [await chat() for _ in range(10)]
            for task in films:
                task.cancel()
            for camera in cameras:
                await camera.close()
            await asyncio.gather(*films, *watches, return_exceptions=True)
            for camera in cameras:
                camera.check()
                assert sum(e["type"] == "response.done" for e in camera.events) > 1
            assert max(times) < max(2.0, 20 * alone), (alone, times)

    run(story())


def test_an_engine_killed_under_twenty_sessions_fails_each_once_and_all_go_on(served: Served) -> None:
    async def story() -> None:
        cameras = [
            await Camera(served.url).open(trigger={"mode": "continuous"}, max_tokens=400, prompt=f"camera {number}")
            for number in range(20)
        ]
        for number, camera in enumerate(cameras):
            await camera.send(picture(number))
        await asyncio.gather(*(camera.until("response.output_text.delta") for camera in cameras))
        (pid,) = served.pids("engine")
        os.kill(pid, signal.SIGKILL)
        done = await asyncio.gather(*(camera.until("response.done", 5) for camera in cameras))
        assert {event["status"] for event in done} == {"failed"}
        assert {event["error"]["code"] for event in done} == {"engine_restarting"}

        async def again(number: int, camera: Camera) -> None:
            """Frames keep coming; the first response that succeeds proves that the session goes on."""
            deadline = time.monotonic() + 40
            await camera.say("session.update", session={"max_tokens": 4})
            while time.monotonic() < deadline:
                await camera.send(picture(number))
                with contextlib.suppress(TimeoutError):
                    event = await camera.until("response.done", 2)
                    if event["status"] == "incomplete":
                        return
                    assert event["error"]["code"] in {"not_ready", "engine_restarting"}
            raise AssertionError("the session did not go on")

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
        camera = await Camera(server.url).open(max_tokens=200)
        await camera.send(picture(1))
        await camera.say("response.create")
        await camera.until("response.output_text.delta")
        server.process.send_signal(signal.SIGTERM)
        assert (await camera.until("session.going_away"))["reason"] == "draining"
        assert (await camera.until("response.done"))["status"] == "incomplete"
        with pytest.raises(ConnectionClosed) as closed:
            await camera.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        camera.check()

    with Served(tiny_model) as server:
        run(story(server))
        assert server.process.wait(20) == 0
