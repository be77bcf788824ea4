"""Options of pictures and clips: what is taken, and what their preparation may use."""

from __future__ import annotations

from typing import Annotated, Final

from server.options.network import NetworkOptions
from server.options.option import Option

PILLOW_MAX_PIXELS: Final = 178_956_970
"""Pillow opens no larger picture: twice its `MAX_IMAGE_PIXELS`, which is the whole process's and not ours to raise."""


class MediaOptions(NetworkOptions, frozen=True, kw_only=True):
    """Limits of what clients send, and the processes that look into it."""

    workers: Annotated[
        int,
        Option(
            "Preprocess processes (decode, resize, tokenise); 0: 2, or by the cores where the model runs on a GPU.",
            low=0,
            high=256,
        ),
    ] = 0
    arena_mb: Annotated[
        int,
        Option(
            "Shared memory for pixels on their way to the engine; 0: by the model's largest picture.",
            unit="MiB",
            low=0,
            high=65_536,
        ),
    ] = 0
    max_image_mb: Annotated[float, Option("Largest encoded picture.", unit="MiB", low=0.001, high=2048)] = 32
    max_image_pixels: Annotated[
        int, Option("Most pixels (width x height) of one picture.", low=1, high=PILLOW_MAX_PIXELS)
    ] = 100_000_000
    max_image_side: Annotated[int, Option("Longest side of one picture.", unit="pixels", low=1, high=1_000_000)] = (
        32_768
    )
    max_images: Annotated[int, Option("Most pictures in one request.", low=1, high=4096)] = 16
    max_video_mb: Annotated[float, Option("Largest encoded clip.", unit="MiB", low=0.001, high=65_536)] = 64
    max_video_pixels: Annotated[
        int, Option("Most pixels (width x height) of a clip's frames.", low=1, high=4_000_000_000)
    ] = 36_000_000
    max_video_s: Annotated[float, Option("Longest clip.", unit="s", low=0.1, high=1_000_000)] = 14_400
    max_video_frames: Annotated[int, Option("Most frames of clips looked at in one request.", low=1, high=4096)] = 256
    max_picture_tokens: Annotated[
        int,
        Option(
            "Larger pictures and frames are made smaller, where a model keeps their size; 0: the model's own, on a CPU "
            "as many as its encoder gets through in minutes.",
            unit="vision tokens",
            low=0,
            high=1_048_576,
        ),
    ] = 0
    image_store_mb: Annotated[
        float, Option("Memory for pictures uploaded to /v1/images; 0: none.", unit="MiB", low=0, high=65_536)
    ] = 256
    image_ttl_s: Annotated[
        float, Option("How long an uploaded picture stays without being used.", unit="s", low=1, high=2_592_000)
    ] = 3600
    preprocess_deadline_s: Annotated[
        float, Option("Longest time that preparing one request may take.", unit="s", low=0.1, high=3600)
    ] = 20
    preprocess_memory_mb: Annotated[
        int, Option("Most memory that a preprocess process may add while it works.", unit="MiB", low=64, high=1_048_576)
    ] = 2048
    exact_decode: Annotated[
        bool, Option("Decode large JPEGs at full scale: pixels then equal the model's own processor.")
    ] = False
