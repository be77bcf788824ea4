"""What the engine needs to know at start. `server.settings` fills it; nothing here reads the environment."""

from __future__ import annotations

from typing import Literal

import msgspec

from preprocess.config import PictureBound


class EngineConfig(msgspec.Struct, frozen=True):
    """Options of the engine process, all resolved.

    Attributes:
        model: Folder of the checkpoint.
        device: ``"cpu"`` or ``"cuda"``; ``"auto"`` takes CUDA where there is a device.
        dtype: Type of weights and KV; ``"auto"`` is bfloat16 where native steps compute or the device is fast at it,
            else float32. The vision encoder of a CPU that is not computes in float32 all the same.
        threads: torch threads; 0 chooses one less than the cores, at least one.
        max_running: Most sequences that decode at once.
        max_context: Longest prompt + answer in tokens; 0 takes the model's, or what the KV pool holds if that is less.
        max_batched_tokens: Token budget of a step (decode first, then prefill chunks); 0 chooses by device.
        itl_target_ms: How long a step should take while sequences decode; 0: a part more than decoding alone takes.
        ttft_target_ms: How long a request may wait for its first token before that gives way; 0: it never holds.
        kv_tokens: Size of the KV pool in tokens; 0 chooses from memory.
        max_waiting: Most requests waiting; one more is refused with 429.
        max_waiting_tokens: Most prompt tokens waiting.
        vision_cache_bytes: Bound of the vision embedding cache; 0 chooses from the largest picture (`engine.limits`).
        largest: As in `PreprocessConfig`; decides how large the vision cache is chosen.
        speculation: Who guesses tokens ahead, for the model to check several in one step: ``"ngram"`` (the request's
            own text), ``"echo"`` (what the session answered before), ``"grammar"`` (what a grammar leaves no choice
            about), ``"habit"`` (what the model keeps saying), ``"draft-model"`` or ``"head"`` (see below), ``"auto"``
            (all that there are), or ``"none"``. No guess changes what is said.
        draft_model: Folder of a smaller model of the same vocabulary that guesses; empty: none.
        draft_head: Folder of a head, trained for the model, that guesses (EAGLE-3 layout); empty: the folder ``head``
            inside the model's, if there is one, no draft model was named, and torch computes steps on a CPU or
            `speculation` is ``"head"``.
        prefix_cache: Whether finished prefixes stay in the radix tree for others.
        check: Run `check()` after every step (tests).
    """

    model: str
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = 0
    max_running: int = 64
    max_context: int = 0
    max_batched_tokens: int = 0
    itl_target_ms: float = 0.0
    ttft_target_ms: float = 300.0
    kv_tokens: int = 0
    max_waiting: int = 256
    max_waiting_tokens: int = 262_144
    vision_cache_bytes: int = 0
    largest: PictureBound = PictureBound()
    prefix_cache: bool = True
    speculation: Literal["auto", "none", "ngram", "echo", "grammar", "habit", "draft-model", "head"] = "auto"
    draft_model: str = ""
    draft_head: str = ""
    check: bool = False
