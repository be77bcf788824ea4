"""The pages below a path of somebody else's address, behind a proxy that tells the server nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import PICTURES, Visit
from serving import Served
from stripping_proxy import below


@pytest.fixture
def visit(browser: Any, served_ui: Served) -> Iterator[Visit]:
    with below("/vision", served_ui.url) as url:
        begun = Visit(browser, url)
        asked: list[str] = []
        begun.page.on("request", lambda request: asked.append(request.url))
        begun.page.on("websocket", lambda socket: asked.append(socket.url.replace("ws:", "http:")))
        yield begun
        begun.close()  # what was not found would be an error of the console
        outside = [each for each in asked if each.startswith("http") and not each.startswith(url + "/")]
        assert asked
        assert not outside


def test_everything_is_asked_for_below_the_path(visit: Visit) -> None:
    page = visit.open("/")
    page.locator("[name=file]").set_input_files(PICTURES / "farm.jpg")
    page.wait_for_selector(".strip-card:has-text('tractor')")
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector(".engine:is([data-state=ready], [data-state=at-work])")
    page.get_by_role("tab", name="Placard").click()
    page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
    page.wait_for_selector(".placard-code:not([hidden])")
    assert page.locator(".placard-code img").evaluate("code => code.decode().then(() => code.naturalWidth)") > 0
    assert page.locator(".placard-code a").get_attribute("href").startswith(visit.url + "/ui/own/label.html#")
    page.locator(".placard-code a").evaluate("link => location.assign(link.href)")
    assert page.locator(".label-title").inner_text() == "Fox"
