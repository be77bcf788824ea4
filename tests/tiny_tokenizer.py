"""A byte-level BPE tokenizer of about 500 ids, trained on the spot, and the files it is saved in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_SENTENCES: Final = [
    "User: What is in this picture? Assistant: The picture shows a red circle on a white background.",
    "User: Describe the image in one sentence. Assistant: A small black cat sits beside a green chair.",
    "User: How many squares are there? Assistant: There are three blue squares and two yellow triangles.",
    "User: What is written on the second sign? Assistant: The second sign says open from nine to five.",
    "User: Read the text. Assistant: Total 1234.50, date 2024-05-06, thank you for your visit.",
    "Système: où est la photo ? Là-bas, près du café. Größe und Länge: naïve façade, 写真 と 絵, фото 📷.",
    "The quick brown fox jumps over the lazy dog while the other animals describe what they have seen today.",
]


def tiny_tokenizer(special_tokens: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer`: special tokens first, by their order; digits stand alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer
