"""Trains the tokenizer: byte-level BPE with 6,144 entries, single digits, special tokens first.

Run `python -m samples.training.tokenizer PACK OUT`. It reads dialogues that the generators make, so that whatever the
model says is few tokens, and lists of words, so that whatever people write is not too many.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from samples.training.batches import Maker
from samples.training.dialogue import SPECIAL
from samples.training.names import Noun
from samples.training.pack import Pack

VOCABULARY = 6144


def new_tokenizer() -> Tokenizer:
    """An untrained tokenizer with the frozen splitting rules."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer trained on the texts."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def corpus(pack: Pack, dialogues: int) -> Iterator[str]:
    """What the tokenizer learns from: questions and answers, names, and plain words."""
    rng = random.Random(0)
    maker = Maker(pack, None, seed=0)
    for _ in range(dialogues):
        for question, answer in maker.texts():
            yield question
            yield " " + answer
    for name, kind in pack.kinds.items():
        noun = Noun(name, kind)
        for _ in range(20):
            yield f" {noun.some()} the {name} {noun.plural()} {name.title()}"
    for word in rng.sample(pack.words, min(12_000, len(pack.words))):
        yield " " + word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dialogues", type=int, default=20_000)
    arguments = parser.parse_args()
    tokenizer = train(corpus(Pack.load_index(arguments.pack), arguments.dialogues))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
