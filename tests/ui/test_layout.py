"""Nothing jumps, on small screens either; phones that lie on their side and walls have layouts of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from browser import CLIPS, LAPTOP, PHONE, PICTURES, Visit, camera_file, chromium, shifted, watch_shifts

LYING: Final = {"width": 740, "height": 360}
TABLET: Final = {"width": 820, "height": 1180}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    camera = camera_file(
        tmp_path_factory.mktemp("camera") / "two.y4m",
        [PICTURES / "gallery.jpg", PICTURES / "penguins.jpg"],
        hold_s=3,
        fps=5,
    )
    with chromium(camera) as running:
        yield running


def open_tab(visit: Visit, name: str) -> Any:
    visit.page.get_by_role("tab", name=name).click()
    visit.page.wait_for_selector(f"beholder-{name.lower()} > *")
    return visit.page


def box(page: Any, selector: str) -> dict[str, float]:
    found: dict[str, float] = page.locator(selector).bounding_box()
    return found


def moved(page: Any) -> float:
    """How much of the window, in all."""
    return sum(share for share, *_ in shifted(page))


@pytest.mark.parametrize("viewport", [PHONE, TABLET, LAPTOP], ids=["phone", "tablet", "laptop"])
def test_a_placard_of_a_camera_holds_still(visit: Callable[..., Visit], viewport: dict[str, int]) -> None:
    """Through a whole label: the camera, the picture that was taken, the words, the code, and the camera again."""
    page = open_tab(visit(viewport=viewport), "Placard")
    page.get_by_role("button", name="Use the camera").click()
    page.wait_for_selector(".placard-code:not([hidden])")
    page.evaluate("window.scrollTo(0, 0)")
    watch_shifts(page)
    first = page.locator(".label-title").inner_text()
    page.wait_for_function(
        """(first) => document.querySelector(".label-title").textContent !== first
          && !document.querySelector(".placard-code").hidden""",
        arg=first,
    )
    assert moved(page) < 0.01, shifted(page)


@pytest.mark.parametrize("viewport", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_numbers_that_come_move_nothing(visit: Callable[..., Visit], viewport: dict[str, int]) -> None:
    begun = visit(viewport=viewport)
    begun.page.wait_for_selector("beholder-header[data-state=ready]")
    watch_shifts(begun.page)  # what is new has not moved
    page = open_tab(begun, "Engine")
    page.wait_for_function("document.querySelector('.engine-about').textContent.includes('Beholder')")
    page.wait_for_function("document.querySelector('.engine-figure dd').textContent !== '–'")
    assert moved(page) < 0.01, shifted(page)


def test_a_server_that_goes_and_comes_moves_nothing(visit: Callable[..., Visit]) -> None:
    begun = visit(viewport=PHONE)
    begun.expect_errors("ERR_FAILED")
    page = begun.page
    page.wait_for_selector("beholder-header[data-state=ready]")
    watch_shifts(page)
    page.route("**/ready", lambda route: route.abort())
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the page looks at once
    page.wait_for_selector(".head-gone:visible")
    foot = box(page, ".head-gone")
    assert foot["y"] + foot["height"] == PHONE["height"]
    page.unroute("**/ready")
    page.locator(".head-gone").wait_for(state="hidden")
    assert moved(page) < 0.005, shifted(page)


def test_on_a_phone_a_picture_has_its_room_before_it_comes(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(viewport=PHONE), "Picture")
    page.set_input_files(".picture-files", [str(PICTURES / name) for name in ("kitchen.jpg", "cafe.png")])
    page.wait_for_selector(".turn[data-state=done]")
    heights = set()
    for name, view in (("1", "As you see it"), ("2", "As you see it"), ("2", "As the model sees it")):
        page.get_by_role("button", name=f"Show picture {name}").click()
        page.get_by_text(view).click()
        page.wait_for_selector(".picture-stage img")
        heights.add(box(page, ".picture-stage")["height"])
    assert len(heights) == 1


def test_on_a_phone_an_answer_moves_no_picture(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(viewport=PHONE), "Picture")
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.wait_for_selector(".turn[data-state=done]")
    numbers = page.locator(".picture-numbers")
    numbers.filter(has_text="from the cache").wait_for()
    tall = box(page, ".picture-numbers")["height"]
    page.get_by_role("button", name="Begin anew").click()
    page.route("**/v1/chat/completions", lambda route: None)  # leaves it without an answer
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    numbers.filter(has_text="64 tokens").wait_for()
    assert "cache" not in numbers.inner_text()
    assert box(page, ".picture-numbers")["height"] == tall


@pytest.mark.parametrize("viewport", [LYING, {"width": 667, "height": 375}, {"width": 915, "height": 412}], ids=str)
def test_on_a_phone_that_lies_on_its_side_picture_and_words_are_whole(
    visit: Callable[..., Visit], viewport: dict[str, int]
) -> None:
    page = visit(viewport=viewport).page
    for button in page.locator(".live-choices .button").all():
        place = button.bounding_box()
        assert place["y"] + place["height"] <= viewport["height"]
    page.get_by_role("button", name="Start the camera").click()
    page.locator(".strip-card").first.wait_for()
    stage, words = box(page, ".live-stage"), box(page, ".live-beside")
    for place in (stage, words, box(page, ".live-bar .live-stop")):
        assert place["y"] >= 0
        assert place["y"] + place["height"] <= viewport["height"]
    assert stage["x"] + stage["width"] <= words["x"], "beside each other"
    tabs = box(page, '[role="tab"] >> nth=3')
    state = box(page, ".head-watching")
    assert tabs["x"] + tabs["width"] <= state["x"], "the head is one line, in which nothing overlaps"
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_a_picture_is_shown_whole_and_what_the_model_sees_can_be_scrolled_to(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(viewport=LYING), "Picture")
    page.set_input_files(".picture-files", [str(PICTURES / "gallery.jpg"), str(CLIPS / "car.mp4")])
    page.wait_for_selector(".turn[data-state=done]")
    stage = page.locator(".picture-stage")
    fits = "stage => stage.scrollHeight <= stage.clientHeight"
    assert stage.evaluate(fits)
    page.get_by_role("button", name="Show clip 2").click()
    page.wait_for_selector("video.picture-own")
    assert stage.evaluate(fits)
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".seen-film img")
    stage.focus()
    assert page.evaluate("document.activeElement.className") == "picture-stage"


def test_on_a_very_large_screen_everything_is_larger(visit: Callable[..., Visit]) -> None:
    """It is looked at from further away."""
    sizes = {}
    for width, height in ((1280, 800), (1920, 1080), (3840, 2160)):
        page = visit(viewport={"width": width, "height": height}).page
        page.wait_for_selector(".live-stage")
        sizes[width] = page.locator(".live-beside").evaluate("words => parseFloat(getComputedStyle(words).fontSize)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert sizes[1280] <= sizes[1920] < sizes[3840] / 1.5


def test_on_a_wall_numbers_stand_over_the_picture_for_those_who_ask(visit: Callable[..., Visit]) -> None:
    page = visit().page
    page.get_by_role("button", name="Start the camera").click()
    page.locator(".strip-card").first.wait_for()
    page.keyboard.press("f")
    page.wait_for_selector('[data-wall="true"]')
    figures = page.locator(".live-figures")
    assert not figures.is_visible()
    page.keyboard.press("n")
    figures.wait_for()
    assert page.locator(".live-stage .live-figures").count() == 1, "a full screen shows nothing else"
    page.keyboard.press("Escape")
    page.wait_for_selector('[data-wall="false"]')
    assert figures.is_visible()
    assert not page.locator(".live-stage .live-figures").count()
