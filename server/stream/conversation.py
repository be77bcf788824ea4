"""A Realtime conversation: items in order, each a turn of the chat; bounded in number and bytes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from preprocess.errors import ClientError
from preprocess.wire import Detail, ImagePart, Message, TextPart
from server.complaints import invalid, unsupported
from server.stream.realtime_events import ItemInput

MAX_ITEMS: Final = 256
_PARTS_OF: Final = {"user": ("input_text", "input_image"), "system": ("input_text",), "assistant": ("output_text",)}


@dataclass
class Item:
    """One turn. `parts` are what the engine sees."""

    id: str
    role: str
    parts: list[TextPart | ImagePart]
    status: str = "completed"

    def shown(self) -> dict[str, Any]:
        """As clients see it; pictures are not sent back."""
        spoken = "output_text" if self.role == "assistant" else "input_text"
        content = [
            {"type": spoken, "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "input_image", "detail": part.detail}
            for part in self.parts
        ]
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": content,
        }

    @property
    def num_images(self) -> int:
        """Pictures in it."""
        return sum(isinstance(part, ImagePart) for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return sum(len(p.text) if isinstance(p, TextPart) else len(p.data_url) for p in self.parts)


class Conversation:
    """The items. Refuses by name what it does not take.

    Args:
        max_bytes: Of all items together.
        max_images: Pictures in all items together.
    """

    def __init__(self, max_bytes: int, max_images: int) -> None:
        self._max_bytes = max_bytes
        self._max_images = max_images
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return sum(item.num_bytes for item in self._items)

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Insert after an item (``"root"``: first), else at the end; the id of the one before, or None.

        Raises:
            ClientError: There is no such item, or the conversation is full.
        """
        place = len(self._items)
        if previous_item_id is not None:
            place = 0
            if previous_item_id != "root":
                place = self._items.index(self.find(previous_item_id, "previous_item_id")) + 1
        if any(known.id == item.id for known in self._items):
            raise invalid("item.id", f"`item.id` {item.id[:80]!r} exists already.")
        self.check_room(item.num_bytes)
        num_images = sum(known.num_images for known in (*self._items, item))
        if num_images > self._max_images:
            raise ClientError(
                f"The conversation would hold {num_images} pictures; at most {self._max_images} are accepted: delete "
                "earlier items.",
                code="too_many_images",
                param="item.content",
            )
        self._items.insert(place, item)
        return self._items[place - 1].id if place else None

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises `ClientError` when there is no room for one more item of that size."""
        if len(self._items) >= MAX_ITEMS or self.num_bytes + num_bytes > self._max_bytes:
            raise ClientError(
                f"The conversation is full ({len(self._items)} items, {self.num_bytes:,} bytes; at most {MAX_ITEMS} "
                f"and {self._max_bytes:,}); delete items first.",
                code="conversation_full",
                param="item",
            )

    def answer(self, item: Item) -> str | None:
        """Append what a response becomes, for which there was room when it was asked for; gives what `add` gives."""
        self._items.append(item)
        return self._items[-2].id if len(self._items) > 1 else None

    def find(self, item_id: str, param: str = "item_id") -> Item:
        """The item of that id; `param` is the field that names it.

        Raises:
            ClientError: There is none.
        """
        for item in self._items:
            if item.id == item_id:
                return item
        raise ClientError(
            f"There is no item {item_id[:80]!r} in the conversation.",
            status=404,
            code="item_not_found",
            param=param,
        )

    def delete(self, item_id: str) -> None:
        """Take an item out. Raises as `find` does."""
        self._items.remove(self.find(item_id))

    def clear(self) -> None:
        """Take all items out."""
        self._items.clear()


def messages_of(items: Iterable[Item], instructions: str | None) -> tuple[list[Message], dict[str, Item]]:
    """The chat, where turns of the same speaker in a row are one; and whose each part is, by its place in the chat as
    refusals name it.
    """
    turns: list[Message] = []
    whose: dict[str, Item] = {}
    if instructions:
        turns.append(Message("system", [TextPart(instructions)]))
    for item in items:
        if not turns or turns[-1].role != item.role:
            turns.append(Message(item.role, []))
        for part in item.parts:
            whose[f"messages[{len(turns) - 1}].content[{len(turns[-1].content)}]"] = item
            turns[-1].content.append(part)
    return turns, whose


@dataclass(frozen=True)
class PictureTerms:
    """How the pictures of an item are taken. `max_bytes`: encoded."""

    max_bytes: int
    detail: Detail = "auto"
    max_pixels: int = 0


def item_of(given: ItemInput, path: str, terms: PictureTerms) -> Item:
    """An item that a client sent. A picture's own `detail` goes before that of the terms.

    Raises:
        ClientError: Naming the field.
    """
    if given.type != "message":
        raise unsupported(f"{path}.type", f"`{path}.type` {given.type[:40]!r} is not supported except as message.")
    if given.role not in _PARTS_OF:
        raise invalid(f"{path}.role", f"`{path}.role` is {given.role!r:.40}; expected user, system or assistant.")
    parts: list[TextPart | ImagePart] = []
    for i, content in enumerate(given.content or []):
        place = f"{path}.content[{i}]"
        if content.type not in _PARTS_OF[given.role]:
            raise unsupported(
                f"{place}.type",
                f"`{place}.type` {content.type[:40]!r} is not supported here; expected "
                f"{' or '.join(_PARTS_OF[given.role])}.",
            )
        if content.type == "input_image":
            _refuse_other(content.text, f"{place}.text", "input_image")
            detail = content.detail or terms.detail
            parts.append(picture(content.image_url or "", f"{place}.image_url", replace(terms, detail=detail)))
            continue
        _refuse_other(content.image_url, f"{place}.image_url", content.type)
        _refuse_other(content.detail, f"{place}.detail", content.type)
        if content.text is None:
            raise invalid(f"{place}.text", f"`{place}.text` is missing.")
        parts.append(TextPart(content.text))
    if not parts:
        raise invalid(f"{path}.content", f"`{path}.content` is empty; expected text or a picture.")
    return Item(given.id or new_id("item"), given.role, parts)


def _refuse_other(value: object, path: str, kind: str) -> None:
    if value is not None:
        raise invalid(path, f"`{path}` has no meaning in {kind}: leave it out.")


def picture(url: str, path: str, terms: PictureTerms) -> ImagePart:
    """A picture from a data URL; workers decode it.

    Raises:
        ClientError: It is another kind of URL, empty, or too large.
    """
    if not url[:5].lower() == "data:":
        raise ClientError(
            f"`{path}` is no data URL, and this server fetches nothing: send the picture itself "
            "(data:image/…;base64,…).",
            code="remote_url_not_supported",
            param=path,
        )
    if len(url) * 3 // 4 > terms.max_bytes + 1024:
        raise ClientError(
            f"`{path}` is a picture of {len(url) * 3 // 4:,} bytes; at most {terms.max_bytes:,} are accepted.",
            status=413,
            code="image_too_large",
            param=path,
        )
    return ImagePart(data_url=url, detail=terms.detail, max_pixels=terms.max_pixels)


def new_id(kind: str) -> str:
    """``item_…``, ``resp_…``."""
    return f"{kind}_{secrets.token_hex(10)}"
