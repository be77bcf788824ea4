"""The placard in a real browser: what the label says and leaves out, the wall, and the code that takes it home."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zxingcpp
from browser import PHONE, PICTURES, Visit, another, camera_file, chromium
from PIL import Image
from serving import Served

KIOSK = "/ui/own/kiosk.html"
FIELDS = ("title", "artist", "year", "medium", "text")


@pytest.fixture(scope="module")
def camera(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("camera") / "gallery.y4m"
    return camera_file(path, [PICTURES / "gallery.jpg", PICTURES / "penguins.jpg"], hold_s=3, fps=5)


@pytest.fixture(scope="module")
def browser(camera: Path) -> Iterator[Any]:
    with chromium(camera) as running:
        yield running


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Any:
    return open_tab(visit())


def open_tab(visit: Visit) -> Any:
    visit.page.get_by_role("tab", name="Placard").click()
    visit.page.wait_for_selector("beholder-placard .placard")
    return visit.page


def hang(page: Any, file: Path) -> None:
    page.set_input_files(".placard-file", str(file))
    page.wait_for_selector(".placard-code:not([hidden])")


def label(page: Any) -> dict[str, str]:
    """The fields of the label that can be seen."""
    parts = {name: page.locator(f".label-{name}") for name in FIELDS}
    return {name: part.inner_text() for name, part in parts.items() if part.count() and part.is_visible()}


def titled(page: Any, word: str) -> None:
    """Waits for a finished label whose title has the word."""
    page.wait_for_function(
        "(word) => document.querySelector('.label-title')?.textContent.includes(word)"
        " && !document.querySelector('.placard-code').hidden",
        arg=word,
    )


def code(page: Any) -> str:
    """The address in the QR code, read as a phone reads it."""
    page.wait_for_function("document.querySelector('.placard-code img').complete")
    shot = page.locator(".placard-code a").screenshot(scale="css")
    image = Image.open(io.BytesIO(shot)).convert("L")
    (found,) = zxingcpp.read_barcodes(image.resize((image.width * 3, image.height * 3)))
    return str(found.text)


def answer_with(page: Any, pieces: list[tuple[str, float]]) -> None:
    """Lets the server's model say these pieces, each with its log probability."""

    def reply(route: Any) -> None:
        events = [
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": text},
                        "logprobs": {"content": [{"token": text, "logprob": logprob}]},
                    }
                ]
            }
            for text, logprob in pieces
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", reply)


def test_a_picture_gets_a_label_that_says_only_what_is_known(page: Any) -> None:
    hang(page, PICTURES / "gallery.jpg")
    shown = label(page)
    assert shown["title"] == "Fox"
    assert shown["text"].startswith("This picture shows a fox.")
    assert "nknown" not in shown["text"]
    assert set(shown) == {"title", "text"}, "artist, year and medium would be made up"
    assert "machine" in page.locator(".label-writer").inner_text()
    assert page.locator(".placard-picture").get_attribute("alt") == "Fox"


def test_fields_are_believed_as_far_as_the_model_does(page: Any) -> None:
    sure, guess = -0.05, -2.5
    answer_with(
        page,
        [
            ('{"title": "', sure), ("Impression, ", sure), ("Sunrise", sure), ('", "artist": "', sure),
            ("Claude ", sure), ("Monet", sure), ('", "year": ', sure), ("1999", guess), (', "medium": "', sure),
            ("Oil on ", sure), ("canvas", sure), ('", "text": "', sure), ("The harbour of Le Havre, ", sure),
            ("seen \\u201cin", sure), (" mist\\u201d.", sure), ('"}', sure),
        ],
    )  # fmt: skip
    hang(page, PICTURES / "gallery.jpg")
    assert label(page) == {
        "title": "Impression, Sunrise",
        "artist": "Claude Monet",
        "medium": "Oil on canvas",
        "text": "The harbour of Le Havre, seen “in mist”.",
    }


def test_the_code_brings_the_label_to_a_phone_and_to_no_server(page: Any, visit: Callable[..., Visit]) -> None:
    hang(page, PICTURES / "penguins.jpg")
    shown = label(page)
    address = code(page)
    assert address == page.locator(".placard-code a").get_attribute("href")
    phone = visit("/health", viewport=PHONE)
    asked: list[str] = []
    phone.page.on("request", lambda request: asked.append(request.url + (request.post_data or "")))
    phone.page.goto(address)
    phone.page.wait_for_function("document.title.includes('Penguins')")
    assert label(phone.page) == shown
    assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert phone.page.get_by_role("button", name="Copy the text").bounding_box()["height"] >= 44
    fragment = address.partition("#")[2]
    assert fragment
    assert not [url for url in asked if "Penguins" in url or fragment in url.partition("#")[0]]


RESTING = "The fox rests upon a pale ledge while evening light gathers around its russet fur, and visitors before "
"""A part of a label as museums write them."""


@pytest.mark.parametrize(
    ("text", "wall"),
    [(RESTING * 4, False), (RESTING * 4, True), ("".join(chr(0x4E00 + 37 * n % 9000) for n in range(700)), False)],
    ids=["page", "wall", "very-long"],
)
def test_codes_of_long_labels_can_be_read_from_a_common_screen(page: Any, text: str, wall: bool) -> None:
    """Of one pixel a pixel. What is too long for a code is cut there, and whole in the address beside it."""
    fields = {"title": "A Fox at Rest", "artist": None, "year": 1874, "medium": "oil on canvas", "text": text}
    answer_with(page, [(json.dumps(fields, ensure_ascii=False), -0.1)])
    hang(page, PICTURES / "gallery.jpg")
    if wall:
        page.get_by_role("button", name="Hang it on the wall").click()
        page.wait_for_selector(".placard.on-wall")
    read, whole = code(page), page.locator(".placard-code a").get_attribute("href")
    texts = []
    for address in (whole, read):
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector(".label-text")
        texts.append(page.locator(".label-text").inner_text())
    assert texts[0] == text.strip()
    assert texts[1] == texts[0] or (len(whole) > 900 and text.startswith(texts[1].removesuffix(" …")))


@pytest.mark.parametrize("compressed", [True, False])
def test_labels_survive_their_addresses(visit: Callable[..., Visit], compressed: bool) -> None:
    page = visit(KIOSK.replace("kiosk", "label")).page
    labels = [
        {"title": "Ölbild № 3 – “Mädchen”", "artist": None, "year": -300, "medium": "", "text": "日本 🦊\n#&?+/="},
        {"title": "x", "artist": "Ö", "year": 0, "medium": None, "text": "y" * 400},
    ]
    back = page.evaluate(
        """async ([labels, compressed]) => {
          const { encodeLabel, decodeLabel } = await import("/ui/own/label.js");
          if (!compressed) delete window.CompressionStream;
          return Promise.all(labels.map(async (label) => {
            const fragment = await encodeLabel(label);
            if (!/^[zj][\\w-]+$/.test(fragment) || (fragment[0] === "z") !== compressed) throw new Error(fragment);
            return decodeLabel(fragment);
          }));
        }""",
        [labels, compressed],
    )
    assert back == labels
    assert page.evaluate("async () => (await import('/ui/own/label.js')).decodeLabel('zAAAA')") is None


def test_a_broken_address_is_told(visit: Callable[..., Visit]) -> None:
    page = visit("/ui/own/label.html#z12").page
    page.wait_for_function("document.querySelector('.label-title')")
    assert "no label" in label(page)["text"]


def test_the_wall_describes_what_stands_before_it(visit: Callable[..., Visit]) -> None:
    page = visit(KIOSK, viewport={"width": 1920, "height": 1080}).page
    titled(page, "Fox")
    titled(page, "Penguins")
    titled(page, "Fox")
    assert not page.locator(".placard-tools").is_visible()
    assert page.locator(".placard-recording").is_visible()
    assert label(page).keys() == {"title", "text"}
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "all of it is on the screen"


def test_a_camera_that_is_taken_away_is_told_and_the_wall_takes_it_up_again(visit: Callable[..., Visit]) -> None:
    take = """() => {
      const [track] = document.querySelector(".placard-camera").srcObject.getVideoTracks();
      track.stop();
      track.dispatchEvent(new Event("ended"));
    }"""
    page = open_tab(visit())
    page.get_by_role("button", name="Use the camera").click()
    page.get_by_role("button", name="Stop the camera").wait_for()
    page.evaluate(take)
    assert "taken away" in page.locator(".placard-error").inner_text()
    assert page.get_by_role("button", name="Use the camera").is_visible()
    page = visit(KIOSK).page
    titled(page, "")
    page.evaluate("""() => {
      window.ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
      navigator.mediaDevices.getUserMedia = async () => { throw new DOMException("none", "NotFoundError"); };
    }""")
    page.evaluate(take)
    page.wait_for_function("document.querySelector('.label-text').textContent.startsWith('There is no camera here.')")
    assert "goes on by itself" in label(page)["text"]
    assert not page.locator(".placard-recording").is_visible()
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = ask; }")
    page.wait_for_selector(".placard-recording:visible")


def test_the_wall_can_name_another_home(visit: Callable[..., Visit]) -> None:
    page = visit(f"{KIOSK}?home=https://museum.example/").page
    titled(page, "")
    assert code(page).startswith("https://museum.example/ui/own/label.html#z")


def test_a_tab_uses_the_camera_until_told_to_stop(page: Any) -> None:
    page.get_by_role("button", name="Use the camera").click()
    titled(page, "Fox")
    assert page.locator(".placard-recording").is_visible()
    page.get_by_role("button", name="Stop the camera").click()
    assert not page.locator(".placard-recording").is_visible()
    assert page.evaluate("document.querySelector('.placard-camera').srcObject === null")
    assert page.locator(".placard-picture").is_visible(), "the last picture stays"


def test_on_the_wall_of_a_whole_screen_there_are_no_controls(page: Any) -> None:
    hang(page, PICTURES / "gallery.jpg")
    page.get_by_role("button", name="Hang it on the wall").click()
    page.wait_for_selector(".placard.on-wall")
    assert not page.locator(".placard-tools").is_visible()
    page.evaluate("document.exitFullscreen()")
    page.wait_for_selector(".placard:not(.on-wall)")


def test_where_no_screen_can_be_filled_nothing_offers_it(visit: Callable[..., Visit]) -> None:
    begun = visit()
    begun.page.add_init_script("Object.defineProperty(Document.prototype, 'fullscreenEnabled', { value: false })")
    begun.page.reload()
    page = open_tab(begun)
    assert page.get_by_role("button", name="Choose a picture").is_visible()
    assert not page.get_by_role("button", name="Hang it on the wall").is_visible()


def test_nothing_moves_while_a_label_is_written(page: Any) -> None:
    hang(page, PICTURES / "gallery.jpg")
    page.evaluate(
        """() => { window.moved = 0; new PerformanceObserver((list) => { for (const { value } of list.getEntries())
          window.moved += value; }).observe({ type: "layout-shift" }); }"""
    )
    page.set_input_files(".placard-file", str(PICTURES / "penguins.jpg"))
    titled(page, "Penguins")
    page.wait_for_timeout(200)
    assert page.evaluate("window.moved") < 0.005


def test_a_camera_that_is_refused(browser: Any, served_ui: Served, camera: Path) -> None:
    with another(browser.browser_type, camera, refuse_camera=True) as strict:
        visit = Visit(strict, served_ui.url)
        visit.open()
        page = open_tab(visit)
        page.get_by_role("button", name="Use the camera").click()
        page.wait_for_selector(".placard-error:not([hidden])")
        assert "did not allow the camera" in page.locator(".placard-error").inner_text()
        assert not page.locator(".placard-recording").is_visible()
        visit.close()


def test_the_wall_outlives_its_server(browser: Any, served_ui: Served) -> None:
    visit = Visit(browser, served_ui.url)
    visit.expect_errors("Failed to load resource|ERR_")
    page = visit.open(KIOSK)
    titled(page, "Fox")
    served_ui.kill("server")
    served_ui.wait_until_back("server")
    titled(page, "Penguins")
    titled(page, "Fox")
    assert not page.locator(".placard-error").is_visible()
    visit.close()


def test_a_picture_that_cannot_be_described_gets_no_label_of_another(
    visit: Callable[..., Visit], tmp_path: Path
) -> None:
    begun = visit()
    begun.expect_errors("400")
    page = open_tab(begun)
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes((PICTURES / "farm.jpg").read_bytes()[:300])
    hang(page, PICTURES / "gallery.jpg")
    page.set_input_files(".placard-file", str(damaged))
    page.wait_for_selector(".placard-error:not([hidden])")
    assert "cut off" in page.locator(".placard-error").inner_text()
    assert label(page)["text"].startswith("Drop a picture into the frame")
    for part in (".label-writer", ".placard-picture", ".placard-code", ".placard-again"):
        assert not page.locator(part).is_visible(), part
    hang(page, PICTURES / "gallery.jpg")
    assert label(page)["title"] == "Fox"


def test_a_label_hangs_beside_its_own_picture_only(page: Any) -> None:
    """Also when a camera is opened beside a finished or a half written label, and when it is stopped again."""
    hang(page, PICTURES / "gallery.jpg")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")  # the camera takes no picture
    page.get_by_role("button", name="Use the camera").click()
    page.get_by_role("button", name="Stop the camera").wait_for()
    assert label(page)["text"].startswith("Hold something before the camera")
    for part in (".label-writer", ".placard-code", ".placard-again"):
        assert not page.locator(part).is_visible(), part
    page.get_by_role("button", name="Stop the camera").click()
    assert label(page)["title"] == "Fox"
    assert page.locator(".placard-picture").is_visible()
    assert page.locator(".placard-code").is_visible()
    answers: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: answers.append(route))  # and leaves it without an answer
    page.get_by_role("button", name="Write it again").click()
    page.wait_for_selector(".label.writing")
    page.get_by_role("button", name="Use the camera").click()
    page.get_by_role("button", name="Stop the camera").wait_for()
    page.unroute("**/v1/chat/completions")
    assert answers
    assert label(page)["text"].startswith("Hold something before the camera")
    page.get_by_role("button", name="Stop the camera").click()
    assert label(page)["title"] == "Fox"
    assert not page.locator(".label.writing").count()


@pytest.mark.parametrize("viewport", [{"width": 1920, "height": 1080}, {"width": 1080, "height": 1920}])
def test_a_long_label_has_all_its_room_on_a_wall(browser: Any, served_ui: Served, viewport: dict[str, int]) -> None:
    visit = Visit(browser, served_ui.url, viewport=viewport)
    words = [("It looks at us as if it had been waiting. ", -0.1)] * 14
    answer_with(visit.page, [('{"title": "The Fox of the Old Museum", "text": "', -0.1), *words, ('"}', -0.1)])
    page = visit.open(KIOSK)
    titled(page, "Fox")
    assert page.locator(".label-text").evaluate("text => text.scrollHeight <= text.clientHeight + 1")
    for part in (".label", ".placard-frame", ".placard-code a"):
        box = page.locator(part).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= viewport["height"], part
    visit.close()


def test_a_camera_that_is_given_too_late_is_let_go_at_once(page: Any) -> None:
    page.evaluate("""() => {
      const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
      window.given = [];
      navigator.mediaDevices.getUserMedia = async (wanted) => (given.push(await ask(wanted)), given.at(-1));
      const button = document.querySelector(".placard-use-camera");
      for (let press = 0; press < 4; press++) button.click();
    }""")
    page.wait_for_function("given.length === 2 && given.every((each) => !each.active)")
    assert not page.locator(".placard-recording").is_visible()
    assert page.title() == "Beholder"


def test_a_label_that_is_no_longer_wanted_says_nothing_about_the_next_one(page: Any) -> None:
    """While the code of a finished label is being made another picture is hung."""
    page.evaluate(
        """() => {
          window.held = new Promise((resolve) => (window.release = resolve));
          window.CompressionStream = class {
            constructor() {
              const { readable, writable } = new TransformStream({ flush: () => held });
              Object.assign(this, { readable, writable });
              window.isMaking = true;
            }
          };
        }"""
    )
    page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
    page.wait_for_function("window.isMaking")
    stopped: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: stopped.append(route))
    with page.expect_request("**/v1/chat/completions"):
        page.set_input_files(".placard-file", str(PICTURES / "farm.jpg"))
    page.evaluate(
        """async () => {
          const { codeAddress } = await import("/ui/own/label.js");
          release();
          await codeAddress({ title: "", text: "" }); // takes as long as that of the label
          await new Promise(requestAnimationFrame);
        }"""
    )
    assert page.locator(".placard .label.writing").count() == 1
    assert page.locator(".placard-again").get_attribute("aria-disabled") == "true"
    assert page.locator(".placard-code").is_hidden()
