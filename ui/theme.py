"""How the page looks: Gradio's variables from the tokens of `static/theme.css`, and what stands in its head."""

from __future__ import annotations

from typing import Final

import gradio as gr

# Relative addresses, so that a proxy may put the server below any path.
HEAD: Final = """
<link rel="icon" href="own/icon.svg" type="image/svg+xml">
<link rel="preload" href="own/garamond.woff2" as="font" type="font/woff2" crossorigin>
<link rel="preload" href="own/source-sans.woff2" as="font" type="font/woff2" crossorigin>
<link rel="stylesheet" href="own/theme.css">
<link rel="stylesheet" href="own/header.css">
<link rel="stylesheet" href="own/live.css">
<link rel="stylesheet" href="own/picture.css">
<link rel="stylesheet" href="own/placard.css">
<link rel="stylesheet" href="own/engine_page.css">
<meta name="color-scheme" content="light dark">
<script src="own/appearance.js"></script>
<script src="own/tabs.js"></script>
<script type="module" src="own/main.js"></script>
"""

SANS: Final = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO: Final = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    """The system's own fonts and our colours; the rest is in the style sheet."""
    return gr.themes.Base(font=SANS, font_mono=MONO, spacing_size="lg", radius_size="lg").set(
        body_background_fill="var(--paper)",
        body_background_fill_dark="var(--paper)",
        body_text_color="var(--ink)",
        body_text_color_dark="var(--ink)",
        background_fill_primary="var(--paper)",
        background_fill_primary_dark="var(--paper)",
        color_accent="var(--accent)",
    )
