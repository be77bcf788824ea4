"""Pictures that clients uploaded to ask about often. Memory of this process only: bounded in bytes and in idle time.

An id is a keyed digest of the picture's bytes, with a key that this process made: the same picture gets the same id,
and nobody can work out the id of a picture, or learn from one whether somebody else has uploaded it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from preprocess.errors import ClientError
from preprocess.wire import ImagePart, Message

IMAGE_ID: Final = re.compile(r"file-[0-9a-f]{32}")


@dataclass
class StoredImage:
    """One picture. Times are Unix times; it is forgotten `ttl_s` after its last use."""

    id: str
    data: bytes
    created_s: float
    used_s: float


class ImageStore:
    """Invariant: `num_bytes` is the sum over all pictures, and at most `max_bytes`. The least recently used go first.

    Args:
        max_bytes: Bound of all pictures; 0 takes none.
        ttl_s: How long a picture stays without being used.
        clock: Unix time.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.num_bytes = 0
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._images: OrderedDict[str, StoredImage] = OrderedDict()

    def id_of(self, data: bytes) -> str:
        """The id of a picture's bytes. Takes milliseconds for a large one, without Python's lock."""
        return f"file-{hashlib.blake2b(data, key=self._key, digest_size=16).hexdigest()}"

    def put(self, image_id: str, data: bytes) -> StoredImage:
        """Keep a picture under its `id_of`.

        Raises:
            ClientError: It is larger than the whole store.
        """
        if len(data) > self.max_bytes:
            raise ClientError(
                f"The picture has {len(data) / (1 << 20):.1f} MiB; this server keeps {self.max_bytes / (1 << 20):g} "
                "MiB of uploads. Send it with the request that asks about it.",
                status=413,
                code="image_too_large",
                param="file",
            )
        now_s = self._clock()
        self._forget_old(now_s)
        self.delete(image_id)
        while self._images and self.num_bytes + len(data) > self.max_bytes:
            self.delete(next(iter(self._images)))
        image = self._images[image_id] = StoredImage(image_id, data, now_s, now_s)
        self.num_bytes += len(data)
        return image

    def get(self, image_id: str, param: str | None = None) -> StoredImage:
        """A picture, which is thereby used.

        Raises:
            ClientError: 404; it is not here, or no longer.
        """
        now_s = self._clock()
        self._forget_old(now_s)
        image = self._images.get(image_id)
        if image is None:
            raise ClientError(
                f"The picture {image_id[:40]!r} is not here, or no longer: uploads are forgotten after "
                f"{self.ttl_s:g} s without use, when room is needed, and when the server restarts. Upload it again.",
                status=404,
                code="image_not_found",
                param=param,
            )
        image.used_s = now_s
        self._images.move_to_end(image_id)
        return image

    def delete(self, image_id: str) -> bool:
        """Forget a picture. False when it was not here."""
        image = self._images.pop(image_id, None)
        if image is not None:
            self.num_bytes -= len(image.data)
        return image is not None

    def resolve(self, messages: list[Message]) -> list[Message]:
        """The messages with pictures in place of ids.

        Raises:
            ClientError: 404, naming the place.
        """
        if not any(_is_id(part) for message in messages for part in message.content):
            return messages
        return [
            msgspec.structs.replace(
                message,
                content=[
                    ImagePart(data=self.get(part.data_url, f"messages[{i}].content[{j}]").data, detail=part.detail)
                    if isinstance(part, ImagePart) and _is_id(part)
                    else part
                    for j, part in enumerate(message.content)
                ],
            )
            for i, message in enumerate(messages)
        ]

    def _forget_old(self, now_s: float) -> None:
        while self._images:
            oldest = next(iter(self._images.values()))
            if oldest.used_s + self.ttl_s > now_s:
                return
            self.delete(oldest.id)


def _is_id(part: object) -> bool:
    return (
        isinstance(part, ImagePart)
        and not part.data
        and not part.rest
        and IMAGE_ID.fullmatch(part.data_url) is not None
    )
