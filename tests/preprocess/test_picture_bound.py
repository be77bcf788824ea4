"""Pictures and frames are made smaller where an encoder would attend over too much at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import FAMILIES

from preprocess.families import largest_item_tokens, load_family
from preprocess.model_folder import ModelFolder

SIZES = [(4000, 4000), (3000, 500), (500, 3000), (30, 30), (64, 5000)]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("qwen")])
@pytest.mark.parametrize("most", [9, 20, 10_000])
def test_no_item_is_larger_than_the_bound(family: str, most: int, tmp_path: Path) -> None:
    folder = ModelFolder(FAMILIES[family](tmp_path))
    own, bounded = load_family(folder), load_family(folder, most)
    assert own.clips is not None
    assert bounded.clips is not None
    for width, height in SIZES:
        pictures = (own.layout(width, height, "high"), bounded.layout(width, height, "high"))
        frames = (own.clips.layout(width, height, 4), bounded.clips.layout(width, height, 4))
        for before, after in (pictures, frames):
            narrow = max(width, height) // min(width, height) + 1  # a row of tokens at least
            assert after.num_tokens <= max(most, narrow)
            assert after == before or before.num_tokens > most
    assert bounded.max_pixel_bytes <= own.max_pixel_bytes
    assert largest_item_tokens(bounded) <= largest_item_tokens(own)


@pytest.mark.parametrize("family", ["smolvlm2", "idefics3"])
def test_tiles_keep_the_size_that_the_model_was_trained_for(family: str, tmp_path: Path) -> None:
    folder = ModelFolder(FAMILIES[family](tmp_path))
    assert load_family(folder, 1).layout(900, 700, "high") == load_family(folder).layout(900, 700, "high")
