"""From turns and pictures to the exact token ids that serving produces.

The strings are those of SmolVLM's chat template and processor; nothing here may differ from what a server writes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from samples.training.model import IMAGE_TOKENS

PAD, START, END, IMAGE, FAKE, GLOBAL, UTTERANCE = range(7)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)), "<video>",
]  # fmt: skip
ENDS = {END, UTTERANCE, PAD}

CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}"
    "{% else %}"
    "{% if message['content'] and message['content'][0]['type'] in ['image', 'image_url'] %}"
    "{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] in ['text', 'input_text'] %}{{ line['text'] }}"
    "{% elif line['type'] in ['image', 'image_url'] %}{{ '<image>' }}"
    "{% elif line['type'] in ['video', 'video_url'] %}{{ '<video>' }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def image_string(split: bool = False) -> str:
    """What SmolVLM's processor writes for one picture: one tile, or 2 x 2 tiles and the whole."""
    tokens = "<image>" * IMAGE_TOKENS
    whole = f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
    if not split:
        return whole
    rows = "".join(
        "".join(f"<fake_token_around_image><row_{row}_col_{column}>{tokens}" for column in (1, 2)) + "\n"
        for row in (1, 2)
    )
    return f"{rows}\n{whole}"


@dataclass(frozen=True)
class Seen:
    """A picture in a message; `split` ones take five places among the pixels."""

    split: bool = False

    @property
    def tiles(self) -> int:
        return 5 if self.split else 1


Part = str | Seen


def message(role: str, parts: Sequence[Part]) -> str:
    """One message as the chat template and the processor write it."""
    text = role + (":" if parts and isinstance(parts[0], Seen) else ": ")
    text += "".join(part if isinstance(part, str) else image_string(part.split) for part in parts)
    return text + "<end_of_utterance>\n"


@dataclass
class Document:
    """Token ids, which of them are answers (with their weight), and how many pictures (tiles) they need."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    pictures: int = 0


class Writer:
    """Turns dialogues into documents; pieces are encoded one by one where the tokenizer splits anyway."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=400_000)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: Sequence[tuple[str, Sequence[Part]]]) -> list[int]:
        """Ids of whole messages and the generation prompt."""
        text = "<|im_start|>" + "".join(message(role, parts) for role, parts in messages) + "Assistant:"
        return list(self._encode(text))

    def document(self, turns: Sequence[tuple[Sequence[Part], str]], system: str = "") -> Document:
        """A dialogue of questions, each with its parts (text and pictures), and answers."""
        document = Document()
        head = "<|im_start|>" + (message("System", [system]) if system else "")
        for number, (parts, answer) in enumerate(turns):
            text = (head if number == 0 else "\n") + ("User:" if isinstance(parts[0], Seen) else "User: ")
            for part in parts:  # pictures begin and end with special tokens, so the text may be cut there
                if isinstance(part, str):
                    text += part
                else:
                    self._add(document, text, 0.0)
                    self._add(document, image_string(part.split), 0.0)
                    document.pictures += part.tiles
                    text = ""
            self._add(document, text + "<end_of_utterance>\nAssistant:", 0.0)
            self._answer(document, answer)
        return document

    def _add(self, document: Document, text: str, weight: float) -> None:
        if text:
            ids = self.encode(text) if len(text) < 160 or text.startswith("<fake") else self._encode(text)
            document.ids.extend(ids)
            document.weights.extend([weight] * len(ids))

    def _answer(self, document: Document, answer: str) -> None:
        ids = self.encode(f" {answer}<end_of_utterance>")
        self._weigh(document, ids)

    @staticmethod
    def _weigh(document: Document, ids: tuple[int, ...]) -> None:
        document.ids.extend(ids)
        document.weights.extend([len(ids) ** -0.5] * len(ids))


def first_parts(question: str, pictures: list[Seen], rng: random.Random, numbered: bool = False) -> list[Part]:
    """The parts of a first question: pictures mostly before the text, at times after it, at times numbered."""
    if numbered:
        word = rng.choice(["Picture", "Image"])
        parts: list[Part] = []
        for number, picture in enumerate(pictures, 1):
            parts += [f"{word} {number}:" if number == 1 else f"\n{word} {number}:", picture]
        return [*parts, f"\n{question}"]
    if rng.random() < 0.72:
        gap = rng.choice(["", "", "", "\n", " "])
        return [*pictures, gap + question]
    return [question + rng.choice(["", "", "\n", " "]), *pictures]


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
