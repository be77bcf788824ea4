"""Intake: what a request must be like to enter the engine. Builds its sequence, or refuses it in the client's words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kv.radix import IdArray
from engine.sequence import Clock, LoadPixels, Picture, Sequence, Span
from engine.vision_cache import VisionCache
from engine.vision_ids import VisionIds
from preprocess.errors import ClientError
from preprocess.wire import EngineRequest, MediaItem


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence may take: tokens of context, KV slots, and the vocabulary its ids must be in."""

    max_context: int
    kv_tokens: int
    vocab_size: int


class Intake:
    """Checks requests. Owns the vision ids: those of a sequence are pinned from `build` to `release`."""

    def __init__(self, limits: Limits, vision_cache: VisionCache, vision_ids: VisionIds) -> None:
        self.limits = limits
        self.vision_ids = vision_ids
        self._vision_cache = vision_cache

    def build(self, request: EngineRequest, serial: int, load_pixels: LoadPixels, now_s: float) -> Sequence:
        """The sequence of a request. Raises ClientError when the engine could never finish it."""
        if len(request.prompt_ids) % 8:
            raise ClientError("The prompt is not a whole number of 64-bit token ids.", code="invalid_prompt")
        prompt_ids: IdArray = np.frombuffer(request.prompt_ids, dtype="<i8")
        self._check_lengths(request, len(prompt_ids))
        covered = self._check_media(request.media, len(prompt_ids))
        plain = prompt_ids[~covered]
        if len(plain) and not (int(plain.min()) >= 0 and int(plain.max()) < self.limits.vocab_size):
            raise ClientError(
                f"The prompt has token ids outside 0 … {self.limits.vocab_size - 1}.", code="invalid_token_id"
            )
        positions = self._positions(request, len(prompt_ids))
        delta = 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]
        keys = prompt_ids.copy()
        pictures = [self._place(index, item, keys) for index, item in enumerate(request.media)]
        return Sequence(
            request=request,
            serial=serial,
            prompt_ids=prompt_ids,
            prompt_keys=keys,
            pictures=pictures,
            load_pixels=load_pixels,
            max_tokens=min(request.sampling.max_tokens, self.limits.max_context - len(prompt_ids)),
            clock=Clock(submitted_s=now_s),
            positions=positions,
            position_delta=delta,
        )

    def release(self, sequence: Sequence) -> None:
        """The sequence has finished: its pictures' ids may be forgotten."""
        for picture in sequence.pictures:
            self.vision_ids.unpin(picture.digest, picture.num_tokens)

    def _check_lengths(self, request: EngineRequest, length: int) -> None:
        limits = self.limits
        vision = sum(item.num_tokens for item in request.media)
        counts = f"The prompt has {length} tokens ({vision} of them from {len(request.media)} pictures)"
        if length == 0:
            raise ClientError("The prompt is empty; at least one token is needed.", code="empty_prompt")
        if request.sampling.max_tokens < 1:
            raise ClientError(
                f"max_tokens is {request.sampling.max_tokens}; at least 1 is needed.",
                code="invalid_max_tokens",
                param="max_tokens",
            )
        if length >= limits.max_context:
            raise ClientError(
                f"{counts}, but the context is {limits.max_context} tokens with at least 1 for the answer. "
                "Send fewer or smaller pictures, or a shorter text.",
                code="context_length_exceeded",
            )
        if length > limits.kv_tokens:
            raise ClientError(
                f"{counts}, but the server's memory holds {limits.kv_tokens} tokens. "
                "Send fewer or smaller pictures, or a shorter text.",
                code="kv_capacity_exceeded",
            )

    def _positions(self, request: EngineRequest, length: int) -> NDArray[np.int32] | None:
        """The request's own rotary positions (3, n), n from the end of the last item to the whole prompt."""
        if not request.positions:
            return None
        num_known, rest = divmod(len(request.positions), 12)
        least = max((start + count for item in request.media for start, count in item.spans), default=1)
        if rest or not least <= num_known <= length:
            raise ClientError(
                f"The prompt has {len(request.positions)} bytes of positions, expected 12 for each of its first "
                f"{least} to {length} tokens.",
                code="invalid_positions",
            )
        return np.frombuffer(request.positions, dtype="<i4").reshape(3, num_known)

    def _check_media(self, media: list[MediaItem], length: int) -> NDArray[np.bool_]:
        covered = np.zeros(length, dtype=np.bool_)
        last = 0
        for index, item in enumerate(media):
            for start, count in item.spans:
                if start < last or count < 1 or start + count > length:
                    raise ClientError(
                        f"Picture {index} has the span ({start}, {count}), which is empty, outside the prompt of "
                        f"{length} tokens, or begins before position {last}, where the span before it ends.",
                        code="invalid_media_spans",
                    )
                covered[start : start + count] = True
                last = start + count
            if not item.spans:
                raise ClientError(f"Picture {index} has no place in the prompt.", code="invalid_media_spans")
            if not self._vision_cache.fits(item.num_tokens):
                cache = self._vision_cache
                raise ClientError(
                    f"Picture {index} has {item.num_tokens} vision tokens, or "
                    f"{item.num_tokens * cache.bytes_per_token} bytes as embeddings, but the vision cache holds "
                    f"{cache.max_bytes} bytes. Send a smaller picture.",
                    code="image_too_large",
                )
        return covered

    def _place(self, index: int, item: MediaItem, keys: IdArray) -> Picture:
        """Pin the picture's ids and write them over its placeholders in `keys`."""
        base = self.vision_ids.pin(item.digest, item.num_tokens)
        spans: list[Span] = []
        first = 0
        for start, count in item.spans:
            keys[start : start + count] = np.arange(base + first, base + first + count)
            spans.append(Span(start, count, first))
            first += count
        return Picture(index, base, item.digest, item.num_tokens, item.pixels, spans)
