"""What token ids are as bytes: all ids of byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM), some of others.

A byte-level tokenizer spells each byte of a token as one printable character (Radford et al. 2019, `bytes_to_unicode`).
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


def byte_fallback_table(tokenizer: Tokenizer) -> dict[int, int]:
    """The byte of every id that spells one as ``<0x0A>``, where the tokenizer's decoder reads them so."""
    if "ByteFallback" not in json.dumps(json.loads(tokenizer.to_str()).get("decoder")):
        return {}
    spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
    return {token_id: spelled[token] for token, token_id in tokenizer.get_vocab().items() if token in spelled}


@cache
def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
