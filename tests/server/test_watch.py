"""`beholder watch` and clips in the Python API and on the command line, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from clips import animation, clip, numbered
from typer.testing import CliRunner

import beholder as api
from beholder import Beholder, ClientError, Clip
from server import cli, watch
from server.live_source import LiveFrame, LiveSource
from server.subtitles import srt
from server.watch import Sighting, Tally, Watch

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


class Scene:
    """A source whose frames come every tenth of a second of a time of its own, which passes when somebody sleeps and
    while frames are described. It stands for the module `time` too.
    """

    def __init__(self, numbers: list[int], describing_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.describing_s = describing_s
        self._frames = [LiveFrame(numbered(number), i / 10, i / 10, i) for i, number in enumerate(numbers)]
        self._next = 0

    def newest(self) -> LiveFrame | None:
        if self._next == len(self._frames):
            return None
        self.now_s = max(self.now_s, self._frames[self._next].captured_s)
        newest = max(frame.number for frame in self._frames if frame.captured_s <= self.now_s + 1e-9)
        self._next = newest + 1
        return self._frames[newest]

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def watched(
    beholder: Beholder, scene: Scene, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[list[Sighting], list[LiveFrame], Tally]:
    sightings: list[Sighting] = []
    frames: list[LiveFrame] = []
    how = Watch("Describe the picture.", sampling=GREEDY, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(watch, "time", scene)

    def on_piece(frame: LiveFrame, piece: str) -> None:
        if not frames or frames[-1] is not frame:
            frames.append(frame)
            scene.now_s += scene.describing_s

    tally = how.run(beholder, scene, on_piece, sightings.append)  # type: ignore[arg-type]
    return sightings, frames, tally


def test_every_sighting_is_of_its_frame(beholder: Beholder, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(list(range(1, 11)), describing_s=0.25)
    sightings, frames, tally = watched(beholder, scene, monkeypatch, min_change=0)
    assert [frame.number for frame in frames] == [0, 2, 5, 7, 9]
    assert [sighting.dropped for sighting in sightings] == [0, 1, 2, 1, 1]
    for sighting, frame in zip(sightings, frames, strict=True):
        alone = beholder.caption(frame.image, "Describe the picture.", **GREEDY)
        assert sighting.text == alone.text.strip()
        assert sighting.at_s == frame.at_s
        assert 0 <= sighting.frame_age_ms <= 100.1, "the newest one"
        assert sighting.total_ms == pytest.approx(250)
    assert (tally.described, tally.dropped, tally.unchanged) == (5, 5, 0)


def test_a_still_scene_is_described_once(beholder: Beholder, monkeypatch: pytest.MonkeyPatch) -> None:
    sightings, _, tally = watched(beholder, Scene([5] * 10), monkeypatch)
    assert len(sightings) == 1
    assert (tally.described, tally.unchanged, tally.dropped) == (1, 9, 0)


def test_it_stops_when_told(beholder: Beholder, monkeypatch: pytest.MonkeyPatch) -> None:
    sightings, _, _ = watched(beholder, Scene(list(range(40))), monkeypatch, min_change=0, max_captions=2, every_s=0.2)
    assert [sighting.at_s for sighting in sightings] == [0, 0.2]


def test_a_file_is_watched_to_its_end(beholder: Beholder, tmp_path: Path) -> None:
    file = tmp_path / "short.mp4"
    file.write_bytes(clip("mp4", 25))
    seen: list[int] = []
    how = Watch("Describe the picture.", min_change=0, sampling=GREEDY)  # type: ignore[arg-type]
    with LiveSource(str(file), beholder.settings.preprocess_config().limits) as source:
        tally = how.run(beholder, source, lambda frame, _: seen.append(frame.number), lambda _: None)
    assert seen[-1] == 9
    assert tally.described + tally.dropped == 10


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
