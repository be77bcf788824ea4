"""Where a model comes from: the bundled one, a folder, or the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

BUNDLED_MODEL_NAME: Final = "beholder"
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
"""Endings of weights in other formats; those that are pickled run code when they are loaded."""


class ModelSourceError(Exception):
    """There is no such model, in one line that says why."""


# Weights, configuration, chat template, tokenizer. Nothing that runs code when it is loaded.
HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")


def bundled_model_folder() -> Path:
    """Where the model that comes with Beholder lies: in a checkout, or below the installation's `share`."""
    checkout = Path(__file__).resolve().parent.parent / "samples" / "model"
    installed = Path(sys.prefix) / "share" / "beholder" / "model"
    return checkout if (checkout / "config.json").is_file() else installed


def default_model_name(model: str) -> str:
    """The name of a model that nobody named: the hub's, or the folder's own."""
    if not model:
        return BUNDLED_MODEL_NAME
    if Path(model).is_dir():
        folder = Path(model).resolve()
        return BUNDLED_MODEL_NAME if folder == bundled_model_folder().resolve() else folder.name
    return model


def model_folder(model: str) -> Path:
    """The folder of a model given as folder, hub name, or nothing (the bundled one).

    Raises:
        ModelSourceError: It cannot be found, in one line.
    """
    folder = Path(model).expanduser() if model else bundled_model_folder()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelSourceError(f"the folder {folder} holds no config.json, so it is no model folder")
        _refuse_other_weights(folder)
        return folder.resolve()
    if not model:
        raise ModelSourceError(f"the bundled model is missing: expected it in {folder}; name another one")
    if folder.exists():
        raise ModelSourceError(f"{model!r} is a file; expected the folder that holds config.json and the weights")
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in {".", "..", "~"} or model.startswith(("/", "\\")):
        raise ModelSourceError(f"there is no folder {model!r}; expected a folder or a hub name such as owner/name")
    return _download(model)


def _refuse_other_weights(folder: Path) -> None:
    """Raises `ModelSourceError` for a folder whose weights are all in formats that are not read."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in {*_PICKLED, ".safetensors"})
    if names and not any(name.endswith(".safetensors") for name in names):
        raise ModelSourceError(
            f"the weights in {folder} are no safetensors ({names[0]}{' and others' if len(names) > 1 else ''}); other "
            "formats are never read, since pickles run code: save the model again with save_pretrained of transformers"
        )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError:
        problem = f"{name!r} is neither a folder here nor a possible hub name (owner/name)"
    except GatedRepoError:
        problem = f"the hub asks for access rights to {name!r}: accept its terms there and log in with `hf auth login`"
    except RepositoryNotFoundError:
        problem = f"there is no folder {name!r} here, and the hub knows no public model of that name"
    except LocalEntryNotFoundError:
        problem = (
            f"there is no folder {name!r} here, the model is not in the local hub cache, and the hub cannot be reached"
        )
    except Exception as error:  # The hub client raises errors of its HTTP library too: one line, never a traceback.
        problem = f"{name!r} could not be downloaded from the hub ({type(error).__name__})"
    else:
        if not (folder / "config.json").is_file():
            problem = f"{name!r} on the hub holds no config.json, so it is no model folder"
        elif not any(folder.glob("*.safetensors")):
            problem = f"{name!r} on the hub has no weights as safetensors; other formats are never read"
        else:
            return folder
    raise ModelSourceError(problem)
