"""The tiny models of every family: whole Hugging Face folders with random weights that `save_pretrained` wrote.

A family joins by its maker (a file `tiny_….py` of its own, named in conftest too) and a line in `FAMILIES`. The parity
and matrix tests then run on it by themselves. transformers is imported inside the makers only, so that tests which
never make a folder do not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tiny_qwen2_vl import tiny_qwen2_vl
from tiny_qwen3_vl import tiny_qwen3_vl
from tiny_smolvlm import tiny_smolvlm

FAMILIES: Final[dict[str, Callable[[Path], Path]]] = {
    "smolvlm": tiny_smolvlm,
    "smolvlm2": partial(tiny_smolvlm, seed=2, video_sampling={"fps": 2, "max_frames": 6}),
    "idefics3": partial(tiny_smolvlm, seed=1, model_type="idefics3"),
    "qwen2_vl": tiny_qwen2_vl,
    "qwen2_5_vl": partial(tiny_qwen2_vl, seed=1, model_type="qwen2_5_vl", tied=False, max_shard_size="100KB"),
    "qwen3_vl": tiny_qwen3_vl,
    "qwen3_vl_moe": partial(tiny_qwen3_vl, seed=1, experts=True, tied=False, max_shard_size="100KB"),
}
"""Name → maker: writes the folder into an empty one and returns it."""
