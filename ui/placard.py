"""The tab Placard: a picture framed, with a wall label beside it.

The element is in `static/placard.js`.
"""

from __future__ import annotations

from typing import Final

import gradio as gr

TITLE: Final = "Placard"


def tab() -> None:
    """Put the tab's content into the open one."""
    gr.HTML(html_template="<beholder-placard></beholder-placard>", apply_default_css=False)
