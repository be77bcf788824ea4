"""Options of the engine: where and how the model runs, and how much of it at once."""

from __future__ import annotations

from typing import Annotated, Literal

from server.options.media import MediaOptions
from server.options.option import Option


class EngineOptions(MediaOptions, frozen=True, kw_only=True):
    """Device, memory, scheduling and guessing."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Option("Where the model runs; auto is CUDA where there is a device, else the CPU."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("Type of weights and KV cache; auto is bfloat16 where steps are fast in it, else float32."),
    ] = "auto"
    threads: Annotated[
        int, Option("Threads of the engine on a CPU; 0: one less than the cores, at least one.", low=0, high=1024)
    ] = 0
    max_running: Annotated[int, Option("Most sequences that decode at once.", low=1, high=4096)] = 64
    max_context: Annotated[
        int,
        Option(
            "Longest prompt + answer; 0: the model's, or what the KV cache holds if that is less.",
            unit="tokens",
            low=0,
            high=16_777_216,
        ),
    ] = 0
    max_batched_tokens: Annotated[
        int,
        Option(
            "Token budget of one step: decode first, then prefill; 0: 512 on a CPU, 4096 on a GPU.",
            unit="tokens",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    itl_target_ms: Annotated[
        float,
        Option(
            "Target for the time between tokens of running streams: a step takes no more of new pictures and prompts "
            "than fits; 0: 1.3 times a step without any and at least 20 ms, on a GPU 1.4 times and 5 ms.",
            unit="ms",
            low=0,
            high=600_000,
        ),
    ] = 0
    ttft_target_ms: Annotated[
        float,
        Option(
            "How long a request may wait for its first token before --itl-target-ms gives way; 0: at once, so that "
            "new pictures and prompts come first and streams wait for them.",
            unit="ms",
            low=0,
            high=600_000,
        ),
    ] = 300
    kv_tokens: Annotated[
        int, Option("Size of the KV cache; 0: chosen from memory.", unit="tokens", low=0, high=1_073_741_824)
    ] = 0
    max_waiting: Annotated[
        int, Option("Most requests that wait for the engine; one more gets 429.", low=1, high=1_000_000)
    ] = 256
    max_waiting_tokens: Annotated[
        int,
        Option("Most prompt tokens that wait for the engine; more gets 429.", unit="tokens", low=1, high=1_073_741_824),
    ] = 262_144
    vision_cache_mb: Annotated[
        float,
        Option(
            "Memory for finished picture embeddings; 0: by the model's largest picture.",
            unit="MiB",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Option("Keep computed prompts, so that the next request with the same start is fast.")
    ] = True
    speculation: Annotated[
        Literal["auto", "none", "ngram", "echo", "grammar", "habit", "draft-model", "head"],
        Option(
            "Who guesses tokens ahead, so that a step can check several: the request's own text (ngram), the session's "
            "earlier answers (echo), the answer's grammar, what the model keeps saying (habit), a smaller model "
            "(draft-model), a head trained for the model (head); auto: all that there are, where it pays. No "
            "guess changes an answer but by rounding, where larger steps round otherwise."
        ),
    ] = "auto"
    draft_model: Annotated[
        str,
        Option(
            "A smaller model of the same vocabulary that guesses tokens ahead: a folder, or a name on the Hugging Face "
            "hub. Empty: none."
        ),
    ] = ""
    draft_head: Annotated[
        str,
        Option(
            "A head in the layout of EAGLE-3, trained for the model, that guesses tokens ahead: a folder, or a name on "
            "the Hugging Face hub. Empty: the folder 'head' in the model's, if there is one, where torch computes "
            "steps on a CPU or --speculation is head."
        ),
    ] = ""
