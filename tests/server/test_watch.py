"""`beholder watch` and clips in the Python API and on the command line, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from clips import animation, clip
from typer.testing import CliRunner

import beholder as api
from beholder import Beholder, ClientError, Clip
from server import cli
from server.live_source import LiveFrame, LiveSource
from server.subtitles import srt
from server.watch import Sighting, Watch

GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
CLIP = clip("mp4", 100)  # 4 s
runner = CliRunner()


@pytest.fixture(scope="module")
def beholder(tiny_model: Path):  # type: ignore[no-untyped-def]
    with api.Beholder(tiny_model, dtype="float32", threads=1) as beholder:
        yield beholder
        assert not beholder._running
        beholder._engine.check()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watch") / "clip.mp4"
    path.write_bytes(CLIP)
    return path


# ---- clips in the Python API ----------------------------------------------------------------------------------------


def test_a_video_file_is_a_clip(beholder: Beholder, file: Path) -> None:
    answers = [beholder.caption(source, **GREEDY) for source in (file, str(file), CLIP, Clip(file))]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].clips[0].frame_times_s == [0, 1.32, 2.64, 3.96]
    assert answers[0].images == []
    assert answers[1].usage.cached_tokens > 0


def test_frames_by_hand(beholder: Beholder, file: Path) -> None:
    assert len(beholder.caption(Clip(file, fps=0.5), **GREEDY).clips[0].frame_times_s) == 2
    assert len(beholder.caption(Clip(file, max_frames=1), **GREEDY).clips[0].frame_times_s) == 1
    gif = animation("GIF", 4, 1000)
    assert (len(beholder.caption(gif, **GREEDY).clips), len(beholder.caption(Clip(gif), **GREEDY).clips)) == (0, 1)
    for fps in (-1, float("inf"), float("nan")):
        with pytest.raises(ClientError, match="expected 0 to 240"):
            beholder.caption(Clip(file, fps=fps))


def test_a_clip_in_a_chat(beholder: Beholder, file: Path) -> None:
    question = {"type": "text", "text": "Describe the video."}
    answer = beholder.chat(
        [{"role": "user", "content": [{"type": "video", "video": file, "max_frames": 2}, question]}], **GREEDY
    )
    assert len(answer.clips[0].frame_times_s) == 2
    assert answer.text == beholder.caption(Clip(file, max_frames=2), "Describe the video.", **GREEDY).text


def test_timed_captions_are_those_of_each_part_alone(beholder: Beholder, file: Path) -> None:
    cues = beholder.timed_captions(file, segment_s=2, **GREEDY)
    assert [(cue.start, cue.end) for cue in cues] == [(0, 2), (2, 4)]
    for cue, numbers in zip(cues, (range(50), range(50, 100)), strict=True):
        alone = clip("mp4", 50, numbers=numbers)
        assert cue.text == beholder.caption(alone, "Describe the video.", **GREEDY).text.strip()
    [whole] = beholder.timed_captions(file, **GREEDY)
    assert whole.text == beholder.caption(file, **GREEDY).text.strip()


# ---- watching -------------------------------------------------------------------------------------------------------


def watched(beholder: Beholder, file: Path, **options: object) -> tuple[list[Sighting], list[LiveFrame], object]:
    sightings: list[Sighting] = []
    frames: list[LiveFrame] = []
    how = Watch("Describe the picture.", sampling=GREEDY, **options)  # type: ignore[arg-type]
    with LiveSource(str(file), beholder.settings.preprocess_config().limits) as source:
        tally = how.run(beholder, source, lambda frame, _: frames.append(frame), sightings.append)
    return sightings, frames, tally


def test_every_sighting_is_of_its_frame(beholder: Beholder, tmp_path: Path) -> None:
    file = tmp_path / "short.mp4"
    file.write_bytes(clip("mp4", 25))
    sightings, frames, tally = watched(beholder, file, min_change=0)
    by_time = {round(frame.at_s, 3): frame.image for frame in frames}
    assert tally.described == len(sightings) >= 2  # type: ignore[attr-defined]
    for sighting in sightings:
        alone = beholder.caption(by_time[sighting.at_s], "Describe the picture.", **GREEDY)
        assert sighting.text == alone.text.strip()
        assert sighting.frame_age_ms > 0
        assert sighting.total_ms > 0
    assert tally.described + tally.dropped == 10  # type: ignore[attr-defined]


def test_a_still_scene_is_described_once(beholder: Beholder, tmp_path: Path) -> None:
    file = tmp_path / "still.mp4"
    file.write_bytes(clip("mp4", 25, numbers=[5] * 25))
    sightings, _, tally = watched(beholder, file)
    assert len(sightings) == 1
    assert tally.unchanged >= 2  # type: ignore[attr-defined]


def test_it_stops_when_told(beholder: Beholder, file: Path) -> None:
    sightings, _, _ = watched(beholder, file, min_change=0, max_captions=2, every_s=0.2)
    assert len(sightings) == 2
    assert sightings[1].at_s >= 0.1


# ---- command line ---------------------------------------------------------------------------------------------------


def command(*arguments: str, model: Path):  # type: ignore[no-untyped-def]
    options = ["--model", str(model), "--max-tokens", "4", "--temperature", "0", "--threads", "1"]
    return runner.invoke(cli.app, [*arguments, *options])


def test_caption_of_a_clip(tiny_model: Path, file: Path) -> None:
    plain = command("caption", str(file), model=tiny_model)
    assert (plain.exit_code, plain.stderr) == (0, "")
    answer = msgspec.json.decode(command("caption", str(file), "--json", model=tiny_model).stdout)
    assert answer["text"] + "\n" == plain.stdout
    assert answer["clips"][0]["duration_s"] == 4


def test_subtitles_of_a_clip(tiny_model: Path, file: Path) -> None:
    done = command("caption", str(file), "--timed", "srt", "--segment-s", "2", model=tiny_model)
    assert done.exit_code == 0
    assert done.stdout.startswith("1\n00:00:00,000 --> 00:00:02,000\n")
    assert command("caption", str(file), "--timed", "vtt", model=tiny_model).stdout.startswith("WEBVTT\n\n00:00:00.000")
    assert command("caption", str(file), "--timed", "vtt", "--json", model=tiny_model).exit_code == 2


def test_watch_prints_captions_as_they_come(tiny_model: Path, file: Path) -> None:
    done = command("watch", str(file), "--max-captions", "2", "--min-change", "0", model=tiny_model)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("[0:00:0") for line in lines)
    assert "2 frames described" in done.stderr
    done = command("watch", str(file), "--max-captions", "1", "--json", model=tiny_model)
    assert set(msgspec.json.decode(done.stdout)) == {"at_s", "text", "frame_age_ms", "total_ms", "dropped"}


def test_watch_of_nothing_is_one_line(tiny_model: Path) -> None:
    done = command("watch", "nowhere.mp4", model=tiny_model)
    assert done.exit_code == 1
    assert done.stderr == "beholder: 'nowhere.mp4' cannot be read: No such file or directory.\n"


def test_subtitles_of_the_api_are_files() -> None:
    assert api.srt([api.Cue(0, 1, "a")]) == srt([api.Cue(0, 1, "a")]) == "1\n00:00:00,000 --> 00:00:01,000\na\n\n"
