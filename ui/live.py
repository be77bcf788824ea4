"""The tab Live: a camera, a screen or a file, and what the model says about it word by word.

The element is in `static/live.js`.
"""

from __future__ import annotations

from typing import Final

import gradio as gr

TITLE: Final = "Live"


def tab() -> None:
    """Put the tab's content into the open one."""
    gr.HTML(html_template="<beholder-live></beholder-live>", apply_default_css=False)
