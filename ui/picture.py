"""The tab Picture: a picture or clip, described and asked about in a conversation.

The element is in `static/picture.js`.
"""

from __future__ import annotations

from typing import Final

import gradio as gr

TITLE: Final = "Picture"


def tab() -> None:
    """Put the tab's content into the open one."""
    gr.HTML(html_template="<beholder-picture></beholder-picture>", apply_default_css=False)
