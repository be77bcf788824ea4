"""The tokenizer of a model folder."""

from __future__ import annotations

from tokenizers import Tokenizer

from preprocess.errors import ServiceError
from preprocess.model_folder import ModelFolder, bad_folder


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The folder's tokenizer, without truncation or padding."""
    try:
        tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
    except ServiceError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise bad_folder(folder.path, "tokenizer.json cannot be read") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
