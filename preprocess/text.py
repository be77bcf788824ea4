"""Chat messages → token ids, with placeholders where the pictures stand.

The ids of ordinary text are those of the reference (its chat template and tokenizer). But nothing that a client writes
can become a control token: while the template runs, the characters that special tokens begin and end with are replaced
in the client's text by private ones, so a special token found in the rendered prompt can only be the template's or a
picture's. The pieces between those are encoded with special tokens switched off.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from typing import Any, Final

from tokenizers import AddedToken

from preprocess.chat_template import ChatTemplate, Part, Turn
from preprocess.client_text import arguments_of, free_characters, texts, translated, valid_unicode
from preprocess.errors import BeholderError, ClientError
from preprocess.families import Family
from preprocess.model_folder import ModelFolder, bad_folder
from preprocess.spans import Span, spans_of
from preprocess.tokenizer import load_tokenizer
from preprocess.wire import ImagePart, Message, TextPart, VideoPart

CACHED_PIECES: Final = 64
"""Pieces of text whose ids are kept. They take 5 MB; at worst, of characters of four bytes that normalising (NFC) makes
three of, each byte of which is a token, 55 MB."""
CACHED_CHARACTERS: Final = 16_384

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as ids. `spans[i]` are the (start, length) runs of placeholder ids of the i-th picture or frame."""

    ids: list[int]
    spans: list[list[Span]]


class PromptEncoder:
    """Holds the tokenizer and the chat template of a model folder."""

    def __init__(self, folder: ModelFolder, family: Family) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._image_id = family.image_token_id
        if self._image_id not in added:
            raise bad_folder(folder.path, f"the tokenizer has no added token {self._image_id} (image_token_id)")
        self._image = added[self._image_id].content
        if self._image not in family.placeholder(family.layout(64, 64, "low")):
            raise bad_folder(folder.path, f"image_token_id {self._image_id} is {self._image!r}, which shows no picture")
        self._vision_ids = {self._image_id}
        if family.clips is not None:
            shown = family.clips.placeholder(family.clips.layout(64, 64, 1), [Fraction(0)], Fraction(1))
            if family.clips.token_id not in added or added[family.clips.token_id].content not in shown:
                raise bad_folder(
                    folder.path, f"the tokenizer has no added token {family.clips.token_id} for clips (video_token_id)"
                )
            self._vision_ids.add(family.clips.token_id)
        guarded = {*(added[token_id].content for token_id in self._vision_ids), *family.protected_tokens()}
        self._special = {
            token.content: (token_id, token)
            for token_id, token in added.items()
            if token.special or token.content in guarded
        }
        self._special_ids = frozenset(token_id for token_id, _ in self._special.values())
        self._find_special = _runs_of(self._special)
        plain_spelled = [token.content for _, token in self._special.values() if not token.special]
        self._find_matched_anyway = _any_of(plain_spelled) if plain_spelled else None
        self._template = ChatTemplate(folder.chat_template, folder.named_tokens)
        self._edges = sorted({edge for spelling in self._special for edge in (spelling[0], spelling[-1])})
        harmless = [literal for literal in self._template.literals if self._is_harmless(literal)]
        self._find_harmless = re.compile(f"({_any_of(harmless).pattern})") if harmless else None
        self._bos = folder.named_tokens.get("bos_token")
        self._known_ids_of = lru_cache(CACHED_PIECES)(self._kept_ids_of)
        self._prefix, self._suffix = self._added_around()
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows."""
        return self._tokenizer.get_vocab_size()

    def token_id(self, spelling: str) -> int | None:
        """The id of a token by its spelling."""
        token_id: int | None = self._tokenizer.token_to_id(spelling)
        return token_id

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """No fewer tokens than this can come out: a cheap bound, to refuse a flood of text before working on it."""
        return sum(len(text) for text in texts(messages)) // self._longest_token

    def encode(
        self,
        messages: Sequence[Message],
        placeholders: Sequence[str],
        num_tokens: Sequence[int],
        tools: Sequence[Any] = (),
    ) -> PromptIds:
        """Token ids of a chat.

        Args:
            messages: The turns.
            placeholders: For each picture and clip in order, the text that stands for it (`Family.placeholder`).
            num_tokens: For each picture and each frame of a clip, how many placeholder ids that gives.
            tools: What the model may call, as the template takes it.

        Raises:
            ClientError: The turns make no chat.
        """
        self._check_tools(messages, tools)
        free = free_characters(messages, tools)
        stand_ins = dict(zip(self._edges, free, strict=False))
        clip = next(free)
        told = [translated(tool, str.maketrans(stand_ins)) for tool in tools]
        rendered = self._template.render(self._turns(messages, stand_ins, clip), told)
        prompt = self._place_media(rendered, messages, clip, placeholders)
        ids = list(self._encode_prompt(prompt, {ord(private): edge for edge, private in stand_ins.items()}))
        if self._bos is None or not prompt.startswith(self._bos):
            ids = [*self._prefix, *ids, *self._suffix]
        return PromptIds(ids, spans_of(ids, self._vision_ids, num_tokens))

    @property
    def answers_follow_text(self) -> bool:
        """Whether the template ends with text, such as ``Assistant:``, and not with a line break or a control token."""
        try:
            last = self.encode([Message("user", [TextPart("?")])], [], []).ids[-1]
        except BeholderError:  # a template that wants more than one question says nothing
            return False
        text: str = self._tokenizer.decode([last], skip_special_tokens=True)
        return bool(text) and not text[-1].isspace()

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text alone."""
        return list(self._encode_piece(valid_unicode(text)))

    # ---- before rendering: the client's text is made harmless -----------------------------------------------------

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Refuse tools, calls and their results where the template would leave them out."""
        if self._template.knows_tools:
            return
        place = next((i for i, message in enumerate(messages) if message.role == "tool" or message.tool_calls), None)
        if tools or place is not None:
            raise ClientError(
                "`tools` are not supported by this model: its chat template knows none.",
                code="unsupported_parameter",
                param="tools" if tools else f"messages[{place}]",
            )

    def _turns(self, messages: Sequence[Message], stand_ins: dict[str, str], clip: str) -> list[Turn]:
        """What the template gets.

        Args:
            messages: The turns.
            stand_ins: Edge character of special tokens → the private one that stands for it in the client's text.
            clip: A private character that stands for each clip. It goes through every template as text does, and where
                transformers has a template of its own for clips (SmolVLM2) the result is the same.
        """
        if not messages:
            raise ClientError("`messages` is empty; send at least one.", code="messages_empty", param="messages")
        table = str.maketrans(stand_ins)
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            role = _ROLES.get(message.role)
            if role is None:
                raise ClientError(
                    f"Unknown role {message.role!r}; known are {', '.join(_ROLES)}.",
                    code="unknown_role",
                    param=f"messages[{index}].role",
                )
            if not message.content and not message.tool_calls:
                raise ClientError(
                    "The message has no content; send text or a picture.",
                    code="messages_empty",
                    param=f"messages[{index}].content",
                )
            parts = [self._part(part, table, clip) for part in message.content]
            turn: Turn = {"role": role, "content": parts}
            if not self._template.takes_parts:
                turn["content"] = "".join(part.get("text", self._image) for part in parts)
            if message.tool_calls:
                turn["tool_calls"] = [
                    {
                        "id": call.id.translate(table),
                        "type": "function",
                        "function": {
                            "name": call.name.translate(table),
                            "arguments": translated(arguments_of(call), table),
                        },
                    }
                    for call in message.tool_calls
                ]
            if message.role == "tool":
                turn["tool_call_id"] = message.tool_call_id.translate(table)
            turns.append(turn)
        return turns

    def _part(self, part: TextPart | ImagePart | VideoPart, table: dict[int, str], clip: str) -> Part:
        if isinstance(part, ImagePart):
            return {"type": "image"}
        if isinstance(part, VideoPart):
            return {"type": "text", "text": clip}
        text = valid_unicode(part.text)
        if self._find_harmless is None:
            return {"type": "text", "text": text.translate(table)}
        pieces = self._find_harmless.split(text)
        return {
            "type": "text",
            "text": "".join(piece if odd else piece.translate(table) for odd, piece in _alternate(pieces)),
        }

    def _is_harmless(self, literal: str) -> bool:
        """Whether a text that a template looks for, such as ``</think>``, may stay as it is in the client's text."""
        return any(edge in literal for edge in self._edges) and not any(
            special in literal or literal in special for special in self._special
        )

    # ---- after rendering -------------------------------------------------------------------------------------------

    def _place_media(self, rendered: str, messages: Sequence[Message], clip: str, placeholders: Sequence[str]) -> str:
        parts = [part for message in messages for part in message.content if not isinstance(part, TextPart)]
        expected = [clip if isinstance(part, VideoPart) else self._image for part in parts]
        pieces = re.split(f"({re.escape(self._image)}|{clip})", rendered)
        if pieces[1::2] != expected:
            what = "clips" if clip in expected else "pictures"
            raise ClientError(
                f"The model's chat template shows {len(pieces) // 2} of {len(placeholders)} {what}; "
                f"it takes none in some of these turns, move the {what} into a user message.",
                code="picture_not_placed",
                param="messages",
            )
        pieces[1::2] = placeholders
        return "".join(pieces)

    def _encode_prompt(self, prompt: str, restore: dict[int, str]) -> Iterator[int]:
        position = 0
        strip_next = False
        for match in self._find_special.finditer(prompt):
            token_id, token = self._special[match[1]]
            if match.start() > position:
                yield from self._encode_plain(_between(prompt[position : match.start()], strip_next, token), restore)
            yield from repeat(token_id, len(match[0]) // len(match[1]))
            position, strip_next = match.end(), token.rstrip
        yield from self._encode_plain(_between(prompt[position:], strip_next, None), restore)

    def _encode_plain(self, text: str, restore: dict[int, str]) -> Iterator[int]:
        """Text without control tokens. What spells one here was the client's."""
        text = text.translate(restore)
        if not text:
            return
        position = 0
        if self._find_matched_anyway is not None:  # tokens not marked special are found even in plain text: cut them
            for match in self._find_matched_anyway.finditer(text):
                yield from self._encode_piece(text[position : match.start() + 1])
                position = match.start() + 1
        yield from self._encode_piece(text[position:])

    def _encode_piece(self, text: str) -> Sequence[int]:
        """What a template writes around turns, and what a camera is asked of every frame, comes again and again."""
        return memoryview(self._known_ids_of(text)).cast("i") if len(text) <= CACHED_CHARACTERS else self._ids_of(text)

    def _kept_ids_of(self, text: str) -> bytes:
        """Nobody changes them, and they take an eighth of what a list of them does."""
        return array("i", self._ids_of(text)).tobytes()

    def _ids_of(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._special_ids.isdisjoint(ids):  # a normaliser or merge made one after all: one character at a time
            ids = [i for char in text for i in self._tokenizer.encode(char, add_special_tokens=False).ids]
            if not self._special_ids.isdisjoint(ids):
                raise ClientError("The text holds a control character of this model.", code="text_refused")
        return ids

    def _added_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and after every text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []


def _runs_of(spellings: Mapping[str, object]) -> re.Pattern[str]:
    """Group 1 is one of the spellings. All of the match is that one again and again: a picture is hundreds of one
    control token. Only where none is the beginning of another: else what looks like a second one may be the longer.
    """
    is_prefix_free = not any(other != one and other.startswith(one) for one in spellings for other in spellings)
    again = r"\1*" if is_prefix_free else ""
    return re.compile(f"({_any_of(spellings).pattern}){again}")


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest, as the tokenizer matches."""
    return re.compile("|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)))


def _between(text: str, strip_start: bool, token: AddedToken | None) -> str:
    """Text between two special tokens, some of which swallow the white space beside them."""
    text = text.lstrip() if strip_start else text
    return text.rstrip() if token is not None and token.lstrip else text


def _alternate(pieces: Sequence[str]) -> Iterator[tuple[bool, str]]:
    return ((index % 2 == 1, piece) for index, piece in enumerate(pieces))
