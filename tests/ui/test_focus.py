"""With the keyboard alone: what had the focus goes away when it is pressed, and the focus goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import PICTURES, Visit, camera_file, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    camera = camera_file(tmp_path_factory.mktemp("camera") / "still.y4m", [PICTURES / "penguins.jpg"])
    with chromium(camera) as running:
        yield running


def open_tab(visit: Visit, name: str) -> Any:
    visit.page.get_by_role("tab", name=name).click()
    visit.page.wait_for_selector(f"beholder-{name.lower()} > *")
    return visit.page


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).press("Enter")


def focus_is_on(page: Any, name: str) -> None:
    page.wait_for_function(
        """(name) => { const { activeElement: at } = document;
          return at !== document.body && (at.ariaLabel ?? at.textContent.trim()) === name; }""",
        arg=name,
    )


def answer_at_once(page: Any) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "A teapot."}}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


def test_start_and_stop(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Live")
    press(page, "Start the camera")
    focus_is_on(page, "Look now (space)")
    press(page, "Stop")
    focus_is_on(page, "Start the camera")


def test_a_history_that_is_cleared(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Live")
    press(page, "Start the camera")
    page.locator(".strip-card").first.wait_for()
    press(page, "Stop")
    press(page, "Clear")
    focus_is_on(page, "Start the camera")


def test_a_screen_that_was_filled(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Live")
    press(page, "Start the camera")
    page.wait_for_selector('[data-phase="running"]')
    press(page, "Full screen (F)")
    page.wait_for_selector('[data-wall="true"]')
    page.keyboard.press("Escape")
    focus_is_on(page, "Full screen (F)")


def test_other_settings_while_it_runs_take_no_focus_away(visit: Callable[..., Visit]) -> None:
    """Nor do the buttons of the beginning show through while the camera is opened again."""
    page = open_tab(visit(), "Live")
    press(page, "Start the camera")
    page.wait_for_selector('[data-phase="running"]')
    page.get_by_text("Camera and page").press("Enter")
    page.evaluate(
        """() => { window.phases = [];
          const live = document.querySelector("beholder-live");
          const watch = new MutationObserver(() => phases.push(live.dataset.phase));
          watch.observe(live, { attributeFilter: ["data-phase"] });
          window.first = document.querySelector("video").srcObject; }"""
    )
    page.get_by_label("Size of the pictures").focus()
    page.get_by_label("Size of the pictures").select_option("1024")
    page.wait_for_function(
        "(({ srcObject: now }) => now && now !== first)(document.querySelector('video')) && phases.length > 0"
    )
    assert set(page.evaluate("phases")) == {"running"}
    assert page.evaluate("document.activeElement.name") == "side"


def test_a_conversation(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Picture")
    answer_at_once(page)
    page.set_input_files(".picture-files", [str(PICTURES / name) for name in ("kitchen.jpg", "farm.jpg")])
    page.wait_for_selector(".turn[data-state=done]")
    press(page, "Show picture 1")
    focus_is_on(page, "Show picture 1")
    press(page, "Another answer")
    focus_is_on(page, "Ask")
    page.get_by_label("Your question").fill("What is it?")
    press(page, "Ask")
    page.wait_for_selector(".turn:nth-child(2)[data-state=done]")
    focus_is_on(page, "Ask")
    page.set_input_files(".picture-files", str(PICTURES / "music.jpg"))
    press(page, "Take picture 3 away")
    focus_is_on(page, "Add pictures or clips")
    press(page, "Begin anew")
    focus_is_on(page, "Choose files")


def test_a_label_that_is_written_again(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Placard")
    page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
    page.wait_for_selector(".placard-code:not([hidden])")
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    with page.expect_request("**/v1/chat/completions"):
        press(page, "Write it again")
    assert page.locator(".placard-again").get_attribute("aria-disabled") == "true"
    focus_is_on(page, "Write it again")
    press(page, "Write it again")  # is not listened to meanwhile
    held[0].continue_()
    page.wait_for_selector(".placard-again[aria-disabled=false]")
    focus_is_on(page, "Write it again")
    assert len(held) == 1


def test_what_was_not_pressed_gets_no_focus(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = open_tab(visit(), "Picture")
    answer_at_once(page)
    page.get_by_role("button", name="Choose files").focus()
    page.locator(".picture-empty h2").click()  # beside everything
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.wait_for_selector(".turn[data-state=done]")
    assert page.evaluate("document.activeElement === document.body")
