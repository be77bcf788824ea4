"""What each token id is as bytes, for tokenizers of the byte-level kind (GPT-2, Llama 3, Qwen, SmolLM).

Such a tokenizer spells each byte of a token as one printable character (Radford et al. 2019, `bytes_to_unicode`).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is the byte-level one, and nothing else."""
    decoder: Any = json.loads(tokenizer.to_str()).get("decoder")
    if decoder and decoder.get("type") == "Sequence":
        decoders = decoder.get("decoders", [])
        decoder = decoders[0] if len(decoders) == 1 else None
    return bool(decoder) and decoder.get("type") == "ByteLevel"


def byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of every id. A token with a character outside of the byte alphabet is taken as the text it is."""
    alphabet = _byte_of_character()
    table: dict[int, bytes] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes(alphabet[character] for character in token)
        except KeyError:
            table[token_id] = token.encode()
    return table


@cache
def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
