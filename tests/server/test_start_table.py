"""What is chosen by the model before anything starts, and what people read when all is up."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from clips import clip
from PIL import Image
from serving import Served
from tiny_models import FAMILIES

import server.start_table
from beholder import Beholder
from server.options.option import SettingsError
from server.settings import Settings
from server.start_table import Start

FACTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": 3,
    "kernel": "native",
    "context": 36_000,
    "model_context": 262_144,
    "kv_tokens": 36_000,
    "kv_bytes": 4 << 30,
    "vision_cache_bytes": 256 << 20,
    "pace_rows": 8,
    "pace_ms": [4.0, 5.2],
}


def edited(folder: Path, name: str, **changes: object) -> None:
    """Fields of a JSON file replaced."""
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_arena_follows_the_largest_picture(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Start.of(Settings(model=str(tiny_model)))
    assert small.settings.arena_mb == 64
    assert Start.of(Settings(model=str(tiny_model), arena_mb=7)).settings.arena_mb == 7
    folder = FAMILIES["qwen2_vl"](tmp_path)
    edited(folder, "preprocessor_config.json", min_pixels=56 * 56, max_pixels=12_845_056)  # as Qwen2-VL has it
    monkeypatch.setattr(server.start_table, "available_memory", lambda: 64 << 30)
    large = Start.of(Settings(model=str(folder), workers=3, device="cuda"))
    assert large.settings.arena_mb == 3 * 4 * 3 * 12_845_056 >> 20
    assert large.picture_tokens == large.own_picture_tokens == 12_845_056 // 16**2
    assert Start.of(Settings(model=str(folder), workers=30, device="cuda")).settings.arena_mb == 1024
    monkeypatch.setattr(server.start_table, "available_memory", lambda: 2 << 30)
    assert Start.of(Settings(model=str(folder), workers=3, device="cuda")).settings.arena_mb == 256


def test_on_a_gpu_it_says_where_the_start_went(tiny_model: Path) -> None:
    start = Start.of(Settings(model=str(tiny_model)))
    lines = list(start.lines({**FACTS, "device": "cuda", "start_s": {"imports": 2.51, "Triton": 0.01, "graphs": 1.3}}))
    assert "start    imports 2.5 s, graphs 1.3 s" in lines
    assert not any(line.startswith("start ") for line in start.lines({**FACTS, "start_s": {"imports": 2.51}}))


def test_a_bound_that_a_model_cannot_keep_is_refused(tiny_model: Path) -> None:
    own = Start.of(Settings(model=str(tiny_model))).own_picture_tokens
    assert Start.of(Settings(model=str(tiny_model), max_picture_tokens=own)).picture_tokens == own
    with pytest.raises(SettingsError, match=r"--max-picture-tokens 1: this model .* leave the option out"):
        Start.of(Settings(model=str(tiny_model), max_picture_tokens=1))


def test_pictures_that_would_take_a_cpu_hours_are_smaller_there(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2_vl"](tmp_path)
    edited(folder, "preprocessor_config.json", min_pixels=56 * 56, max_pixels=12_845_056)
    tiny = Start.of(Settings(model=str(folder)))
    assert tiny.picture_tokens < tiny.own_picture_tokens  # 50,176 of 16 × 16 pixels: more work than a large encoder's
    size = {"embed_dim": 1280, "depth": 32, "patch_size": 14}
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    edited(folder, "config.json", vision_config={**vision, **size, "mlp_ratio": 4})
    edited(folder, "preprocessor_config.json", patch_size=14)
    edited(folder, "video_preprocessor_config.json", patch_size=14)
    large = Start.of(Settings(model=str(folder)))
    assert large.picture_tokens == 1302
    assert "         larger ones are made smaller; --max-picture-tokens allows the model's own 16,384" in large.lines(
        FACTS
    )
    asked = Start.of(Settings(model=str(folder), max_picture_tokens=16_384))
    assert asked.picture_tokens == asked.own_picture_tokens
    assert not any("made smaller" in line for line in asked.lines(FACTS))


def test_the_table_says_what_bounds_what(tiny_model: Path) -> None:
    start = Start.of(Settings(model=str(tiny_model), max_images=5))
    assert list(start.lines(FACTS)) == [
        f"model    {tiny_model.name} ({tiny_model})",
        "runs as  smolvlm in bfloat16 on cpu with 3 of its threads",
        "kernel   native",
        "context  36,000 tokens, prompt and answer, of the model's 262,144: what the KV cache holds; --kv-tokens makes "
        "it larger",
        "KV cache 36,000 tokens, 4.0 GiB",
        "pictures up to 68 tokens each, 5 in a request; 64 frames of a clip",
        "steps    4.0 ms for 8 streams; with new pictures and prompts 5.2 ms",
        "memory   vision cache 256 MiB, pixel arena 64 MiB",
    ]
    asked = Start.of(Settings(model=str(tiny_model), max_context=36_000)).lines(FACTS)
    assert "context  36,000 tokens, prompt and answer, of the model's 262,144: as asked for" in list(asked)
    without = Start.of(Settings(model=str(tiny_model), ttft_target_ms=0)).lines({**FACTS, "pace_ms": []})
    assert "steps    take new pictures and prompts at once (--ttft-target-ms 0): streams wait for them" in list(without)


def test_code_that_comes_with_a_folder_is_mentioned_and_not_run(tmp_path: Path) -> None:
    folder = FAMILIES["idefics3"](tmp_path)
    edited(folder, "config.json", auto_map={"AutoModel": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("raise SystemExit('the code was run')\n")
    *_, pictures, _, _, note = Start.of(Settings(model=str(folder))).lines(FACTS)
    assert pictures.endswith("no clips")
    assert note == "note     the model folder brings code of its own (auto_map), which is never run"


def test_an_unknown_family_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(SettingsError, match=r"^--model: [^\n]*'llava'; known are [^\n]*$"):
        Start.of(Settings(model=str(tmp_path)))


def test_a_cached_hub_name_is_served_with_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole server on a family that is not the bundled one: pictures and clips in, the offline API's words out."""
    snapshot = tmp_path / "hub" / "models--owner--Tiny-VL" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    FAMILIES["qwen2_5_vl"](snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    picture = io.BytesIO()
    Image.new("RGB", (90, 60), (200, 30, 40)).save(picture, "PNG")
    video = clip("mp4", 40)
    question = {"type": "text", "text": "What differs?"}
    with Served(Path("owner/Tiny-VL"), dtype="float32", threads=1, workers=1, kv_tokens=700) as served:
        assert f"model    owner/Tiny-VL ({snapshot})" in served.text()
        assert "context  700 tokens, prompt and answer, of the model's 1,024: what the KV cache holds" in served.text()
        content = [
            {"type": "image_url", "image_url": {"url": data_url("image/png", picture.getvalue())}},
            {"type": "video_url", "video_url": {"url": data_url("video/mp4", video)}},
            question,
        ]
        body = {"model": "owner/Tiny-VL", "messages": [{"role": "user", "content": content}], "temperature": 0}
        answer = served.client.post("/v1/chat/completions", json={**body, "max_tokens": 12}).json()
        refused = served.client.post("/v1/chat/completions", json={**body, "max_tokens": 690})
    assert refused.status_code == 400
    assert "the model's context is 700 tokens, so `max_tokens` can be at most" in refused.json()["error"]["message"]
    content = [{"type": "image", "image": picture.getvalue()}, {"type": "video", "video": video}, question]
    with Beholder(snapshot, dtype="float32", threads=1) as beholder:
        expected = beholder.chat([{"role": "user", "content": content}], temperature=0, max_tokens=12)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
