"""The page: Gradio's shell with a tab for each custom element. Importing this imports Gradio."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported: nothing is told to anybody

import gradio as gr
from fastapi import FastAPI

from ui import engine_page, live, picture, placard
from ui.anywhere import Anywhere
from ui.kept import Kept
from ui.theme import HEAD, theme

TABS: Final = (live, picture, placard, engine_page)


def build(path: str, scratch: str) -> FastAPI:
    """An application that has the page mounted at `path`; Gradio keeps files, if ever any, below `scratch`."""
    os.environ["GRADIO_TEMP_DIR"] = str(Path(scratch) / "gradio")
    with gr.Blocks(title="Beholder", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(html_template="<beholder-header></beholder-header>", apply_default_css=False)
        with gr.Tabs(elem_id="tabs"):
            for module in TABS:
                with gr.Tab(module.TITLE, id=module.__name__.rpartition(".")[2]):
                    module.tab()
    page.queue(api_open=False)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    gr.mount_gradio_app(
        app,
        page,
        path,
        root_path=path,
        footer_links=[],
        run_history=False,
        pwa=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=theme(),
        head=HEAD,
    )
    app.add_middleware(Anywhere, path=path)
    app.add_middleware(Kept, path=path)
    return app
