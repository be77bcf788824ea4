"""Named questions that a session may ask of every frame."""

from __future__ import annotations

from typing import Final

PRESETS: Final[dict[str, str]] = {
    "caption": "Describe the picture.",
    "short": "Describe the picture in a few words.",
    "read": "Read the text in the picture.",
    "count": "What is in the picture, and how many of each?",
    "people": "What are the people in the picture doing?",
}
DEFAULT_PRESET: Final = "caption"
