"""The tab Picture in a real browser: bring pictures and clips any way, ask, ask on, stop, try again."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CLIPS, PHONE, PICTURES, ROOT, Visit
from clips import clip
from PIL import Image
from serving import ENDLESS, Served

ANSWER = ".turn:last-child .turn-answer"


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Any:
    return open_tab(visit())


def open_tab(visit: Visit) -> Any:
    visit.page.get_by_role("tab", name="Picture").click()
    visit.page.wait_for_selector("beholder-picture .picture-page")
    return visit.page


def bring(page: Any, *files: Path) -> None:
    page.set_input_files(".picture-files", [str(file) for file in files])


def ask(page: Any, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def answered(page: Any, num_turns: int, state: str = "done") -> str:
    """Waits for the end of the last of so many turns; gives its answer."""
    page.wait_for_function(
        "([count, state]) => { const turns = [...document.querySelectorAll('.turn')];"
        " return turns.length === count && turns.at(-1).dataset.state === state; }",
        arg=[num_turns, state],
    )
    return str(page.locator(ANSWER).inner_text())


def sent(page: Any) -> list[dict[str, Any]]:
    """The chat requests of a page from now on, as they are made."""
    requests: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: requests.append(request.post_data_json) if request.url.endswith("/chat/completions") else None,
    )
    return requests


def deliver(page: Any, kind: str, file: Path) -> None:
    """Pastes or drops a file as a browser would tell the page of it."""
    page.evaluate(
        """([kind, name, data]) => {
          const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
          const carried = new DataTransfer();
          carried.items.add(new File([bytes], name, { type: "image/jpeg" }));
          const options = { bubbles: true, cancelable: true, dataTransfer: carried, clipboardData: carried };
          const place = document.querySelector("beholder-picture");
          if (kind === "paste") document.dispatchEvent(new ClipboardEvent("paste", options));
          else for (const name of ["dragover", "drop"]) place.dispatchEvent(new DragEvent(name, options));
        }""",
        [kind, file.name, base64.b64encode(file.read_bytes()).decode()],
    )


def test_a_picture_is_described_and_asked_about(page: Any) -> None:
    requests = sent(page)
    bring(page, PICTURES / "kitchen.jpg")
    assert answered(page, 1) == "A knife, a teapot and a lemon."
    ask(page, "What is in the center of the picture?")
    assert answered(page, 2) == "A teapot."
    first, second = requests
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    (picture, _), (again, _) = first["messages"][0]["content"], second["messages"][0]["content"]
    assert re.fullmatch(r"file-[0-9a-f]{32}", picture["image_url"]["url"]), "The picture is sent once, then named"
    assert picture == again
    facts = page.locator(".turn:last-child .turn-facts").inner_text()
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) tokens cached", facts).groups())
    assert 64 < cached < prompt, "the second turn finds the first one's beginning"
    page.wait_for_function("document.querySelector('.picture-numbers').textContent.includes('all of them came from')")


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_a_picture_can_be_pasted_and_dropped(page: Any, way: str) -> None:
    deliver(page, way, PICTURES / "farm.jpg")
    assert {"cow", "tractor"} <= set(re.findall(r"\w+", answered(page, 1)))


def test_what_is_pasted_into_the_question_is_a_question(page: Any) -> None:
    bring(page, PICTURES / "farm.jpg")
    answered(page, 1)
    page.get_by_label("Your question").fill("Is there a cow?")
    page.evaluate("document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: new DataTransfer()}))")
    assert page.locator(".picture-thumb").count() == 1


def test_several_pictures(page: Any) -> None:
    requests = sent(page)
    bring(page, PICTURES / "kitchen.jpg", PICTURES / "street.jpg")
    answered(page, 1)
    assert page.locator(".turn-question").inner_text() == "Describe the pictures. with 1, 2"
    bring(page, PICTURES / "farm.jpg")
    page.get_by_role("button", name="Take picture 3 away").click()
    assert page.locator(".picture-thumb").count() == 2
    bring(page, PICTURES / "fruit.jpg")
    ask(page, "How many strawberries are in the picture?")
    answered(page, 2)
    kinds = [[part["type"] for part in message["content"]] for message in requests[-1]["messages"][::2]]
    assert kinds == [["image_url", "image_url", "text"], ["image_url", "text"]]
    page.get_by_role("button", name="Show picture 1").click()
    page.wait_for_function("document.querySelector('.picture-numbers').textContent.startsWith('640 × 480')")


def test_a_clip_shows_the_frames_that_were_looked_at(page: Any) -> None:
    bring(page, CLIPS / "car.mp4")
    answered(page, 1)
    ask(page, "In which direction does the car move?")
    assert answered(page, 2) == "The car moves to the right."
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".seen-film img")
    assert page.locator(".seen-film figcaption").all_inner_texts() == ["0:00.0", "0:01.3", "0:02.6", "0:03.9"]
    assert "4 frames of 256 × 256: 256 tokens" in page.locator(".picture-numbers").inner_text()


def test_a_clip_that_the_browser_cannot_play_is_shown_as_the_server_decodes_it(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "old.avi"
    file.write_bytes(clip("avi", 50))
    bring(page, file)
    answered(page, 1)
    page.wait_for_selector(".picture-stage img.picture-own")
    shown = page.locator(".picture-stage img").screenshot()
    assert Image.open(io.BytesIO(shown)).convert("L").getextrema() > (0, 100), "its first frame: bars on grey"


def test_files_can_be_chosen_with_the_keyboard_alone(page: Any) -> None:
    page.get_by_role("tab", name="Picture").focus()
    with page.expect_file_chooser() as chooser:
        for _ in range(6):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('.picture-choose')"):
                break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
    chooser.value.set_files(str(PICTURES / "desk.jpg"))
    assert "laptop" in answered(page, 1)


def test_what_the_model_sees_follows_the_detail(page: Any) -> None:
    requests = sent(page)
    bring(page, PICTURES / "kitchen.jpg")
    answered(page, 1)
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".picture-stage[data-kind=whole] img")
    assert "one tile of 256 × 256: 64 tokens" in page.locator(".picture-numbers").inner_text()
    page.get_by_label("Detail").select_option("high")
    page.wait_for_selector(".seen-grid")
    assert page.locator(".seen-grid img").count() == 4
    assert "5 tiles of 256 × 256: 320 tokens" in page.locator(".picture-numbers").inner_text()
    ask(page, "Is there a teapot?")
    answered(page, 2)
    assert requests[-1]["messages"][0]["content"][0]["image_url"]["detail"] == "high"


@pytest.fixture(scope="module")
def own_server() -> Iterator[Served]:
    """Whose endless answers wait."""
    with Served(ROOT / "samples" / "model", held=True, workers=1, speculation="none") as served:
        yield served


def make_it_long(route: Any) -> None:
    """Lets the model write on beyond its end, as far as a held server lets it."""
    body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": ENDLESS}
    route.continue_(post_data=json.dumps(body))


def test_stop_keeps_what_was_said_and_frees_the_engine(browser: Any, own_server: Served) -> None:
    begun = Visit(browser, own_server.url)
    begun.open()
    page = open_tab(begun)
    page.route("**/v1/chat/completions", make_it_long)
    bring(page, PICTURES / "kitchen.jpg")
    page.wait_for_function("document.querySelector('.turn-answer')?.textContent.length > 40")
    page.get_by_role("button", name="Stop").click()
    said = answered(page, 1, "stopped")
    assert said
    own_server.wait_until_idle()
    assert page.locator(ANSWER).inner_text() == said
    page.unroute("**/v1/chat/completions")
    ask(page, "Is there a teapot?")
    assert answered(page, 2).startswith("Yes")
    begun.close()


def test_stop_waits_for_no_upload(page: Any) -> None:
    uploads: list[Any] = []
    page.route("**/v1/images", lambda route: uploads.append(route))
    with page.expect_request("**/v1/images"):
        bring(page, PICTURES / "kitchen.jpg")
    page.get_by_role("button", name="Stop").click()
    answered(page, 1, "stopped")
    uploads[0].continue_()
    page.get_by_role("button", name="Ask again").click()
    assert answered(page, 1)
    assert len(uploads) == 1, "what is under way is not begun again"


def test_nothing_of_an_answer_that_was_left_comes_into_a_new_conversation(browser: Any, own_server: Served) -> None:
    begun = Visit(browser, own_server.url)
    begun.open()
    page = open_tab(begun)
    page.route("**/v1/chat/completions", make_it_long)
    bring(page, PICTURES / "kitchen.jpg")
    page.wait_for_selector(".turn[data-state=answering]")
    page.get_by_role("button", name="Begin anew").click()
    page.unroute("**/v1/chat/completions")
    bring(page, PICTURES / "farm.jpg")
    assert "cow" in answered(page, 1)
    assert page.locator(".turn").count() == 1
    assert page.get_by_role("button", name="Ask", exact=True).is_visible()
    begun.close()


def test_another_answer_is_drawn_anew(page: Any) -> None:
    requests = sent(page)
    bring(page, PICTURES / "kitchen.jpg")
    answered(page, 1)
    page.get_by_role("button", name="Another answer").click()
    page.wait_for_function("document.querySelectorAll('.turn').length === 1")
    answered(page, 1)
    first, again = requests
    assert "temperature" not in first
    assert again["temperature"] > 0
    assert again["messages"] == first["messages"]


def test_questions_of_the_presets_are_offered(page: Any) -> None:
    bring(page, PICTURES / "welcome.png")
    answered(page, 1)
    page.get_by_role("button", name="Read text").click()
    assert "Welcome" in answered(page, 2)


def test_no_picture_is_told_in_the_servers_words(visit: Callable[..., Visit], tmp_path: Path) -> None:
    begun = visit()
    begun.expect_errors("status of 400")
    page = open_tab(begun)
    broken = tmp_path / "broken.png"
    broken.write_bytes((PICTURES / "cafe.png").read_bytes()[:400])
    bring(page, broken)
    told = page.get_by_role("alert").filter(has_text="broken.png: the PNG picture is cut off")
    told.wait_for()
    page.wait_for_function("document.querySelectorAll('.turn').length === 0")
    assert page.get_by_role("button", name="Choose files").is_visible(), "as if nothing had been brought"
    bring(page, PICTURES / "kitchen.jpg")
    assert "teapot" in answered(page, 1)
    assert not told.is_visible()


def test_what_cannot_be_read_goes_and_the_others_are_described(visit: Callable[..., Visit], tmp_path: Path) -> None:
    begun = visit()
    begun.expect_errors("status of 4")
    page = open_tab(begun)
    requests = sent(page)
    for name in ("notes.txt", "empty.png"):
        (tmp_path / name).write_text("no picture" * (name != "empty.png"))
    bring(page, PICTURES / "kitchen.jpg", tmp_path / "notes.txt", PICTURES / "street.jpg", tmp_path / "empty.png")
    answered(page, 1)
    assert page.locator(".picture-thumb").count() == 2
    told = page.get_by_role("alert").filter(has_text="notes.txt: ")
    assert "notes.txt: This is text, not a picture that can be read" in told.inner_text()
    assert "empty.png: " in told.inner_text()
    assert page.locator(".turn-question").inner_text() == "Describe the pictures. with 1, 2"
    assert [part["type"] for part in requests[-1]["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    told.get_by_role("button", name="Close").click()
    assert not told.is_visible()
    # One that is only shown so far, and asked about before the server has looked at it:
    page.route("**/v1/previews", lambda route: None)
    page.get_by_label("Your question").fill("What is on this one?")
    bring(page, tmp_path / "notes.txt")
    page.keyboard.press("Enter")
    told.wait_for()
    page.wait_for_function("document.querySelectorAll('.turn').length === 1")
    assert page.get_by_label("Your question").input_value() == "What is on this one?", "to be asked about another"
    assert page.get_by_role("button", name="Another answer").is_visible()
    page.unroute("**/v1/previews")
    ask(page, "Is there a teapot?")
    assert answered(page, 2)


def test_a_folder_is_told_from_a_server_that_does_not_answer(page: Any) -> None:
    page.evaluate(
        """() => { Blob.prototype.slice = () => ({ arrayBuffer: () => Promise.reject(new DOMException("gone")) }); }"""
    )
    bring(page, PICTURES / "kitchen.jpg")
    page.get_by_role("alert").filter(has_text="kitchen.jpg: This cannot be read").wait_for()
    assert not page.locator(".picture-thumb:visible").count()


def test_a_question_that_failed_does_not_spoil_the_next(visit: Callable[..., Visit]) -> None:
    begun = visit()
    begun.expect_errors("status of 400")
    page = open_tab(begun)
    bring(page, PICTURES / "kitchen.jpg")
    answered(page, 1)
    ask(page, "What is it? " * 2000)
    answered(page, 2, "failed")
    assert "context" in page.locator(".turn:last-child .turn-error").inner_text()
    ask(page, "Is there a teapot?")
    assert answered(page, 3).startswith("Yes")


def test_only_finished_sentences_are_read_out(page: Any) -> None:
    page.evaluate(
        """() => { window.heard = [];
          const note = (changes) => { for (const { addedNodes } of changes)
            for (const node of addedNodes) window.heard.push(node.textContent); };
          const region = document.querySelector("beholder-picture [aria-live]");
          new MutationObserver(note).observe(region, { childList: true }); }"""
    )
    bring(page, PICTURES / "kitchen.jpg")
    answer = answered(page, 1)
    assert "".join(page.evaluate("window.heard")) == answer
    assert all(piece.strip().endswith((".", "!", "?")) for piece in page.evaluate("window.heard"))


@pytest.mark.parametrize(
    "options", [{"viewport": PHONE}, {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2}]
)
def test_a_phone_and_a_page_at_twice_its_size(visit: Callable[..., Visit], options: dict[str, Any]) -> None:
    page = open_tab(visit(**options))
    bring(page, PICTURES / "kitchen.jpg", CLIPS / "car.mp4")
    answered(page, 1)
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".picture-stage img")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing to scroll sideways"
    ask(page, "What moves?")
    answered(page, 2)
    field = page.get_by_label("Your question").bounding_box()
    said = page.locator(ANSWER).bounding_box()
    if options["viewport"] == PHONE:
        assert said["y"] >= 0, "the answer has come into view"
        assert said["y"] + said["height"] <= field["y"], "and is not under the field"
    assert field["x"] >= 0
    assert field["x"] + field["width"] <= options["viewport"]["width"]


def test_a_server_that_dies_is_told_and_the_conversation_goes_on(browser: Any, own_server: Served) -> None:
    begun = Visit(browser, own_server.url)
    begun.expect_errors("Failed to load resource|ERR_|WebSocket")
    begun.open()
    page = open_tab(begun)
    bring(page, PICTURES / "kitchen.jpg")
    answered(page, 1)
    page.route("**/v1/chat/completions", make_it_long)
    ask(page, "What is in the center of the picture?")
    page.wait_for_selector(".turn:last-child[data-state=answering]")
    page.wait_for_function("document.querySelector('.turn:last-child .turn-answer')?.textContent.length > 20")
    own_server.kill("server")
    answered(page, 2, "failed")
    assert page.locator(".turn:last-child .turn-error").inner_text().startswith("The answer was cut off")
    page.unroute("**/v1/chat/completions")
    own_server.wait_until_back("server")
    page.get_by_role("button", name="Ask again").click()
    assert answered(page, 2) == "A teapot.", "the picture was uploaded again by itself"
    begun.close()


def test_words_stream_without_moving_anything(browser: Any, own_server: Served) -> None:
    begun = Visit(browser, own_server.url)
    begun.open()
    page = open_tab(begun)
    page.route("**/v1/chat/completions", make_it_long)
    bring(page, PICTURES / "kitchen.jpg")
    page.wait_for_function("document.querySelector('.turn-answer')?.textContent.length > 40")
    page.evaluate(
        """() => { window.moved = 0; new PerformanceObserver((list) => { for (const { value } of list.getEntries())
          window.moved += value; }).observe({ type: "layout-shift" }); }"""
    )
    own_server.release("answers")
    page.wait_for_function("document.querySelector('.turn-answer').textContent.length > 1500")
    own_server.hold("answers")
    assert page.evaluate("window.moved") < 0.001
    begun.close()


def test_pictures_are_forgotten_with_the_page(page: Any, served_ui: Served) -> None:
    requests = sent(page)
    bring(page, PICTURES / "music.jpg")
    answered(page, 1)
    name = requests[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert served_ui.client.get(f"/v1/images/{name}").status_code == 200
    page.goto("about:blank")
    served_ui.wait_for(lambda: served_ui.client.get(f"/v1/images/{name}").status_code == 404)


def test_a_page_that_comes_back_has_its_pictures(page: Any) -> None:
    """Browsers may keep a page that is left, and show it again as it was."""
    bring(page, PICTURES / "kitchen.jpg")
    answered(page, 1)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
    ask(page, "What color is the teapot?")
    assert "red" in answered(page, 2).lower()
    again = "own => { const other = new Image(); other.src = own.src; return other.decode().then(() => other.width); }"
    assert page.locator(".picture-own").evaluate(again) == 640


def test_answers_are_copied_also_where_browsers_give_no_clipboard(visit: Callable[..., Visit]) -> None:
    begun = visit()
    page = open_tab(begun)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.addEventListener('copy', () => (window.copied = String(document.activeElement.value)))")
    bring(page, PICTURES / "kitchen.jpg")
    answer = answered(page, 1)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("copied") == answer
