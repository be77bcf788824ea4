"""What was said on the Live page: files that hold any text, and cards that stay where somebody reads them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from browser import Visit, shifted, watch_shifts

TEXTS: Final = [
    'He said "hi", then\nleft',
    "=1+1",
    "\n=1+1",
    "  @SUM(A1)",
    "＝1+1",
    "-3 birds",
    "one\rtwo\r\rthree\r\n\r\nfour",
    "arrow --> ---> ----> <b>&amp;</b> <00:01.000>",
    "00:00:01.000 --> 00:00:02.000",
    "NOTE it is\n\n\nnot one",
    "WEBVTT",
    "😀👩‍👩‍👧‍👦🇩🇪",
    'ثلاثة طيور, "على" الجليد',
    "\u202ereversed\u2028line",
    "<script>alert(1)</script>",
]

ENTRIES: Final = """(texts) => texts.map((text, index) => ({
  id: index + 1, text, shown: text, prompt: "What, exactly?", model: "m", responseId: `r${index}`, times: 1,
  starred: false, rating: null, firstAt: 1.7e12 + 900 * index, lastAt: 1.7e12 + 900 * index, thumbnail: "",
  figures: {} }))"""


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Any:
    page = visit().page
    page.wait_for_selector("beholder-live .live-stage")
    return page


def exported(page: Any, kind: str, texts: list[str]) -> str:
    return str(
        page.evaluate(
            f"async ([kind, texts]) => (await import('./own/live_export.js'))[kind](({ENTRIES})(texts))", [kind, texts]
        )
    )


def test_every_text_survives_json_lines_and_csv(page: Any) -> None:
    lines = exported(page, "jsonl", TEXTS).split("\n")
    assert [json.loads(line)["text"] for line in lines if line] == TEXTS
    rows = list(csv.DictReader(io.StringIO(exported(page, "csv", TEXTS), newline="")))
    assert [row["text"].removeprefix("'") for row in rows] == TEXTS
    assert all(row["prompt"] == "What, exactly?" for row in rows)


def test_no_cell_is_a_formula(page: Any) -> None:
    rows = csv.DictReader(io.StringIO(exported(page, "csv", TEXTS), newline=""))
    assert not [row["text"] for row in rows if row["text"].lstrip()[0] in "=+-@＝＋－＠"]


def test_subtitles_are_read_by_a_browser_word_for_word(page: Any) -> None:
    cues = page.evaluate(
        """async (text) => {
          const track = Object.assign(document.createElement("track"), { kind: "subtitles" });
          track.src = URL.createObjectURL(new Blob([text], { type: "text/vtt" }));
          const video = document.createElement("video");
          video.append(track);
          document.body.append(video);
          track.track.mode = "hidden";
          await new Promise((resolve, reject) => Object.assign(track, { onload: resolve, onerror: reject }));
          return [...track.track.cues].map((cue) => [cue.startTime, cue.endTime, cue.getCueAsHTML().textContent]);
        }""",
        exported(page, "vtt", TEXTS),
    )
    assert [text.split() for _, _, text in cues] == [text.split() for text in TEXTS]
    assert all(start < end for start, end, _ in cues)


def test_subtitles_are_in_order_though_a_clock_was_set_back(page: Any) -> None:
    text = page.evaluate(
        f"""async () => {{
          const entries = ({ENTRIES})(["late", "early"]).reverse().map((entry, index) =>
            ({{ ...entry, firstAt: 1.7e12 - 5000 * index, lastAt: 1.7e12 - 5000 * index }}));
          return (await import("./own/live_export.js")).vtt(entries);
        }}"""
    )
    _, *cues = text.strip().split("\n\n")
    assert [cue.split("\n")[0][:12] for cue in cues] == ["00:00:00.000", "00:00:05.000"]


@pytest.fixture
def strip(page: Any) -> Any:
    """A strip of fourteen cards, which takes one more with `bring()`."""
    page.evaluate(
        f"""async () => {{
          const {{ LiveStrip }} = await import("./own/live_strip.js");
          const {{ History }} = await import("./own/live_history.js");
          const root = Object.assign(document.createElement("section"), {{ className: "live-strip" }});
          const live = document.querySelector("beholder-live");
          live.before(root);
          live.style.display = "none";
          const history = new History();
          const strip = new LiveStrip(root, history, {{ onRate() {{}}, copy() {{}} }});
          window.bring = () => {{
            const [entry] = ({ENTRIES})([`Words ${{history.entries.length + 1}}`]);
            const {{ entry: added, isNew }} = history.add({{ ...entry, capturedAt: 1.7e12 }});
            strip.show(added, isNew);
          }};
          for (let each = 0; each < 14; each++) bring();
        }}"""
    )
    page.wait_for_function("document.querySelector('.strip-cards').getAnimations({ subtree: true }).length === 0")
    return page


def words_at(page: Any, place: dict[str, float]) -> str:
    at = "([x, y]) => document.elementFromPoint(x, y).closest('.strip-card').querySelector('.strip-words').textContent"
    return str(page.evaluate(at, [place["x"] + 20, place["y"] + 20]))


def test_a_new_card_pushes_the_others_aside_and_nothing_jumps(strip: Any) -> None:
    watch_shifts(strip)
    strip.evaluate("bring()")
    strip.locator(".strip-card", has_text="Words 15").wait_for()
    assert shifted(strip) == []


def test_cards_that_somebody_points_at_hold_still(strip: Any) -> None:
    place = strip.locator(".strip-card").nth(2).bounding_box()
    strip.mouse.move(place["x"] + 20, place["y"] + 20)
    before = words_at(strip, place)
    for _ in range(3):
        strip.evaluate("bring()")
    assert words_at(strip, place) == before
    strip.mouse.move(2, 2)
    strip.wait_for_function("document.querySelector('.strip-cards').scrollLeft === 0")


def test_cards_that_somebody_has_scrolled_to_hold_still(strip: Any) -> None:
    strip.evaluate("document.querySelector('.strip-cards').scrollLeft = 700")
    place = strip.locator(".strip-cards").first.bounding_box()
    before = words_at(strip, place)
    strip.evaluate("bring()")
    assert words_at(strip, place) == before


def test_the_newest_is_kept_when_all_others_have_a_star(page: Any) -> None:
    kept = page.evaluate(
        f"""async () => {{
          const {{ History }} = await import("./own/live_history.js");
          const history = new History();
          const texts = Array.from({{ length: 1001 }}, (_, index) => String(index));
          for (const entry of ({ENTRIES})(texts)) {{
            history.add({{ ...entry, capturedAt: 1 }}).entry.starred = true;
          }}
          history.entries.at(-1).starred = false;
          history.add({{ ...({ENTRIES})(["last"])[0], capturedAt: 1 }});
          return [history.entries.length, history.entries.at(-1).text, history.entries[0].text];
        }}"""
    )
    assert kept[:2] == [1000, "last"]


@pytest.mark.parametrize(
    ("timings", "shown"), [({"tpot_ms": 5, "total_ms": 90}, 200), ({"tpot_ms": 0, "total_ms": 40}, 125)]
)
def test_words_that_come_all_at_once_have_a_speed_too(page: Any, timings: dict[str, float], shown: float) -> None:
    event = {"usage": {"output_tokens": 5}, "timings": {"ttft_ms": 30, **timings}}
    figures = page.evaluate("async (event) => (await import('./own/live_figures.js')).figuresOf(event, 5)", event)
    assert figures["tokensPerS"] == shown
