"""What a preprocess worker and the detokenizer need to know at start. `server.settings` fills it."""

from __future__ import annotations

import msgspec


class MediaLimits(msgspec.Struct, frozen=True):
    """Bounds on what a client may send; each refusal names the bound and what came.

    Attributes:
        max_image_bytes: Encoded bytes of one picture.
        max_image_pixels: Width times height.
        max_image_side: Longest side in pixels.
        max_images: Pictures in one request.
        max_video_bytes: Encoded bytes of one clip.
        max_video_pixels: Width times height of its frames.
        max_video_s: How long a clip may be.
        max_video_frames: Frames that are looked at in one request.
        deadline_s: Longest time that one request may spend in a worker.
        memory_bytes: Most address space that a worker may add while it works.
    """

    max_image_bytes: int = 32 << 20
    max_image_pixels: int = 100_000_000
    max_image_side: int = 32_768
    max_images: int = 16
    max_video_bytes: int = 64 << 20
    max_video_pixels: int = 36_000_000
    max_video_s: float = 4 * 3600.0
    max_video_frames: int = 256
    deadline_s: float = 20.0
    memory_bytes: int = 2 << 30


class PictureBound(msgspec.Struct, frozen=True):
    """How large a picture, or an item of a clip, is at most given to the encoder; 0 is no bound but the folder's own.

    Attributes:
        tokens: Vision tokens.
        operations: That the encoder takes for it (`preprocess.families.encoder_cost`).
    """

    tokens: int = 0
    operations: int = 0


class PreprocessConfig(msgspec.Struct, frozen=True):
    """Options of a preprocess worker, all resolved. `exact_decode` turns reduced-scale JPEG decoding (`draft`) off.

    `max_context` 0 takes the model's. `largest` makes pictures smaller where they keep their size (`Family.bound`).
    """

    model: str
    limits: MediaLimits = MediaLimits()
    max_context: int = 0
    exact_decode: bool = False
    largest: PictureBound = PictureBound()
