"""The tab Engine: what the engine does at the moment.

The element is in `static/engine_page.js`.
"""

from __future__ import annotations

from typing import Final

import gradio as gr

TITLE: Final = "Engine"


def tab() -> None:
    """Put the tab's content into the open one."""
    gr.HTML(html_template="<beholder-engine></beholder-engine>", apply_default_css=False)
