"""What goes wrong is told in the server's words, with what to do next; what can mend itself does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from browser import PHONE, PICTURES, Visit

KIOSK: Final = "/ui/own/kiosk.html"
SAID: Final = "the server says so"


def refuse(page: Any, status: int, *, headers: dict[str, str] | None = None, words: str | None = SAID) -> None:
    """Lets every chat request fail; without `words` as something that stands before the server would let it."""
    error = json.dumps({"error": {"message": words, "type": "x", "code": "c"}})
    body, kind = (error, "application/json") if words else ("<html>nginx</html>", "text/html")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, headers=headers or {}, body=body, content_type=kind),
    )


def begin(visit: Callable[..., Visit], name: str) -> Any:
    begun = visit(f"/ui/#{name.lower()}")
    begun.expect_errors("Failed to load resource")
    begun.page.wait_for_selector(f"beholder-{name.lower()} > *")
    return begun.page


CASES: Final = [
    (400, {}, "The server says so. {other}."),
    (429, {"retry-after": "7"}, "The server says so. {again} in 7 seconds."),
    (503, {"retry-after": "1"}, "The server says so. {again} in a second."),
    (500, {}, "The server says so. {again}."),
]


@pytest.mark.parametrize(("status", "headers", "told"), CASES, ids=[str(status) for status, *_ in CASES])
def test_every_page_says_what_to_do_next(
    visit: Callable[..., Visit], status: int, headers: dict[str, str], told: str
) -> None:
    page = begin(visit, "Picture")
    refuse(page, status, headers=headers)
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    error = page.locator(".turn-error:visible")
    error.wait_for()
    assert error.inner_text() == told.format(again="Ask again", other="Ask something else, or begin anew")
    page.get_by_role("tab", name="Placard").click()
    page.set_input_files(".placard-file", str(PICTURES / "kitchen.jpg"))
    error = page.locator(".placard-error:visible")
    error.wait_for()
    assert error.inner_text() == told.format(again="Write it again", other="Choose another picture")


def test_on_a_phone_what_went_wrong_comes_into_view(visit: Callable[..., Visit]) -> None:
    begun = visit("/ui/#picture", viewport=PHONE)
    begun.expect_errors("Failed to load resource")
    page = begun.page
    page.wait_for_selector("beholder-picture > *")
    refuse(page, 500)
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.wait_for_function(
        """() => {
          const bottom = (selector) => document.querySelector(selector)?.getBoundingClientRect().bottom;
          const field = document.querySelector(".picture-ask").getBoundingClientRect();
          return bottom(".turn-error") > 0 && bottom(".turn-error") <= field.top;
        }"""
    )


@pytest.mark.parametrize(
    ("status", "told"),
    [(502, "The server behind this address does not answer. It may be restarting. Ask again."), (418, "answered 418")],
)
def test_what_stands_before_the_server_has_no_words_so_the_page_finds_some(
    visit: Callable[..., Visit], status: int, told: str
) -> None:
    page = begin(visit, "Picture")
    refuse(page, status, words=None)
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.locator(".turn-error", has_text=told).wait_for()


def test_a_proxy_that_takes_no_such_large_pictures(visit: Callable[..., Visit]) -> None:
    page = begin(visit, "Picture")
    refuse(page, 413, words=None)
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.get_by_role("alert").filter(has_text="kitchen.jpg: What was sent is larger than what stands before").wait_for()


def test_presets_that_could_not_be_had_come_when_they_can(visit: Callable[..., Visit]) -> None:
    begun = visit("/health")
    begun.expect_errors("Failed to load resource")
    page = begun.page
    failed: list[Any] = []

    def answer(route: Any) -> None:
        failed.append(route)
        if len(failed) == 1:
            route.abort()
        elif len(failed) == 2:
            route.fulfill(status=503, body="")
        else:
            route.continue_()

    page.route("**/v1/presets", answer)
    begun.open("/ui/")
    page.wait_for_function("document.querySelectorAll('.prompt-preset option').length > 1")
    assert page.get_by_label("In these words").input_value()


def test_a_wall_asks_for_patience_and_goes_on(visit: Callable[..., Visit]) -> None:
    """Who stands before it can press nothing."""
    begun = visit("/health")
    begun.expect_errors("Failed to load resource")
    page = begun.page
    page.add_init_script(
        """navigator.mediaDevices.getUserMedia = async () => {
          const canvas = document.createElement("canvas");
          setInterval(() => canvas.getContext("2d").fillRect(0, 0, 99, 99), 100);
          return canvas.captureStream(10);
        };"""
    )
    refuse(page, 503, headers={"retry-after": "1"})
    begun.open(KIOSK)
    page.locator(".label-title", has_text="Please wait").wait_for()
    page.locator(".label-text", has_text="The server says so. This page goes on by itself.").wait_for()
    assert not page.locator(".placard-error").is_visible()
    page.unroute("**/v1/chat/completions")
    page.wait_for_selector(".placard-code:not([hidden])")
