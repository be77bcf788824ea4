"""The tokenizer of a model folder: `tokenizer.json`, or the `vocab.json` and `merges.txt` that older folders have.

Tokens that only `tokenizer_config.json`, `added_tokens.json` or lists of special tokens name are added, as
transformers adds them.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from preprocess.model_folder import ModelFolder, bad_folder

_QWEN_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Qwen's tokenizer takes for a word (arXiv:2309.16609, section 2.2; part of every published tokenizer.json)."""


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The folder's tokenizer, without truncation or padding."""
    if folder.tokenizer_path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
        except Exception as error:  # the library raises bare Exception
            raise bad_folder(folder.path, "tokenizer.json cannot be read") from error
    else:
        tokenizer = _from_vocabulary(folder)
    _add_tokens(folder, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_vocabulary(folder: ModelFolder) -> Tokenizer:
    """A byte-level BPE of `vocab.json` and `merges.txt`."""
    vocabulary, merges = folder.path / "vocab.json", folder.path / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        raise bad_folder(folder.path, "there is no tokenizer.json in it, nor vocab.json and merges.txt")
    kind = str(folder.tokenizer_config.get("tokenizer_class", "")).removesuffix("Fast")
    if not kind:
        kind = "Qwen2Tokenizer" if folder.model_type.startswith("qwen") else "GPT2Tokenizer"
    if kind not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        raise bad_folder(
            folder.path,
            f"there is no tokenizer.json in it, and vocab.json is that of a {kind}, which transformers converts: "
            "load it there with AutoTokenizer and save it again",
        )
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise bad_folder(folder.path, "vocab.json and merges.txt cannot be read") from error
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "GPT2Tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _add_tokens(folder: ModelFolder, tokenizer: Tokenizer) -> None:
    """Adds what the tokenizer does not have yet. Ids are what they are: those that files name must come out."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted(folder.added_tokens.items())
    try:
        named = [(token_id, AddedToken(**fields)) for token_id, fields in listed if fields.get("content") not in known]
    except TypeError as error:
        raise bad_folder(folder.path, "its added_tokens_decoder has fields that no token has") from error
    tokenizer.add_tokens([token for _, token in named])
    for token_id, token in named:
        if tokenizer.token_to_id(token.content) != token_id:
            raise bad_folder(
                folder.path,
                f"its added token {token.content!r} has the id {token_id}, but in its vocabulary it would get "
                f"{tokenizer.token_to_id(token.content)}",
            )
    known |= {token.content for _, token in named}
    special = [AddedToken(token, special=True) for token in folder.special_tokens if token not in known]
    tokenizer.add_tokens(special)
