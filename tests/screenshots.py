"""Pictures of every page for people who look: light, dark and on a phone.

python tests/screenshots.py FOLDER            # all of them, as PNG
python tests/screenshots.py --readme          # those of the README, small, into docs/images
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from browser import CLIPS, LAPTOP, PHONE, PICTURES, ROOT, Visit, camera_file, chromium, screenshot
from serving import Served

IMAGES: Final = ROOT / "docs" / "images"
WALL: Final = {"width": 1920, "height": 1080}


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.wait_for_selector(f"beholder-{name.lower()} > *")


def live(page: Any) -> None:
    open_tab(page, "Live")
    page.get_by_role("button", name="Start the camera").click()
    page.wait_for_function("document.querySelectorAll('.strip-card').length > 3")


def picture(page: Any) -> None:
    open_tab(page, "Picture")
    page.set_input_files(".picture-files", str(PICTURES / "kitchen.jpg"))
    _ask(page, "What is in the center of the picture?", 2)
    _ask(page, "What color is the teapot?", 3)


def seen(page: Any) -> None:
    open_tab(page, "Picture")
    page.set_input_files(".picture-files", str(PICTURES / "garden.jpg"))
    page.wait_for_selector(".turn[data-state=done]")
    page.get_by_text("As the model sees it").click()
    page.get_by_label("Detail").select_option("high")
    page.wait_for_selector(".seen-grid img")


def clip(page: Any) -> None:
    open_tab(page, "Picture")
    page.set_input_files(".picture-files", str(CLIPS / "car.mp4"))
    _ask(page, "In which direction does the car move?", 2)
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".seen-film img")


def empty(page: Any) -> None:
    open_tab(page, "Picture")


def placard(page: Any) -> None:
    open_tab(page, "Placard")
    page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
    page.wait_for_selector(".placard-code:not([hidden])")


def engine(page: Any) -> None:
    open_tab(page, "Engine")
    page.wait_for_timeout(65_000 if page.viewport_size == LAPTOP else 15_000)


def keys(page: Any) -> None:
    open_tab(page, "Live")
    page.keyboard.press("?")
    page.wait_for_selector(".keys-dialog")


def wall(page: Any) -> None:
    page.wait_for_selector(".placard-code:not([hidden])")


def _ask(page: Any, question: str, turn: int) -> None:
    page.wait_for_selector(f".turn:nth-child({turn - 1})[data-state=done]")
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    page.wait_for_selector(f".turn:nth-child({turn})[data-state=done]")
    page.evaluate("document.activeElement.blur()")


Scene = Callable[[Any], None]
SCENES: Final[dict[str, Scene]] = {
    scene.__name__: scene for scene in (live, picture, seen, clip, empty, placard, engine, keys, wall)
}
README: Final = (("live", False), ("picture", False), ("placard", True), ("engine", False))


@contextmanager
def load(served: Served) -> Iterator[None]:
    """Somebody asks about pictures now and then, so that the engine has something to show."""
    done = threading.Event()

    def ask() -> None:
        files = sorted(PICTURES.glob("*.jpg"))
        for turn in range(10_000):
            if done.wait(0.15 + 0.9 * (turn % 7 == 0)):
                return
            served.caption(files[turn * 5 % len(files)].read_bytes())

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in asking:
            thread.join()


def show(browser: Any, served: Served, name: str, *, dark: bool, viewport: dict[str, int]) -> Any:
    """A visit that has come as far as the scene goes."""
    visit = Visit(browser, served.url, dark=dark, viewport=WALL if name == "wall" else viewport)
    page = visit.open("/ui/own/kiosk.html" if name == "wall" else "/ui/")
    if name == "engine":
        with load(served):
            SCENES[name](page)
    else:
        SCENES[name](page)
    page.wait_for_timeout(500)
    return visit


def main() -> None:
    """Take them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--readme", action="store_true")
    options.add_argument("--only", choices=SCENES)
    asked = options.parse_args()
    if bool(asked.folder) == asked.readme:
        options.error("give a folder or --readme")
    with tempfile.TemporaryDirectory() as scratch, Served(ROOT / "samples" / "model") as served:
        files = [PICTURES / name for name in ("gallery.jpg", "penguins.jpg", "fruit.jpg")]
        with chromium(camera_file(Path(scratch) / "camera.y4m", files, hold_s=3, fps=5)) as browser:
            if asked.readme:
                for name, dark in README:
                    visit = show(browser, served, name, dark=dark, viewport=LAPTOP)
                    print(screenshot(visit.page, IMAGES / f"{name}.webp"))
                    visit.close()
                return
            asked.folder.mkdir(parents=True, exist_ok=True)
            for name in [asked.only] if asked.only else SCENES:
                for look in ("light", "dark") if name == "wall" else ("light", "dark", "phone"):
                    visit = show(
                        browser, served, name, dark=look == "dark", viewport=PHONE if look == "phone" else LAPTOP
                    )
                    path = asked.folder / f"{name}-{look}.png"
                    visit.page.screenshot(path=path, full_page=look == "phone" and name not in ("picture", "clip"))
                    print(path)
                    visit.close()


if __name__ == "__main__":
    main()
