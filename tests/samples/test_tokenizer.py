"""The bundled tokenizer keeps the frozen interface: ids, digits, bytes."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from samples.training.dialogue import SPECIAL


@pytest.fixture(scope="module")
def tokenizer(samples: Path) -> Tokenizer:
    return Tokenizer.from_file(str(samples / "model" / "tokenizer.json"))


def test_special_tokens_come_first_in_the_frozen_order(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert SPECIAL[:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
    assert "<row_4_col_4>" in SPECIAL


def test_it_has_6144_entries(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 6144


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2024").ids) == 4
    assert tokenizer.encode("17").ids == [tokenizer.token_to_id("1"), tokenizer.token_to_id("7")]


@pytest.mark.parametrize(
    "text", ["The cat is blue.", "Ünïcödé — 日本語 🎈", "a\n\nb\t c  d", '{"objects": ["cat"]}', "<|im_end> <image"]
)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_an_answer_may_be_encoded_apart_from_its_prompt(tokenizer: Tokenizer) -> None:
    prompt, answer = "<|im_start|>User: Hi<end_of_utterance>\nAssistant:", ' "Hello", said 3 cats.<end_of_utterance>'
    whole = tokenizer.encode(prompt + answer, add_special_tokens=False).ids
    apart = [tokenizer.encode(part, add_special_tokens=False).ids for part in (prompt, answer)]
    assert whole == apart[0] + apart[1]
