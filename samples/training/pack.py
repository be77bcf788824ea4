"""Builds the pack: every drawing as a small WebP with its name, the words, the typefaces, and the easy-VQA pictures.

Run `python -m samples.training.pack FETCHED PACK` after `sources`. The trainer and the tests read the pack with
`Pack.load`; the pack itself is not committed. Needs `resvg-py` and `fonttools` besides the project's packages.
"""

import argparse
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from samples.training.colours import dominant_colour
from samples.training.names import COUNTRIES, DROPPED, EXTRA_LABELS, KINDS, SPOKEN, Noun
from samples.training.sources import STYLES, folder_of
from samples.training.splits import HELD_OUT_STYLE, held_out

SIDE = 128  # pixels of a drawing's side in the pack
USED_GROUPS = (3, 4, 5, 6, 7)  # animals, food, travel, activities, objects
TYPEFACES = [
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "OpenSans-Regular",
    "OpenSans-Bold",
    "OpenSans-ExtraBold", "Lato-Regular", "Lato-Black", "ComicNeue-Regular", "ComicNeue-Bold", "DancingScript-Bold",
    "Lobster",
    "Quicksand-Regular", "Quicksand-Bold", "EBGaramond12-Regular", "EBGaramond12-Bold", "Hack-Regular", "Hack-Bold",
    "Roboto-Regular", "Roboto-Bold", "RobotoCondensed-Bold", "RobotoCondensed-Regular", "Carlito-Regular",
    "Carlito-Bold",
    "Caladea-Regular", "Caladea-Bold", "Inter-Regular", "Inter-Bold", "Inter-Black", "Gentium-R", "Cantarell-Regular",
    "Cantarell-ExtraBold", "FiraCode-Regular", "FiraCode-Bold", "JetBrainsMono-Regular", "JetBrainsMono-Bold",
    "Cabin-Regular",
    "Cabin-Bold", "CourierPrime", "Courier Prime", "Courier Prime Bold", "Karla-Regular", "Karla-Bold",
    "LeagueSpartan-Bold", "LeagueSpartan-Regular",
    "LiberationSans-Regular", "LiberationSans-Bold", "LiberationSerif-Regular", "LiberationSerif-Bold",
    "LiberationMono-Bold",
    "LinLibertine_R", "LinBiolinum_R", "mononoki-Regular", "mononoki-Bold", "NotoSans-Regular", "NotoSans-Bold",
    "NotoSerif-Regular",
    "NotoSerif-Bold", "NotoSansMono-Regular", "OldStandard-Regular", "PTS55F", "PTS75F", "PTF55F",
    "YanoneKaffeesatz-Regular",
    "YanoneKaffeesatz-Bold",
]  # fmt: skip


@dataclass
class Pack:
    """Everything the generators draw from.

    `sprites` is (count, SIDE, SIDE, 4) uint8; the lists beside it have one entry a sprite.
    """

    sprites: NDArray[np.uint8]
    names: list[str]
    styles: list[str]
    colours: list[str]
    kinds: dict[str, str]
    words: list[str]
    typefaces: dict[str, bytes]
    easy_vqa: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # part -> [{sprite, question, answer}]

    @staticmethod
    def load(folder: Path, threads: int = 4) -> "Pack":
        """Read a pack folder; decoding is spread over `threads`."""
        index = json.loads((folder / "index.json").read_text())
        blob = (folder / "sprites.bin").read_bytes()
        ends = np.cumsum([0, *index["lengths"]]).tolist()

        def decode(place: int) -> NDArray[np.uint8]:
            with Image.open(io.BytesIO(blob[ends[place] : ends[place + 1]])) as image:
                return np.asarray(image.convert("RGBA"))

        sprites = np.empty((len(index["lengths"]), SIDE, SIDE, 4), np.uint8)
        with ThreadPoolExecutor(threads) as pool:
            for place, pixels in enumerate(pool.map(decode, range(len(sprites)))):
                sprites[place] = pixels
        pack = Pack.load_index(folder)
        pack.sprites = sprites
        return pack

    @staticmethod
    def load_index(folder: Path) -> "Pack":
        """The same without the pixels (all that the generators need)."""
        index = json.loads((folder / "index.json").read_text())
        typefaces = {path.stem: path.read_bytes() for path in sorted((folder / "typefaces").iterdir())}
        return Pack(
            np.empty((0, SIDE, SIDE, 4), np.uint8), index["names"], index["styles"], index["colours"], index["kinds"],
            index["words"], typefaces, index["easy_vqa"],
        )  # fmt: skip


def slug(label: str) -> str:
    """The icon name that the symbol sets derive from a label."""
    plain = label.lower().replace("’", "").replace("ñ", "n").replace("å", "a").replace("ô", "o")
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


@dataclass(frozen=True)
class Concept:
    """A name with its kind, and the icon names that show it."""

    name: str
    kind: str
    icons: tuple[str, ...]


def concepts(root: Path) -> list[Concept]:
    """All things that get a name, merged where several symbols share one."""
    folder = folder_of(root, "emojibase-data") / "package/en"
    subgroups = {s["order"]: s["key"] for s in json.loads((folder / "messages.json").read_text())["subgroups"]}
    merged: dict[str, Concept] = {}
    for symbol in json.loads((folder / "data.json").read_text()):
        label, group = symbol["label"], symbol.get("group")
        country = label.removeprefix("flag: ")
        if label.startswith("flag: ") and country in COUNTRIES:
            name, kind, icon = (
                f"flag of {'the ' if country.startswith('United') else ''}{country}",
                "flag",
                "flag-" + slug(country),
            )
        elif label in EXTRA_LABELS or (group in USED_GROUPS and label not in DROPPED):
            name = SPOKEN.get(label, label)
            kind = KINDS.get(subgroups.get(symbol.get("subgroup"), ""), "")
            icon = slug(label)
        else:
            continue
        before = merged.get(name)
        merged[name] = Concept(name, before.kind if before else kind, (*(before.icons if before else ()), icon))
    return list(merged.values())


def icon_svg(icons: dict[str, Any], name: str) -> str | None:
    """A standalone SVG of one icon of an Iconify set, or None where the set has no such icon."""
    entry = icons["icons"].get(name)
    alias = icons.get("aliases", {}).get(name)
    if entry is None and alias is not None and set(alias) == {"parent"}:
        entry = icons["icons"].get(alias["parent"])
    if entry is None:
        return None
    width = entry.get("width", icons.get("width", 16))
    height = entry.get("height", icons.get("height", 16))
    box = f"{entry.get('left', 0)} {entry.get('top', 0)} {width} {height}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}"'
        f' width="{SIDE}" height="{SIDE}">{entry["body"]}</svg>'
    )


def fitted(image: Image.Image) -> Image.Image | None:
    """The drawing cut to what is painted and centred in a square of SIDE pixels; None where nothing is painted."""
    image = image.convert("RGBA")
    box = image.getchannel("A").point(lambda a: 255 if a > 8 else 0).getbbox()
    if box is None or box[2] - box[0] < 8 or box[3] - box[1] < 8:
        return None
    image = image.crop(box)
    image.thumbnail((SIDE - 4, SIDE - 4), Image.Resampling.LANCZOS)
    if max(image.size) < SIDE - 4:
        scale = (SIDE - 4) / max(image.size)
        image = image.resize(
            (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.LANCZOS
        )
    square = Image.new("RGBA", (SIDE, SIDE))
    square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return square


def symbol_sprites(root: Path, wanted: list[Concept]) -> Iterator[tuple[str, str, Image.Image]]:
    """(name, style, drawing) of every concept in every style that draws it."""
    import resvg_py

    for style in STYLES:
        icons = json.loads((folder_of(root, f"@iconify-json/{style}") / "package/icons.json").read_text())
        for concept in wanted:
            for icon in concept.icons:
                shortened = icon.replace("-face", "").replace("-", "")
                for candidate in (icon, shortened if style == "fxemoji" else icon):
                    svg = icon_svg(icons, candidate)
                    if svg is not None:
                        png = bytes(
                            resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, skip_system_fonts=True)
                        )
                        drawing = fitted(Image.open(io.BytesIO(png)))
                        if drawing is not None:
                            yield concept.name, style, drawing
                        break


NOT_IN_CLIPART = {  # file names that end so show something else
    "beach", "baby", "man", "bookmark", "satellite", "bat", "mouse", "umbrella", "tower", "palette", "pen", "star",
    "window",
    "cat", "cow", "airplane", "train", "chicken", "sun", "scroll", "bomb", "football", "baseball", "laptop",
    "heart", "telephone",
    "apple", "ruler", "feather", "horn", "leg", "foot", "city", "bank", "shoe", "eye", "target", "warning sign",
}  # fmt: skip


def clipart_sprites(root: Path, wanted: list[Concept], most: int = 8) -> Iterator[tuple[str, str, Image.Image]]:
    """Public-domain cliparts whose file name ends in the name of a concept ("fat_cat_02" is a cat)."""
    by_name = {concept.name.lower(): concept.name for concept in wanted if concept.name not in NOT_IN_CLIPART}
    drawings = folder_of(root, "openclipart-png") / "usr/share/openclipart/png"
    marks = folder_of(root, "openclipart-svg") / "usr/share/openclipart/svg"
    useful = {"animals", "food", "recreation", "tools", "office", "transportation", "plants", "buildings",
    "household", "music",
              "clothing", "science", "sports", "education", "computer", "electronics", "furniture", "weapons",
              "toys"}  # fmt: skip
    found: dict[str, int] = {}
    for path in sorted(drawings.rglob("*.png")):
        if path.is_symlink() or not useful & set(path.relative_to(drawings).parts[:-1]):
            continue
        words = [
            w
            for w in re.split(r"[^a-z]+", path.stem.lower())
            if len(w) > 1 and w not in ("ganson", "benji", "park", "architetto")
        ]
        tails = [" ".join(words[-n:]) for n in (3, 2, 1) if len(words) >= n]
        name = next((by_name[tail] for tail in tails if tail in by_name), None)
        if name is None and words and words[0] in by_name and len(words) <= 3:
            name = by_name[words[0]]
        mark = marks / path.relative_to(drawings).with_suffix(".svg")
        if name is None or found.get(name, 0) >= most or not mark.is_file():
            continue
        if "publicdomain" not in mark.read_text(errors="ignore").lower().replace(" ", ""):
            continue
        with Image.open(path) as image:
            drawing = fitted(image) if image.width * image.height < 4_000_000 else None
        if drawing is not None:
            found[name] = found.get(name, 0) + 1
            yield name, "openclipart", drawing


def easy_vqa_sprites(root: Path) -> Iterator[tuple[str, int, Image.Image]]:
    """(part, number, picture) of the easy-VQA pictures."""
    for part, count in (("train", 4000), ("test", 1000)):
        images = folder_of(root, "easy-vqa") / f"easy_vqa/data/{part}/images"
        for number in range(count):
            with Image.open(images / f"{number}.png") as image:
                yield part, number, image.convert("RGBA")


def words(root: Path) -> list[str]:
    """Plain English words of 2 to 12 letters."""
    lines = (folder_of(root, "wamerican") / "usr/share/dict/american-english").read_text().split("\n")
    return [word for word in lines if re.fullmatch(r"[a-z]{2,12}", word)]


def build(root: Path, target: Path) -> None:
    """Write the pack folder: `index.json`, `sprites.bin` and `typefaces/`."""
    from fontTools import subset

    (target / "typefaces").mkdir(parents=True, exist_ok=True)
    wanted = concepts(root)
    names, styles, colours, lengths = [], [], [], []
    with (target / "sprites.bin").open("wb") as blob:

        def add(name: str, style: str, drawing: Image.Image, lossless: bool = False) -> int:
            colours.append("" if lossless else dominant_colour(np.asarray(drawing)))
            names.append(name)
            styles.append(style)
            encoded = io.BytesIO()
            drawing.save(encoded, "WEBP", quality=88, method=4, lossless=lossless)
            lengths.append(blob.write(encoded.getvalue()))
            return len(names) - 1

        for name, style, drawing in symbol_sprites(root, wanted):
            add(name, style, drawing)
        for name, style, drawing in clipart_sprites(root, wanted):
            add(name, style, drawing)
        places = {
            (part, number): add("", "easy-vqa", picture.resize((SIDE, SIDE), Image.Resampling.NEAREST), lossless=True)
            for part, number, picture in easy_vqa_sprites(root)
        }
    easy: dict[str, list[dict[str, Any]]] = {}
    for part in ("train", "test"):
        questions = json.loads((folder_of(root, "easy-vqa") / f"easy_vqa/data/{part}/questions.json").read_text())
        easy[part] = [{"sprite": places[part, number], "question": q, "answer": a} for q, a, number in questions]
    kinds = {concept.name: concept.kind for concept in wanted}
    index = {
        "names": names,
        "styles": styles,
        "colours": colours,
        "lengths": lengths,
        "kinds": kinds,
        "words": words(root),
        "easy_vqa": easy,
    }
    (target / "index.json").write_text(json.dumps(index))
    options = subset.Options(hinting=False, layout_features=["kern"], notdef_outline=True)
    for path in sorted(root.glob("fonts-*/usr/share/fonts/**/*.[ot]tf")):
        if path.stem in TYPEFACES and not (target / "typefaces" / path.name).exists():
            font = subset.load_font(str(path), options)
            subsetter = subset.Subsetter(options)
            subsetter.populate(unicodes=range(32, 127))
            subsetter.subset(font)
            subset.save_font(font, str(target / "typefaces" / path.name), options)
    drawn = [(n, s) for n, s in zip(names, styles, strict=True) if n]
    seen = {name for name, style in drawn if style != HELD_OUT_STYLE}
    kept = sum(held_out("sprite", f"{name}/{style}") for name, style in drawn)
    size = (target / "sprites.bin").stat().st_size / 2**20
    faces = len(list((target / "typefaces").iterdir()))
    print(f"{len(drawn)} drawings of {len(seen)} concepts, {kept} held out; {size:.1f} MiB; {faces} typefaces")


def noun(pack: Pack, name: str) -> Noun:
    """The noun of a concept of the pack."""
    return Noun(name, pack.kinds.get(name, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fetched", type=Path)
    parser.add_argument("pack", type=Path)
    arguments = parser.parse_args()
    build(arguments.fetched, arguments.pack)


if __name__ == "__main__":
    main()
