"""The packages that the training data come from, and how to fetch them with npm, pip and apt.

Run `python -m samples.training.sources FOLDER`: it fills FOLDER with one subfolder a package, unpacked.
Fonts and drawings are only used to make pictures; none of them is part of the model or of this repository.
"""

import argparse
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A package of a registry (`npm`, `pip` or `apt`), its licence, and what it is used for."""

    registry: str
    package: str
    licence: str
    use: str


STYLES = ("fluent-emoji", "fluent-emoji-flat", "noto", "twemoji", "emojione", "fxemoji", "openmoji")
SOURCES = [
    Source("npm", "@iconify-json/fluent-emoji", "MIT (Microsoft)", "drawings"),
    Source("npm", "@iconify-json/fluent-emoji-flat", "MIT (Microsoft)", "drawings"),
    Source("npm", "@iconify-json/noto", "Apache-2.0 (Google)", "drawings"),
    Source("npm", "@iconify-json/twemoji", "CC BY 4.0 (Twitter and other contributors)", "drawings"),
    Source("npm", "@iconify-json/emojione", "CC BY 4.0 (EmojiOne, version 2)", "drawings"),
    Source("npm", "@iconify-json/fxemoji", "Apache-2.0 (Mozilla)", "drawings"),
    Source("npm", "@iconify-json/openmoji", "CC BY-SA 4.0 (OpenMoji)", "test only: the unseen style"),
    Source("npm", "emojibase-data", "MIT (Miles Johnson)", "names and kinds"),
    Source("pip", "easy-vqa", "MIT (Victor Zhou)",
    "pictures and questions: train part for training, test part for the test"),
    Source("apt", "openclipart-png", "public domain (as marked file by file)", "drawings"),
    Source("apt", "openclipart-svg", "public domain (as marked file by file)", "the marks of the drawings"),
    Source("apt", "wamerican", "SCOWL (permissive)", "words to read"),
    *(
        Source("apt", package, licence, "typefaces")
        for package, licence in {
            "fonts-dejavu-core": "Bitstream Vera", "fonts-dejavu-extra": "Bitstream Vera",
            "fonts-open-sans": "Apache-2.0",
            "fonts-lato": "OFL", "fonts-comic-neue": "OFL", "fonts-dancingscript": "OFL", "fonts-lobster": "OFL",
            "fonts-quicksand": "OFL", "fonts-ebgaramond": "OFL", "fonts-hack": "MIT",
            "fonts-roboto-unhinted": "Apache-2.0",
            "fonts-crosextra-carlito": "OFL", "fonts-crosextra-caladea": "Apache-2.0", "fonts-inter": "OFL",
            "fonts-sil-gentium": "OFL", "fonts-cantarell": "OFL", "fonts-firacode": "OFL",
            "fonts-jetbrains-mono": "OFL",
            "fonts-cabin": "OFL", "fonts-courier-prime": "OFL", "fonts-junicode": "OFL", "fonts-karla": "OFL",
            "fonts-league-spartan": "OFL", "fonts-liberation2": "OFL", "fonts-linuxlibertine": "OFL (dual)",
            "fonts-mononoki": "OFL",
            "fonts-noto-core": "OFL", "fonts-oldstandard": "OFL", "fonts-paratype": "OFL",
            "fonts-yanone-kaffeesatz": "OFL",
        }.items()
    ),
]  # fmt: skip


def folder_of(root: Path, package: str) -> Path:
    """Where a package is unpacked."""
    return root / package.replace("@iconify-json/", "iconify-")


def fetch(source: Source, root: Path) -> None:
    """Download one package with its registry's own client and unpack it (nothing is done if it is there)."""
    target = folder_of(root, source.package)
    if target.exists():
        return
    download = root / "download" / target.name
    download.mkdir(parents=True, exist_ok=True)
    command = {
        "npm": ["npm", "pack", "--silent", source.package],
        "pip": ["pip", "download", "--quiet", "--no-deps", source.package],
        "apt": ["apt-get", "download", "--quiet", source.package],
    }[source.registry]
    if not any(download.iterdir()):
        subprocess.run(command, cwd=download, check=True, stdout=subprocess.DEVNULL)
    archive = next(path for path in download.iterdir())
    target.mkdir()
    if source.registry == "npm":
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    elif source.registry == "pip":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
    else:
        subprocess.run(["dpkg", "-x", str(archive), str(target)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    root = parser.parse_args().folder
    root.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        print(f"{source.package}: {source.licence}", flush=True)
        fetch(source, root)


if __name__ == "__main__":
    main()
