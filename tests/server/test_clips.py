"""Clips in chat and captions: where they may come, what they are asked, and timed captions in every format."""

from __future__ import annotations

import base64
import json

import pytest

from preprocess.wire import ImagePart, Segmenting, TextPart, VideoPart

MP4 = b"\0\0\0\x18ftypmp42" + bytes(40)
URL = "data:video/mp4;base64," + base64.b64encode(MP4).decode()
JPEG = b"\xff\xd8\xff" + bytes(40)


def parts(service):
    [message] = service.last[0]
    return message.content


def form(client, *files, query="", **fields):
    return client.post(f"/v1/captions{query}", files=list(files), data=fields)


# ---- chat -----------------------------------------------------------------------------------------------------------


def test_a_clip_in_a_chat(client, service) -> None:
    content = [{"type": "video_url", "video_url": {"url": URL}}, {"type": "text", "text": "What happens?"}]
    assert client.chat(content).status_code == 200
    assert parts(service) == [VideoPart(data_url=URL), TextPart("What happens?")]


def test_how_much_of_it_is_looked_at(client, service) -> None:
    video = {"url": URL, "fps": 0.5, "max_frames": 4}
    assert client.chat([{"type": "video_url", "video_url": video}]).status_code == 200
    assert parts(service) == [VideoPart(data_url=URL, fps=0.5, max_frames=4)]


@pytest.mark.parametrize(
    ("video", "param", "says"),
    [
        (
            {"url": "https://example.org/a.mp4"},
            "url",
            "and this server fetches nothing: send the clip",
        ),
        ({"url": "file:///etc/passwd"}, "url", "is a file: URL"),
        ({"url": "clip.mp4"}, "url", "is no URL; expected a data URL (data:video/…;base64,…)"),
        ({"url": " "}, "url", "holds no clip: it is empty"),
        ({"url": URL, "fps": 0}, "fps", "is 0; expected above 0 and at most 240"),
        ({"url": URL, "max_frames": 0}, "max_frames", "is 0; expected 1 to 256"),
        ({"url": URL, "max_frame": 1}, "max_frame", "Did you mean `max_frames`?"),
    ],
)
def test_a_clip_that_cannot_be_is_refused_by_name(client, service, video, param, says) -> None:
    response = client.chat([{"type": "video_url", "video_url": video}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"messages[0].content[0].video_url.{param}")
    assert says in error["message"]
    assert not service.submitted


def test_clips_count_with_pictures(client) -> None:
    video = {"type": "video_url", "video_url": {"url": URL}}
    image = {"type": "image_url", "image_url": {"url": URL}}
    response = client.chat([video, image, video, image])
    assert response.json()["error"]["code"] == "too_many_images"
    assert "holds 4 pictures and clips; at most 3" in response.json()["error"]["message"]


def test_clips_are_counted(client) -> None:
    client.chat([{"type": "video_url", "video_url": {"url": URL}}])
    client.chat([{"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}])
    client.chat([{"type": "video_url", "video_url": {"url": ""}}])
    lines = client.get("/metrics").text.splitlines()
    assert 'beholder_clip_frames_sum{model_name="tiny"} 2.0' in lines
    assert 'beholder_clip_decode_seconds_count{model_name="tiny"} 1.0' in lines
    assert 'beholder_media_rejected_total{model_name="tiny",reason="video_empty"} 1.0' in lines


# ---- captions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "video", "image"])
def test_a_file_is_known_by_its_first_bytes(client, service, name) -> None:
    answer = form(client, (name, ("clip.mp4", MP4))).json()
    assert parts(service) == [VideoPart(data=MP4), TextPart("Describe the video.")]
    assert (answer["text"], answer["object"]) == ("A small red square on white.", "caption")
    assert answer["clip"] == answer["clips"][0]
    assert answer["clip"]["duration_s"] == 10.0
    assert answer["images"] == []
    assert "image" not in answer


def test_an_animated_picture_is_a_clip_where_a_clip_is_asked_for(client, service) -> None:
    gif = b"GIF89a" + bytes(30)
    form(client, ("image", ("a.gif", gif)))
    assert isinstance(parts(service)[0], ImagePart)
    form(client, ("video", ("a.gif", gif)))
    assert isinstance(parts(service)[0], VideoPart)
    client.post("/v1/captions", content=gif, headers={"content-type": "video/gif"})
    assert isinstance(parts(service)[0], VideoPart)


def test_a_raw_body_and_json(client, service) -> None:
    client.post("/v1/captions?fps=2", content=MP4, headers={"content-type": "video/mp4"})
    assert parts(service)[0] == VideoPart(data=MP4, fps=2)
    client.post("/v1/captions", json={"video": URL, "max_frames": 3, "prompt": "Why?"})
    assert parts(service) == [VideoPart(data_url=URL, max_frames=3), TextPart("Why?")]
    client.post("/v1/captions", json={"video": URL.partition(",")[2]})
    assert parts(service)[0].data_url.endswith(URL.partition(",")[2])


def test_pictures_answer_as_before(client) -> None:
    answer = form(client, ("file", ("a.jpg", JPEG))).json()
    assert "clip" not in answer
    assert "clips" not in answer


def test_a_clip_as_text_and_as_a_stream(client) -> None:
    assert form(client, ("video", ("clip.mp4", MP4)), format="text").text == "A small red square on white.\n"
    events = form(client, ("video", ("clip.mp4", MP4)), stream="true").text
    assert '"clip":{"width":64' in events
    assert events.endswith("data: [DONE]\n\n")


def test_timed_captions_as_subrip(client, service) -> None:
    response = form(client, ("video", ("clip.mp4", MP4)), format="srt", segment_s="5")
    assert service.last[2]["segmenting"] == Segmenting(5)
    assert response.headers["content-type"].startswith("application/x-subrip")
    assert response.text == (
        "1\n00:00:00,000 --> 00:00:04,000\nA small red square on white.\n\n"
        "2\n00:00:04,000 --> 00:00:10,000\nA small red square on white.\n\n"
    )


def test_timed_captions_as_webvtt(client, service) -> None:
    response = form(client, ("video", ("clip.mp4", MP4)), format="vtt")
    assert service.last[2]["segmenting"] == Segmenting(0)
    assert response.headers["content-type"].startswith("text/vtt")
    assert response.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:04.000\nA small red square on white.\n")


def test_timed_captions_as_json(client) -> None:
    answer = form(client, ("video", ("clip.mp4", MP4)), format="timed_json").json()
    assert (answer["object"], answer["model"]) == ("caption.timed", "tiny")
    assert answer["segments"] == [
        {"start": start, "end": end, "text": "A small red square on white.", "index": index, "finish_reason": "stop"}
        for index, (start, end) in enumerate([(0, 4), (4, 10)])
    ]
    assert answer["text"] == "A small red square on white.\nA small red square on white."
    assert answer["clip"]["frame_times_s"] == [0, 5]
    assert answer["usage"]["prompt_tokens"] == 40
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["timings"]["total_ms"] > 0


@pytest.mark.parametrize("format", ["srt", "vtt"])
def test_a_stream_of_subtitles_is_the_same_file(client, format) -> None:
    whole = form(client, ("video", ("clip.mp4", MP4)), format=format)
    stream = form(client, ("video", ("clip.mp4", MP4)), format=format, stream="true")
    assert stream.text == whole.text
    assert stream.headers["content-type"] == whole.headers["content-type"]


def test_a_stream_of_timed_captions(client) -> None:
    events = form(client, ("video", ("clip.mp4", MP4)), format="timed_json", stream="true").text.split("\n\n")
    first, second, whole = (json.loads(event.removeprefix("data: ")) for event in events[:3])
    assert (first["index"], first["start"], second["index"]) == (0, 0, 1)
    assert whole["segments"] == [first, second]
    assert events[3:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("files", "fields", "param", "says"),
    [
        (["picture"], {"format": "srt"}, "format", "is for one clip"),
        (["clip", "picture"], {"format": "vtt"}, "format", "is for one clip"),
        (["clip"], {"format": "srt", "segment_s": "0"}, "segment_s", "is 0; expected above 0"),
        (["clip"], {"segment_s": "5"}, "segment_s", "is for `format` timed_json or srt or vtt"),
        (["clip"], {"detail": "low"}, "detail", "is for pictures, and there is none"),
        (["picture"], {"fps": "5"}, "fps", "is for clips, and there is none"),
        (["picture"], {"max_frames": "5"}, "max_frames", "is for clips, and there is none"),
        (["clip"], {"max_frames": "257"}, "max_frames", "is 257; expected 1 to 256"),
        (["clip"], {"video": "x"}, "video", "`video` is text; expected a file (curl -F video=@clip.mp4)"),
    ],
)
def test_fields_that_mean_nothing_there_are_refused(client, service, files, fields, param, says) -> None:
    data = {"clip": MP4, "picture": JPEG}
    response = form(client, *((name, (name, data[name])) for name in files), **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert not service.submitted


def test_an_empty_and_a_large_clip(client_with_small_clips) -> None:
    response = form(client_with_small_clips, ("video", ("clip.mp4", b"")))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "video_empty")
    response = form(client_with_small_clips, ("file", ("clip.mp4", MP4 + bytes(2000))))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "video_too_large")
    assert "is a clip of" in response.json()["error"]["message"]


@pytest.fixture
def client_with_small_clips(service, client_of):
    from server.app import create_app
    from server.settings import Settings

    return client_of(create_app(Settings.load({"max_video_mb": 0.001}), service))
