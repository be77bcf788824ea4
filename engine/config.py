"""What the engine needs to know at start. `server.settings` fills it; nothing here reads the environment."""

from __future__ import annotations

from typing import Literal

import msgspec

from preprocess.config import PictureBound


class EngineConfig(msgspec.Struct, frozen=True):
    """Options of the engine process, all resolved.

    Attributes:
        model: Folder of the checkpoint.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: Type of weights and KV; ``"auto"`` is bfloat16 where the processor or device is fast at it, else float32.
        threads: torch threads; 0 chooses one less than the cores, at least one.
        max_running: Most sequences that decode at once.
        max_context: Longest prompt + answer in tokens; 0 takes the model's, or what the KV pool holds if that is less.
        max_batched_tokens: Token budget of a step (decode first, then prefill chunks).
        kv_tokens: Size of the KV pool in tokens; 0 chooses from memory.
        max_waiting: Most requests waiting; one more is refused with 429.
        max_waiting_tokens: Most prompt tokens waiting.
        vision_cache_bytes: Bound of the vision embedding cache; 0 chooses from the largest picture (`engine.limits`).
        largest: As in `PreprocessConfig`; decides how large the vision cache is chosen.
        prefix_cache: Whether finished prefixes stay in the radix tree for others.
        check: Run `check()` after every step (tests).
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = 0
    max_running: int = 64
    max_context: int = 0
    max_batched_tokens: int = 512
    kv_tokens: int = 0
    max_waiting: int = 256
    max_waiting_tokens: int = 262_144
    vision_cache_bytes: int = 0
    largest: PictureBound = PictureBound()
    prefix_cache: bool = True
    check: bool = False
