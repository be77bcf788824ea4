"""What all tabs share: their addresses, the list of keys, signs that are written with several characters."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from browser import PHONE, PICTURES, Visit, until
from serving import PATIENCE_S, Served


def selected(page: Any, name: str) -> None:
    """Waits until a tab is the one that is shown."""
    page.locator(f'[role="tab"][aria-selected="true"]:has-text("{name}")').wait_for()
    page.locator(f"beholder-{name.lower()}").wait_for()


def test_every_tab_has_an_address_that_can_be_kept_and_gone_back_to(visit: Callable[..., Visit]) -> None:
    page = visit("/ui/#placard").page
    selected(page, "Placard")
    page.get_by_role("tab", name="Engine").click()
    selected(page, "Engine")
    assert page.evaluate("location.hash") == "#engine"
    page.get_by_role("tab", name="Live").click()
    selected(page, "Live")
    assert page.evaluate("location.hash") == ""
    for name in ("Engine", "Placard"):
        page.evaluate("history.back()")
        selected(page, name)
    page.evaluate("history.forward()")
    selected(page, "Engine")
    page.reload()
    selected(page, "Engine")
    page.goto(page.url.partition("#")[0] + "#there-is-no-such-tab")
    selected(page, "Live")


def test_a_tab_that_is_drawn_anew_while_it_is_pressed_is_opened_all_the_same(visit: Callable[..., Visit]) -> None:
    """Between press and release it may become another element; browsers then give the click to what holds both."""
    page = visit().page
    selected(page, "Live")
    opened = page.locator('[role="tab"][aria-selected="true"]:has-text("Placard")')
    deadline = time.monotonic() + PATIENCE_S
    while not opened.count():  # the page may not listen yet
        assert time.monotonic() < deadline
        page.get_by_role("tab", name="Placard").evaluate(
            """(tab) => {
              const { x, y, width, height } = tab.getBoundingClientRect();
              const place = { clientX: x + width / 2, clientY: y + height / 2 };
              tab.parentElement.dispatchEvent(new MouseEvent("click", { bubbles: true, ...place }));
            }"""
        )
        page.wait_for_timeout(100)
    selected(page, "Placard")


@pytest.mark.parametrize("viewport", [PHONE, {"width": 1280, "height": 800}], ids=["phone", "laptop"])
def test_a_tab_can_be_pressed_from_the_moment_it_is_there(
    visit: Callable[..., Visit], viewport: dict[str, int]
) -> None:
    begun = visit("/health", viewport=viewport)
    begun.page.add_init_script("""
      const first = new MutationObserver(() => {
        const tabs = [...document.querySelectorAll('[role="tablist"] [role="tab"]')];
        const tab = tabs.find(({ textContent }) => textContent.trim() === "Placard");
        if (!tab) return;
        first.disconnect();
        tab.click();
      });
      first.observe(document, { subtree: true, childList: true });
    """)
    page = begun.open("/ui/")
    selected(page, "Placard")
    page.wait_for_function("location.hash === '#placard'")


def test_the_arrow_keys_move_along_the_tabs(visit: Callable[..., Visit]) -> None:
    page = visit().page
    page.get_by_role("tab", name="Live").focus()
    for key, name in (("ArrowRight", "Picture"), ("ArrowLeft", "Live"), ("ArrowLeft", "Engine")):
        page.keyboard.press(key)
        selected(page, name)
        assert page.evaluate("document.activeElement.textContent") == name


def test_the_keys_are_listed_everywhere_and_single_letters_can_be_turned_off(visit: Callable[..., Visit]) -> None:
    page = visit("/ui/#engine").page
    selected(page, "Engine")
    page.get_by_role("button", name="Keys").click()
    dialog = page.get_by_role("dialog", name="Keys")
    for words in ("start, stop", "stop the answer", "along the tabs"):
        assert dialog.get_by_text(words).is_visible()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    page.get_by_role("tab", name="Live").click()
    numbers = page.locator(".live-figures")
    numbers.wait_for()
    page.keyboard.press("n")
    numbers.wait_for(state="hidden")
    page.keyboard.press("n")
    numbers.wait_for()
    assert page.evaluate("localStorage.length") == 0, "nothing is kept that nobody asked for"
    page.keyboard.press("?")
    dialog.get_by_label("Single letters work").uncheck()
    dialog.get_by_role("button", name="Close").click()
    dialog.wait_for(state="detached")
    page.reload()
    numbers.wait_for()
    for key in ("n", "?"):
        page.keyboard.press(key)
    assert numbers.is_visible()
    assert not dialog.count()


def test_a_phone_has_no_keys_to_list(visit: Callable[..., Visit]) -> None:
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True).page
    page.locator(".head-look").wait_for()
    assert not page.get_by_role("button", name="Keys").is_visible()


def test_where_nothing_may_be_stored_everything_works(visit: Callable[..., Visit]) -> None:
    begun = visit("/health")
    begun.page.add_init_script("""
      for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
      }
    """)
    page = begun.open("/ui/#picture")
    page.wait_for_selector("beholder-picture .picture-page")
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    page.locator(".turn[data-state=done]").wait_for()
    for look in ("light", "dark", "light"):  # as the system is, chosen, and so on
        page.locator(".head-look").click()
        assert page.evaluate("document.documentElement.dataset.theme") == look
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Single letters work").uncheck()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Live").click()
    page.locator(".live-figures").wait_for()
    page.keyboard.press("n")
    assert page.locator(".live-figures").is_visible()


def drop(page: Any, place: str) -> bool:
    """Drops a picture on an element; gives whether the browser is kept from opening it instead of the page."""
    data = base64.b64encode((PICTURES / "farm.jpg").read_bytes()).decode()
    return bool(
        page.evaluate(
            """([place, data]) => {
              const carried = new DataTransfer();
              const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
              carried.items.add(new File([bytes], "farm.jpg", { type: "image/jpeg" }));
              const options = { bubbles: true, cancelable: true, dataTransfer: carried };
              return ["dragover", "drop"]
                .map((name) => !document.querySelector(place).dispatchEvent(new DragEvent(name, options)))
                .every(Boolean);
            }""",
            [place, data],
        )
    )


def test_a_file_that_is_dropped_takes_the_place_of_no_tab(visit: Callable[..., Visit]) -> None:
    page = visit("/ui/#engine").page
    selected(page, "Engine")
    assert drop(page, "beholder-engine")
    page.get_by_role("tab", name="Live").click()
    selected(page, "Live")
    assert drop(page, "beholder-live")
    page.locator(".live-beside", has_text=re.compile("tractor|cow")).wait_for()
    assert page.locator(".live-mark").inner_text() == "File open"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("A fox", "A fox"),
        ("Größe, 狐 и лиса ثعلب", "Größe, 狐 и лиса ثعلب"),
        ("A family: \U0001f468", "A family: "),
        ("A family: \U0001f468\u200d\U0001f469\u200d", "A family: "),
        ("A family: \U0001f468\u200d\U0001f469\u200d\U0001f467", "A family: "),
        (
            "A family: \U0001f468\u200d\U0001f469\u200d\U0001f467.",
            "A family: \U0001f468\u200d\U0001f469\u200d\U0001f467.",
        ),
        ("\U0001f1e9", ""),
        ("\U0001f1e9\U0001f1ea\U0001f1eb", "\U0001f1e9\U0001f1ea"),
        ("नमस्", "नम"),
        ("", ""),
    ],
)
def test_no_half_of_a_sign_is_shown(visit: Callable[..., Visit], text: str, shown: str) -> None:
    page = visit("/ui/own/label.html").page
    assert page.evaluate("async (text) => (await import('/ui/own/graphemes.js')).settled(text)", text) == shown


def test_growing_words_never_show_a_sign_that_is_not_in_them(visit: Callable[..., Visit]) -> None:
    """Whatever the pieces: nothing that was painted is ever something else later."""
    page = visit("/ui/own/label.html").page
    flags, child = "\U0001f1ef\U0001f1f5\U0001f1e9\U0001f1ea", "\U0001f467\U0001f3fd\u200d\U0001f680"
    text = f"Ein Kind {child} mit {flags}, cafe\u0301, हिन्दी, ไทย \u2764\ufe0f!"
    painted = page.evaluate(
        """async (text) => {
          const { settled } = await import("/ui/own/graphemes.js");
          const characters = [...text];
          return characters.map((_, end) => settled(characters.slice(0, end + 1).join("")));
        }""",
        text,
    )
    whole = page.evaluate("(text) => [...new Intl.Segmenter().segment(text)].map(({ segment }) => segment)", text)
    starts = {"".join(whole[:count]) for count in range(len(whole) + 1)}
    assert set(painted) - starts == {text[: text.index("cafe") + 4]}, "only Latin letters do not wait for their accents"


def test_a_page_whose_server_goes_away_while_it_is_loaded_is_whole_once_it_is_back(
    browser: Any, served_ui: Served
) -> None:
    gone, asked = Visit(browser, served_ui.url), []
    gone.expect_errors("could not be loaded|Failed to load resource|ERR_")

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) == 1:
            route.abort()
        else:
            route.continue_()

    gone.page.route("**/ui/own/live.js", answer)
    gone.open(whole=False)
    gone.page.get_by_role("button", name="Start the camera").wait_for()
    gone.wait_for_parts()
    gone.page.wait_for_function("sessionStorage.length === 0")
    assert len(asked) == 2
    gone.close()


def test_a_part_that_never_comes_leaves_the_others_alone(browser: Any, served_ui: Served) -> None:
    lame, told = Visit(browser, served_ui.url), []
    lame.expect_errors("could not be loaded|Failed to load resource|ERR_")
    lame.page.on("console", lambda message: told.append("part live" in message.text))
    lame.page.route("**/ui/own/live.js", lambda route: route.abort())
    lame.open(whole=False)
    until(lame.page, lambda: sum(told) == 4)  # once, and after three attempts more
    lame.page.get_by_role("tab", name="Engine").click()
    lame.page.wait_for_selector("beholder-engine .engine-figure")
    assert sum(told) == 4
    lame.close()


def test_what_is_asked_for_until_it_comes_waits_as_long_as_the_server_wants_and_ends_with_who_asks(
    visit: Callable[..., Visit],
) -> None:
    begun = visit()
    begun.expect_errors("503")
    busy = {"error": {"message": "Busy.", "code": "overloaded"}}
    begun.page.route("**/v1/wanted", lambda route: route.fulfill(status=503, headers={"retry-after": "77"}, json=busy))
    outcome = begun.page.evaluate(
        """async () => {
          const { getAtLast } = await import("/ui/own/api.js");
          const later = window.setTimeout;
          const waiting = new Promise((resolve) => {
            window.setTimeout = (call, ms, ...rest) => (ms === 77000 && resolve(), later(call, ms, ...rest));
          });
          const stop = new AbortController();
          const end = getAtLast("/v1/wanted", stop.signal).catch(({ name }) => name);
          await waiting;
          stop.abort();
          window.setTimeout = later;
          return end;
        }"""
    )
    assert outcome == "AbortError"


@pytest.mark.parametrize("name", ["picture", "placard"])
def test_an_element_that_is_moved_watches_its_focus_once(visit: Callable[..., Visit], name: str) -> None:
    begun = visit(f"/ui/#{name}")
    begun.page.wait_for_selector(f"beholder-{name} > *")
    moves = begun.page.evaluate(
        """(name) => {
          const element = document.querySelector(`beholder-${name}`);
          const place = element.parentNode;
          const calls = { focusin: 0, focusout: 0, keydown: 0, disconnect: 0 };
          const { addEventListener: add, removeEventListener: remove } = element;
          element.addEventListener = (type, listener, options) => {
            calls[type]++;
            options?.signal?.addEventListener("abort", () => calls[type]--);
            add.call(element, type, listener, options);
          };
          element.removeEventListener = (type, ...rest) => (calls[type]--, remove.call(element, type, ...rest));
          const { disconnect } = MutationObserver.prototype;
          MutationObserver.prototype.disconnect = function () {
            calls.disconnect++;
            disconnect.call(this);
          };
          for (let time = 0; time < 3; time++) {
            element.remove();
            place.append(element);
          }
          MutationObserver.prototype.disconnect = disconnect;
          return calls;
        }""",
        name,
    )
    assert moves["disconnect"] == 3
    assert (moves["focusin"], moves["focusout"]) == (0, 0), "as many were taken away as came"
    assert moves["keydown"] <= 1
