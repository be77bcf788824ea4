"""The Live page in a real browser, with a camera that shows penguins and a farm by turns."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE, PICTURES, Visit, camera_file, chromium, until
from serving import PATIENCE_S, Served

WORDS = ".live-beside"
CARD = ".strip-card"
SCENES = re.compile("penguin|tractor|cow")


@pytest.fixture(scope="module")
def camera(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("camera") / "scenes.y4m"
    return camera_file(path, [PICTURES / "penguins.jpg", PICTURES / "farm.jpg"], hold_s=1.5)


@pytest.fixture(scope="module")
def browser(camera: Path) -> Iterator[Any]:
    with chromium(camera) as running:
        yield running


def start(visit: Visit) -> Any:
    visit.page.get_by_role("button", name="Start the camera").click()
    return visit.page


def said(page: Any, pattern: str | re.Pattern[str]) -> str:
    """Waits until the words on the page match."""
    source = pattern if isinstance(pattern, str) else pattern.pattern
    page.wait_for_function(
        "([place, source]) => new RegExp(source).test(document.querySelector(place).textContent)",
        arg=[WORDS, source],
    )
    return str(page.locator(WORDS).inner_text())


def history(page: Any) -> list[str]:
    return list(page.locator(f"{CARD} .strip-words").all_inner_texts())


def mode(page: Any, name: str) -> None:
    page.locator(".live-prompt .segments label", has_text=name).click()


def test_a_camera_is_described_in_words_that_are_right_for_each_scene(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, "penguin")
    said(page, "tractor|cow")
    until(
        page, lambda: any("penguin" in each for each in history(page)) and any("cow" in each for each in history(page))
    )
    assert page.locator(".live-mark").inner_text() == "Camera on"
    until(page, lambda: page.locator("[data-figure=received]").inner_text().isdigit())  # statistics come once a second
    figures = {cell.get_attribute("data-figure"): cell.inner_text() for cell in page.locator(".live-figures dd").all()}
    assert figures["vision"] == "64"
    assert re.fullmatch(r"\d+ ms|\d\.\d s", figures["age"])
    assert re.fullmatch(r"\d+ of \d+", figures["cached"])
    assert int(figures["received"]) >= int(figures["captioned"]) > 0
    assert "penguin" in page.locator(f"{CARD}:has-text('penguin')").first.inner_text()
    assert page.locator(f"{CARD} img").first.evaluate("picture => picture.naturalWidth") == 320


@pytest.mark.parametrize("place", [WORDS, ".live-over"])
def test_nothing_moves_while_words_come(place: str, browser: Any, served_ui: Served):
    """Words that are there stay where they are when more come, and so does what stands below them."""
    visit = Visit(browser, served_ui.url)
    words = "Three penguins stand on the ice, and behind them a tractor pulls a cow over the meadow. " * 2
    pieces = iter(words.split(" ")[:-1])
    begun: list[Callable[..., None]] = []
    visit.page.route_web_socket("**/v1/stream", lambda socket: begin_on_a_frame(socket, begun.append))
    visit.open("/ui").locator(".prompt-preset").select_option("describe")  # long ones have more room
    page = start(visit)
    until(page, lambda: bool(begun))
    (tell,) = begun
    shown = ""

    def say_more() -> None:
        nonlocal shown
        piece = next(pieces) + " "
        tell(type="response.output_text.delta", response_id="one", delta=piece)
        shown += piece
        page.wait_for_function(
            "([place, words]) => document.querySelector(place).textContent.trim().length >= words.trim().length",
            arg=[place, shown],
        )

    say_more()
    if place != WORDS:
        page.keyboard.press("f")
        page.wait_for_function("document.fullscreenElement && innerWidth === screen.width")
    page.evaluate(
        """(place) => {
          const words = document.querySelector(place);
          const where = (index) => {
            const walker = document.createTreeWalker(words, NodeFilter.SHOW_TEXT);
            for (let node; (node = walker.nextNode()); index -= node.length) {
              if (index >= node.length) continue;
              const range = document.createRange();
              range.setStart(node, index);
              range.setEnd(node, index + 1);
              const { x, y } = range.getBoundingClientRect();
              return `${Math.round(x)} ${Math.round(y + words.scrollTop)}`;
            }
          };
          window.moved = [];
          window.grown = 0;
          let last = { text: "" };
          new MutationObserver(() => {
            const form = document.querySelector(".live-prompt").getBoundingClientRect().y + scrollY;
            const now = { text: words.textContent, form };
            if (last.text && now.text.startsWith(last.text) && now.text !== last.text) {
              grown += 1;
              if (last.where && where(last.index) !== last.where) moved.push([last.text, now.text]);
            }
            if (place === ".live-beside" && (last.form ?? form) !== form) moved.push([last.form, form]);
            const end = now.text.replace(/\\S*$/, "").trimEnd().length; // a word that is still being written may wrap
            last = { ...now, index: end - 1, where: end > 0 ? where(end - 1) : undefined };
          }).observe(words, { childList: true, characterData: true, subtree: true });
        }""",
        place,
    )
    for _ in range(30):
        say_more()
    assert page.evaluate("grown") == 29
    assert page.evaluate("moved") == []
    visit.close()


def test_a_screen_reader_hears_whole_captions_and_not_too_many(visit: Callable[..., Visit]):
    page = visit().page
    page.wait_for_selector(".live-aloud", state="attached")
    page.evaluate("""() => {
      window.heard = [];
      const region = document.querySelector(".live-aloud");
      new MutationObserver(() => heard.push([performance.now(), region.textContent]))
        .observe(region, { childList: true, characterData: true, subtree: true });
    }""")
    mode(page, "Always")
    page.get_by_role("button", name="Start the camera").click()
    until(page, lambda: len(page.evaluate("heard")) >= 3)
    heard = page.evaluate("heard")
    until(
        page, lambda: {text for _, text in heard} <= set(history(page))
    )  # a card comes with its picture, a little later
    assert all(later[0] - earlier[0] > 2900 for earlier, later in pairwise(heard))
    assert all(later[1] != earlier[1] for earlier, later in pairwise(heard))


def test_reading_aloud_takes_voices_of_this_device_only(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script("""
      window.spoken = [];
      window.SpeechSynthesisUtterance = class { constructor(text) { this.text = text; } };
      Object.defineProperty(window, "speechSynthesis", { value: {
        getVoices: () => [{ name: "far", localService: false, default: true, lang: "en" },
                          { name: "near", localService: true, lang: "en" }],
        speak: (words) => { spoken.push([words.voice.name, words.text]); setTimeout(() => words.onend(), 50); },
        cancel: () => {},
      } });
    """)
    visit.open("/ui")
    page = start(visit)
    page.get_by_role("button", name="Read aloud").click()
    until(page, lambda: len(page.evaluate("spoken")) >= 2)
    spoken = page.evaluate("spoken")
    assert {voice for voice, _ in spoken} == {"near"}
    until(page, lambda: {text for _, text in spoken} <= set(history(page)))
    visit.close()


@pytest.mark.parametrize("facing", ["", "environment"], ids=["unsaid", "said"])
def test_the_other_camera_is_another_one(browser: Any, served_ui: Served, facing: str):
    """Phones say which way their cameras look; most others do not."""
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script(
        """((facing) => {
          window.wanted = [];
          const devices = navigator.mediaDevices;
          const open = devices.getUserMedia.bind(devices);
          const two = ["one", "two"].map((deviceId) => ({ deviceId, kind: "videoinput", label: deviceId }));
          devices.enumerateDevices = async () => two;
          devices.getUserMedia = async ({ video }) => {
            wanted.push(video);
            const stream = await open({ video: true });
            const settings = { deviceId: video.deviceId?.exact ?? "one" };
            if (facing) settings.facingMode = video.facingMode.ideal;
            stream.getVideoTracks()[0].getSettings = () => settings;
            return stream;
          };
          const Plain = WebSocket;
          window.begun = []; // sessions, each once its camera is there
          window.WebSocket = class extends Plain { constructor(...given) { super(...given); begun.push(this); } };
        })("""
        + json.dumps(facing)
        + ")"
    )
    visit.open("/ui")
    page = start(visit)
    for presses in (1, 2):
        page.get_by_role("button", name="Other camera").click()
        page.wait_for_function("(count) => begun.length === count", arg=presses + 1)
    if facing:
        assert page.evaluate("wanted.map((each) => each.facingMode.ideal)") == ["environment", "user", "environment"]
    else:
        assert page.evaluate("wanted.map((each) => each.deviceId?.exact)") == [None, "two", "one"]
    visit.close()


def test_a_device_without_voices_says_so(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script("speechSynthesis.getVoices = () => [{ name: 'far', localService: false }]")
    page = visit.open("/ui")
    page.wait_for_selector(".live-stage")
    page.keyboard.press("r")
    page.get_by_text("This device has no voice of its own to read with.").wait_for()
    visit.close()


def test_an_interval_is_the_one_that_stands_there(visit: Callable[..., Visit]):
    page = visit().page
    mode(page, "Every …")
    field = page.locator(".prompt-every input")
    for typed, kept in (("0", "0.2"), ("", "2"), ("7", "7")):
        field.fill(typed)
        field.blur()
        assert field.input_value() == kept


def test_what_is_asked_can_be_changed_in_mid_stream(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    page.locator(".prompt-text").fill("How many penguins are there?")
    said(page, r"^\W*(5|[Ff]ive)\b")
    page.locator(".prompt-preset").select_option("list_objects")
    said(page, "penguin.*|tractor.*")
    assert page.locator(".live-mark").is_visible()


def test_a_preset_that_needs_a_question_shows_the_one_that_it_asks(visit: Callable[..., Visit]):
    page = visit().page
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda data: sent.append(str(data))))
    page.locator(".prompt-preset").select_option("yes_no")
    asked = page.get_by_label("Your question").input_value()
    assert asked
    page.get_by_role("button", name="Start the camera").click()
    said(page, "^(Yes|No)$")
    assert any('"yes_no"' in data and json.dumps(asked) in data for data in sent)


def test_two_tabs_are_served_alike(visit: Callable[..., Visit]):
    pages = [start(visit()), start(visit())]
    for page in pages:
        said(page, "penguin")
    for page in pages:
        said(page, "tractor|cow")


def test_nothing_is_sent_until_start_and_snap_sends_one_picture(visit: Callable[..., Visit]):
    page = visit().page
    sockets: list[Any] = []
    page.on("websocket", lambda socket: sockets.append(socket))
    mode(page, "Snap")
    received = page.locator("[data-figure=received]")
    page.wait_for_timeout(300)
    assert sockets == []
    page.get_by_role("button", name="Start the camera").click()
    page.wait_for_selector('beholder-live[data-link="live"]')
    page.wait_for_timeout(600)
    assert received.inner_text() == "–"
    page.keyboard.press("Space")
    said(page, SCENES)
    page.locator(CARD).wait_for()
    until(page, lambda: received.inner_text() == "1")
    page.wait_for_timeout(1200)  # statistics come once a second
    assert received.inner_text() == "1"
    assert len(history(page)) == 1


def test_on_a_phone_everything_fits_and_can_be_touched(visit: Callable[..., Visit]):
    page = start(visit(viewport=PHONE, has_touch=True))
    said(page, SCENES)
    page.locator(CARD).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    for button in page.locator("beholder-live button:visible").all():
        box = button.bounding_box()
        assert min(box["width"], box["height"]) >= 40, button.inner_text() or button.get_attribute("aria-label")


def test_every_control_has_a_name(visit: Callable[..., Visit]):
    page = start(visit())
    page.locator(CARD).first.wait_for()
    page.locator(".live-more summary").click()
    nameless = page.evaluate("""() =>
      [...document.querySelectorAll("beholder-live :is(button, input, textarea, select)")]
      .filter((each) => each.checkVisibility())
      .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.[0]?.textContent.trim()))
      .map((each) => each.outerHTML)""")
    assert nameless == []


def test_a_refused_camera_is_explained_and_a_file_works_without(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError'); }"
    )
    visit.open("/ui")
    page = start(visit)
    page.get_by_role("alert").filter(has_text="Allow it at the camera").wait_for()
    page.locator("[name=file]").set_input_files(PICTURES / "farm.jpg")
    said(page, "tractor|cow")
    assert page.locator(".live-mark").inner_text() == "File open"
    visit.close()


def test_over_plain_http_the_page_says_why_there_is_no_camera(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script("Object.defineProperty(window, 'isSecureContext', { value: false })")
    page = visit.open("/ui")
    page.get_by_text("beholder serve --host 0.0.0.0 --https-self-signed").wait_for()
    assert page.get_by_role("button", name="Start the camera").count() == 0
    assert page.get_by_role("button", name="Open a file").is_visible()
    visit.close()


def test_hiding_the_page_lets_go_of_the_camera_and_nothing_is_stored(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    page.evaluate("window.track = document.querySelector('beholder-live video').srcObject.getTracks()[0]")
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", { value: true, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    assert page.evaluate("track.readyState") == "ended"
    page.get_by_role("alert").filter(has_text="this page was hidden").wait_for()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


@pytest.mark.parametrize("how", ["stop", "hide", "file"])
def test_a_camera_that_is_given_too_late_is_let_go_at_once(browser: Any, served_ui: Served, how: str):
    """Somebody thinks for long about the browser's question, and does something else meanwhile."""
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script("""
      const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
      window.given = [];
      navigator.mediaDevices.getUserMedia = async (wanted) => {
        await new Promise((resolve) => (window.allow = resolve));
        given.push(await ask(wanted));
        return given.at(-1);
      };
    """)
    visit.open("/ui")
    page = start(visit)
    page.wait_for_function("Boolean(window.allow)")
    if how == "stop":
        page.keyboard.press("Escape")
        page.mouse.click(5, 500)
        page.keyboard.press("s")
    elif how == "hide":
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    else:
        page.locator("[name=file]").set_input_files(PICTURES / "farm.jpg")
        said(page, "tractor|cow")
    page.evaluate("allow()")
    page.wait_for_function("given[0]?.getTracks().every(({ readyState }) => readyState === 'ended')")
    running = page.locator("beholder-live").get_attribute("data-phase") == "running"
    assert running == (how == "file")
    if how == "file":
        assert page.locator(".live-mark").inner_text() == "File open"
        assert page.locator(".live-picture img").is_visible()
    else:
        assert page.title() == "Beholder"
    visit.close()


def test_words_about_something_else_do_not_stay_when_another_picture_is_opened(visit: Callable[..., Visit]):
    page = visit().page
    page.locator("[name=file]").set_input_files(PICTURES / "farm.jpg")
    said(page, "tractor|cow")
    page.evaluate(
        "new MutationObserver(() => (window.emptied ||= !document.querySelector('.live-beside').textContent))"
        ".observe(document.querySelector('.live-beside'), { childList: true })"
    )
    page.locator("[name=file]").set_input_files(PICTURES / "penguins.jpg")
    said(page, "penguin")
    assert page.evaluate("emptied")


@pytest.mark.parametrize(
    "text", ["ثلاثة طيور \u2067Fox\u2069 على الجليد", "Donaudampfschifffahrtskapitän" * 9, "三只企鹅站在冰面上。" * 40]
)
@pytest.mark.parametrize("viewport", [PHONE, {"width": 1280, "height": 800}], ids=["phone", "laptop"])
def test_any_script_and_any_length_stays_in_its_place(
    browser: Any, served_ui: Served, text: str, viewport: dict[str, int]
):
    visit = Visit(browser, served_ui.url, viewport=viewport)
    visit.page.route_web_socket("**/v1/stream", lambda socket: say_on_a_frame(socket, text))
    visit.open("/ui")
    page = start(visit)
    page.locator(CARD).wait_for()
    for place in (".strip-words", WORDS, ".live-over"):
        if place == ".live-over":
            page.keyboard.press("f")
            page.wait_for_selector(f"{place}:visible")
        inside = page.locator(place).evaluate(
            "place => [place.scrollWidth <= place.clientWidth, getComputedStyle(place).direction]"
        )
        assert inside == [True, "rtl" if "ط" in text else "ltr"], place
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    visit.close()


def begin_on_a_frame(socket: Any, begun: Callable[[Callable[..., None]], None]) -> None:
    """A server of one answer, `one`, which the first frame begins; `begun` gets what tells events of it."""
    numbers = count(1)

    def tell(**event: Any) -> None:
        socket.send(json.dumps({**event, "seq": next(numbers)}))

    def hear(message: str | bytes) -> None:
        if isinstance(message, str) or told:
            return
        told.append(json.loads(message[2 : 2 + int.from_bytes(message[:2], "big")])["id"])
        tell(type="response.created", response_id="one", frame_ids=told)
        begun(tell)

    told: list[int] = []
    socket.on_message(hear)
    session = {"model": "m", "prompt": "What is it?"}
    tell(
        type="session.created",
        session_id="s",
        resume_token="t",
        limits={},
        capabilities={"presets": []},
        session=session,
    )


def say_on_a_frame(socket: Any, text: str) -> None:
    """A server of one answer, given to the first frame in pieces."""

    def say(tell: Callable[..., None]) -> None:
        for start in range(0, len(text), 7):
            tell(type="response.output_text.delta", response_id="one", delta=text[start : start + 7])
        usage = {"input_tokens": 84, "image_tokens": 64, "cached_tokens": 12, "output_tokens": 5}
        timings = {"ttft_ms": 4, "tpot_ms": 5}
        done = {"status": "completed", "text": text, "frame_age_ms": 5, "usage": usage, "timings": timings}
        tell(type="response.done", response_id="one", **done)

    begin_on_a_frame(socket, say)


def test_a_shared_screen_goes_on_while_the_page_is_hidden(visit: Callable[..., Visit]):
    page = visit().page
    page.get_by_role("button", name="Share a screen").click()
    said(page, r"\w")
    assert page.locator(".live-mark").inner_text() == "Screen shared"
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", { value: true, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    received = page.locator("[data-figure=received]")
    until(page, lambda: received.inner_text().isdigit())
    count = int(received.inner_text())
    until(page, lambda: int(received.inner_text()) > count)
    page.evaluate("document.querySelector('beholder-live video').srcObject.getTracks()[0].stop()")
    page.get_by_role("button", name="Stop").click()
    assert page.get_by_role("button", name="Start the camera").is_visible()


def test_a_camera_that_is_on_is_told_in_every_tab_of_the_page(visit: Callable[..., Visit]):
    page = start(visit())
    mark = page.locator(".head-watching")
    mark.filter(has_text="Camera on").wait_for()
    page.get_by_role("tab", name="Engine").click()
    assert mark.is_visible()
    assert page.title().startswith("● Camera on")
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("button", name="Stop").click()
    mark.wait_for(state="hidden")
    assert page.title() == "Beholder"


def test_what_was_said_can_be_taken_along_as_jsonl_csv_and_webvtt(visit: Callable[..., Visit], tmp_path: Path):
    page = start(visit())
    until(page, lambda: len(history(page)) >= 3)
    page.get_by_role("button", name="Stop").click()

    def saved(name: str) -> str:
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        path = tmp_path / name
        download.value.save_as(path)
        assert download.value.suggested_filename.endswith("." + name.lower().removeprefix("web"))
        return path.read_bytes().decode()

    def saved_lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in saved("JSONL").splitlines()]

    until(
        page, lambda: [line["text"] for line in saved_lines()] == history(page)[::-1]
    )  # the last card may still be made
    cards = history(page)[::-1]
    page.locator(CARD).last.get_by_role("button", name="Star").click()
    page.locator(CARD).last.get_by_role("button", name="Not good").click()
    lines = saved_lines()
    assert [line["text"] for line in lines] == cards
    assert (lines[0]["starred"], lines[0]["rating"]) == (True, "down")
    assert all(line["vision_tokens"] == 64 and line["prompt"] for line in lines)
    rows = list(csv.DictReader(saved("CSV").splitlines()))
    assert [row["text"] for row in rows] == cards
    assert [row["response_id"] for row in rows] == [line["response_id"] for line in lines]
    head, *cues = saved("WebVTT").strip().split("\n\n")
    assert head == "WEBVTT"
    assert [cue.split("\n", 1)[1] for cue in cues] == cards
    times = [re.match(r"(\d\d:\d\d:\d\d\.\d{3}) --> (\d\d:\d\d:\d\d\.\d{3})\n", cue) for cue in cues]
    assert all(found and found[1] < found[2] for found in times)
    page.get_by_label("starred only").check()
    assert len(saved("JSONL").splitlines()) == 1


def test_thumbs_reach_the_server(visit: Callable[..., Visit], served_ui: Served):
    def counted(rating: str) -> int:
        told = served_ui.client.get("/metrics").text
        found = re.findall(rf'^beholder_stream_feedback_total{{.*rating="{rating}".*}} (\d+)', told, re.MULTILINE)
        return sum(map(int, found))

    before = counted("up")
    page = start(visit())
    page.locator(CARD).first.get_by_role("button", name="Good", exact=True).click()
    until(page, lambda: counted("up") == before + 1)


def test_a_server_that_dies_is_told_of_and_the_session_goes_on_when_it_is_back(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.expect_errors("ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|WebSocket|503|CONNECTION")
    visit.open("/ui")
    page = start(visit)
    said(page, SCENES)
    os.kill(served_ui.process.pid, signal.SIGSTOP)  # nobody restarts what dies until the page has been looked at
    try:
        served_ui.kill("server")
        page.wait_for_selector('beholder-live[data-link="lost"]')
        assert "goes on by itself" in page.locator(".live-link").inner_text()
    finally:
        os.kill(served_ui.process.pid, signal.SIGCONT)
    page.wait_for_selector('beholder-live[data-link="live"]')
    page.wait_for_selector('beholder-live[data-stale="false"]')
    count = len(history(page))
    until(page, lambda: len(history(page)) > count + 1)
    assert page.locator(".live-mark").is_visible()
    visit.close()


def test_what_the_server_refuses_is_told_in_its_words_until_it_is_mended(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    page = visit.open("/ui")
    page.route(
        "**/v1/presets",
        lambda route: route.fulfill(
            json={
                "data": [
                    {
                        "id": "one",
                        "title": "Too hot",
                        "description": "",
                        "prompt": "Hm?",
                        "sampling": {"temperature": 9},
                    },
                    {"id": "two", "title": "Right", "description": "", "prompt": "Describe it.", "sampling": {}},
                ]
            }
        ),
    )
    page.reload()
    start(visit)
    warning = page.get_by_role("alert").filter(has_text="temperature")
    warning.wait_for()
    assert "expected" in warning.inner_text()
    page.locator(".prompt-preset").select_option("two")
    warning.wait_for(state="hidden")
    said(page, SCENES)
    visit.close()


def test_a_lost_connection_is_taken_up_where_it_broke(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.context.add_init_script("""
      window.sockets = [];
      const Plain = WebSocket;
      window.WebSocket = class extends Plain { constructor(...given) { super(...given); sockets.push(this); } };
    """)
    heard: list[dict[str, Any]] = []
    visit.page.on(
        "websocket", lambda socket: socket.on("framereceived", lambda payload: heard.append(json.loads(payload)))
    )
    visit.open("/ui")
    page = start(visit)
    said(page, SCENES)
    page.evaluate("sockets[0].close(4000)")
    until(page, lambda: page.evaluate("sockets.length") >= 2)
    until(page, lambda: any(event["type"] == "session.resumed" for event in heard))
    page.wait_for_selector('beholder-live[data-link="live"]')
    count = len(history(page))
    until(page, lambda: len(history(page)) > count)
    [resumed] = [event for event in heard if event["type"] == "session.resumed"]
    first = next(event for event in heard if event["type"] == "session.created")
    assert resumed["session_id"] == first["session_id"]
    visit.close()


def test_a_picture_that_is_taken_while_the_connection_closes_is_skipped(visit: Callable[..., Visit]):
    """Sending it would say so in the browser's console, for which visits look."""
    page = visit().page
    skipped = page.evaluate("""async () => {
      let socket;
      const Plain = WebSocket;
      window.WebSocket = class extends Plain { constructor(...given) { super(...given); socket = this; } };
      const { StreamClient } = await import("/ui/own/stream_client.js");
      const client = new StreamClient();
      const done = client.run();
      while (!client.ready) await new Promise((wake) => setTimeout(wake, 10));
      socket.close(4000);
      const id = client.frame(new Blob(["picture"]));
      client.close();
      await done;
      window.WebSocket = Plain;
      return [id, client.skipped];
    }""")
    assert skipped == [None, 1]


def test_a_picture_that_stands_still_for_long_is_marked(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    stale = page.locator(".live-stale")
    stale.wait_for(state="hidden")  # on a busy machine the camera itself may stand still for a while
    page.evaluate("document.querySelector('beholder-live video').pause()")
    stale.filter(has_text=re.compile(r"No new picture for \d+ s")).wait_for()
    page.evaluate("document.querySelector('beholder-live video').play()")
    stale.wait_for(state="hidden")


def test_words_of_a_lost_connection_are_marked_as_old(browser: Any, served_ui: Served):
    sockets: list[Any] = []

    def answer(socket: Any) -> None:
        sockets.append(socket)
        if len(sockets) == 1:
            say_on_a_frame(socket, "A fox.")
        else:
            socket.close(code=1012)

    visit = Visit(browser, served_ui.url)
    visit.page.route_web_socket("**/v1/stream", answer)
    visit.open("/ui")
    page = start(visit)
    said(page, "fox")
    sockets[0].close(code=1012)
    page.locator(".live-stale", has_text=re.compile(r"These words are \d+ s old")).wait_for()
    colour = "getComputedStyle(document.querySelector('.live-beside')).color"
    page.wait_for_function(f"{colour} === getComputedStyle(document.querySelector('.live-link')).color")
    visit.close()


def test_where_a_key_is_needed_the_page_asks_for_it_and_an_open_page_keeps_no_server_from_ending(
    browser: Any, tiny_model: Path
):
    with Served(tiny_model, api_key="open-sesame", grace_s=1000) as served:
        visit = Visit(browser, served.url)
        visit.expect_errors("401|CONNECTION|WebSocket|ERR_|503")
        page = visit.open("/ui")
        dialog = page.get_by_role("dialog")
        for given in ("wrong", "open-sesame"):
            dialog.get_by_label("Key").fill(given)
            dialog.get_by_role("button", name="Continue").click()
        page.locator(".prompt-preset option").first.wait_for(state="attached")
        start(visit)
        page.wait_for_selector('beholder-live[data-link="live"]')
        until(page, lambda: bool(page.locator("[data-figure=received]").inner_text().isdigit()))
        assert page.evaluate("localStorage.length") == 0
        served.process.terminate()
        assert served.process.wait(PATIENCE_S) == 0  # far less than running answers get
        page.wait_for_selector('beholder-live[data-link="lost"]')
        page.get_by_role("alert").filter(has_text="does not answer").wait_for()
        visit.close()


def test_on_a_wall_the_controls_go_away_and_come_back(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    page.keyboard.press("Tab")
    page.keyboard.press("f")
    page.wait_for_function("getComputedStyle(document.querySelector('.live-bar')).opacity === '0'")
    page.keyboard.press("Tab")
    page.wait_for_function("getComputedStyle(document.querySelector('.live-bar')).opacity === '1'")


def test_that_words_were_copied_is_told_to_everybody(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    page.evaluate("""() => {
      window.told = [];
      const region = document.querySelector(".live-said");
      new MutationObserver(() => told.push(region.textContent)).observe(region, { childList: true });
    }""")
    page.get_by_role("button", name="Copy the words").click()
    page.wait_for_function("told.some((words) => words.includes('Copied'))")
    page.evaluate("""() => {
      Object.defineProperty(navigator, "clipboard", { value: undefined });
      document.execCommand = () => false;
    }""")
    page.keyboard.press("c")
    page.wait_for_function("told.some((words) => words.includes('did not let it be copied'))")


def test_what_is_told_moves_nothing_that_stands_below(visit: Callable[..., Visit]):
    for viewport in (PHONE, {"width": 1280, "height": 800}):
        begun = visit(viewport=viewport)
        begun.page.add_init_script(
            "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError'); }"
        )
        begun.page.reload()
        form = begun.page.locator(".live-prompt")
        form.wait_for()
        form.locator(".prompt-preset option").first.wait_for(state="attached")
        begun.page.evaluate("document.fonts.ready")
        before = form.bounding_box()
        start(begun).get_by_role("alert").filter(has_text="Allow it at the camera").wait_for()
        assert form.bounding_box() == before


def test_signs_of_several_characters_are_whole_while_they_come(browser: Any, served_ui: Served):
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    visit = Visit(browser, served_ui.url)
    visit.page.route_web_socket("**/v1/stream", lambda socket: say_on_a_frame(socket, f"A family {family} waves"))
    visit.page.add_init_script("""
      addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
        const words = document.querySelector(".live-beside")?.textContent;
        if (words) (window.painted ??= new Set()).add(words);
      }).observe(document.body, { subtree: true, childList: true }));
    """)
    visit.open("/ui")
    page = start(visit)
    said(page, "waves")
    assert all(family in words or not any(sign in words for sign in family) for words in page.evaluate("[...painted]"))
    visit.close()


def test_on_a_wall_the_words_stand_over_the_picture(visit: Callable[..., Visit]):
    page = start(visit())
    said(page, SCENES)
    page.keyboard.press("f")
    over = page.locator(".live-over")
    over.filter(has_text=SCENES).wait_for()
    stage = page.locator(".live-stage").bounding_box()
    assert stage["width"] == page.viewport_size["width"]
    page.keyboard.press("Escape")
    over.wait_for(state="hidden")


def test_an_answer_that_cannot_be_kept_does_not_keep_out_the_next_ones(browser: Any, served_ui: Served):
    visit = Visit(browser, served_ui.url)
    visit.expect_errors("An answer could not be kept")
    page = visit.open("/ui")
    page.evaluate(
        """() => { const undrawable = { width: 2, height: 2, close() {} };
          window.failed = 0;
          window.createImageBitmap = async () => (failed++ ? Promise.reject() : undrawable); }"""
    )
    start(visit)
    page.locator(CARD).first.wait_for()
    assert page.evaluate("failed") > 1
    assert any("could not be kept" in error for error in visit.errors)
    visit.close()


def test_a_picture_for_which_the_browser_has_no_memory_has_no_small_copy(visit: Callable[..., Visit]):
    begun = visit()
    small = begun.page.evaluate(
        """async () => {
          const { thumbnailOf } = await import("/ui/own/thumbnail.js");
          const blob = await new Promise((resolve) => document.createElement("canvas").toBlob(resolve));
          HTMLCanvasElement.prototype.toBlob = (take) => take(null);
          return thumbnailOf(blob);
        }"""
    )
    assert small == ""
