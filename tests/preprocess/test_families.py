"""Idefics3 and SmolVLM pictures equal transformers' own: sizes, cuts, pixels and placeholders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, mean_error, smooth
from PIL import Image
from tiny_models import FAMILIES as TINY

from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.errors import BeholderError, ServiceError
from preprocess.families import Family, load_family
from preprocess.families.layout import PictureLayout
from preprocess.image import decode
from preprocess.model_folder import ModelFolder
from preprocess.options import Defaults
from preprocess.prepare import max_pixel_bytes_per_image

SIZES = [
    (64, 64),
    (32, 32),
    (33, 31),
    (300, 200),
    (200, 300),
    (640, 480),
    (97, 211),
    (1, 1),
    (1, 90),
    (90, 1),
    (500, 17),
]


def folder(path: Path, processor: dict[str, Any], *, model_type: str = "smolvlm", nested: bool = False) -> ModelFolder:
    """A model folder of configs only: tiles of 32 pixels, 4 tokens each."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model_type, "image_token_id": 3, "scale_factor": 2, "vision_config": {"patch_size": 8}}
    files: dict[str, Any] = {"config.json": config, "processor_config.json": {"image_seq_len": 4}}
    if nested:
        files["processor_config.json"]["image_processor"] = processor
    else:
        files["preprocessor_config.json"] = processor
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    return ModelFolder(path)


def processor(**changes: Any) -> dict[str, Any]:
    return {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "resample": 1} | changes


def reference(model_type: str, settings: dict[str, Any]) -> Any:
    if model_type == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Processor
    else:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
    return Processor(**settings, do_rescale=False, do_normalize=False, return_row_col_info=True)


def fill(family: Family, image: Image.Image, layout: PictureLayout) -> np.ndarray:
    out = np.zeros(layout.shape, np.uint8)
    family.fill(image, layout, out)
    return out


@pytest.mark.parametrize("model_type", ["smolvlm", "idefics3"])
@pytest.mark.parametrize("splitting", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": {"longest_edge": 96}},
        {"size": {"longest_edge": 31}},
        {"size": {"height": 64, "width": 96}},
        {"resample": 3},
        {"do_resize": False},
    ],
)
def test_pixels_and_cuts_equal_the_reference(
    tmp_path: Path, model_type: str, splitting: bool, changes: dict[str, Any]
) -> None:
    settings = processor(do_image_splitting=splitting, **changes)
    family = load_family(folder(tmp_path, settings, model_type=model_type))
    expected_of = reference(model_type, settings)
    for size in SIZES:
        image = smooth(*size)
        expected = expected_of(images=[[image]], return_tensors="np")
        layout = family.layout(*size, "auto")
        assert (layout.rows, layout.columns) == (expected["rows"][0][0], expected["cols"][0][0]), size
        assert np.array_equal(fill(family, image, layout).transpose(0, 3, 1, 2), expected["pixel_values"][0]), size
        assert expected["pixel_attention_mask"].all(), "the mask would have to travel with the pixels"


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 3000), height=st.integers(1, 3000), longest=st.sampled_from([364 * 4, 512, 2048, 4096]))
def test_sizes_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, longest: int
) -> None:
    """Float rounding decides: compare the arithmetic alone, for many sizes."""
    from transformers.models.smolvlm import image_processing_pil_smolvlm as module

    families = _families(tmp_path_factory)
    layout = families[longest].layout(width, height, "high")
    sized = module.get_resize_output_image_size(SimpleNamespace(shape=(3, height, width)), longest)
    assert layout.steps[0] == (sized[1], sized[0])
    processor = reference("smolvlm", {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 32}})
    processor.resize = lambda image, size, resample: (size.width, size.height)
    assert layout.steps[1] == processor.resize_for_vision_encoder(SimpleNamespace(shape=(3, *sized)), 32)
    assert layout.num_bytes <= families[longest].max_pixel_bytes


_cache: dict[int, Family] = {}


def _families(factory: pytest.TempPathFactory) -> dict[int, Family]:
    if not _cache:
        for longest in (364 * 4, 512, 2048, 4096):
            settings = processor(size={"longest_edge": longest})
            _cache[longest] = load_family(folder(factory.mktemp("family"), settings))
    return _cache


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (1, 2), (2, 2), (4, 3)])
def test_placeholders_equal_the_reference(tmp_path: Path, rows: int, columns: int) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    family = load_family(folder(tmp_path, processor()))
    layout = PictureLayout(((32, 32),), rows, columns, 32, 32, 4)
    expected = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    assert family.placeholder(layout) == expected


def test_detail_overrules_the_folder(tmp_path: Path) -> None:
    for splitting in (False, True):
        family = load_family(folder(tmp_path / str(splitting), processor(do_image_splitting=splitting)))
        assert family.layout(300, 200, "auto").num_tiles == (13 if splitting else 1)
        assert family.layout(300, 200, "high").num_tiles == 13
        assert family.layout(300, 200, "low").num_tiles == 1


def test_old_and_new_folders_read_alike(tmp_path: Path) -> None:
    settings = processor(do_image_splitting=True, image_mean=[0.1, 0.2, 0.3], image_std=0.5, rescale_factor=0.5)
    old = load_family(folder(tmp_path / "old", settings))
    new = load_family(folder(tmp_path / "new", settings, nested=True))
    assert old.layout(300, 200, "auto") == new.layout(300, 200, "auto")
    assert old.normalisation == new.normalisation
    assert old.normalisation.mean == (0.1, 0.2, 0.3)
    assert old.normalisation.std == (0.5, 0.5, 0.5)
    assert old.normalisation.scale == 0.5


def test_normalising_can_be_off(tmp_path: Path) -> None:
    family = load_family(folder(tmp_path, processor(do_rescale=False, do_normalize=False)))
    assert (family.normalisation.scale, family.normalisation.mean, family.normalisation.std) == (1, (0,) * 3, (1,) * 3)


def test_an_inconsistent_folder_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="image_seq_len 4, but a tile of 64 pixels gives 16 tokens"):
        load_family(folder(tmp_path, processor(max_image_size={"longest_edge": 64})))
    with pytest.raises(ServiceError, match=r"'llava'; known are idefics3, [^;]*smolvlm$"):
        load_family(folder(tmp_path, processor(), model_type="llava"))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Own", null]}}')
    with pytest.raises(ServiceError, match=r"'llava'.*code that comes with a model .auto_map. is never run"):
        load_family(ModelFolder(tmp_path))


def test_the_lease_bound_is_readable_without_torch(tmp_path: Path) -> None:
    folder(tmp_path, processor())
    assert max_pixel_bytes_per_image(PreprocessConfig(str(tmp_path))) == (16 + 1) * 32 * 32 * 3


@pytest.mark.parametrize("detail", ["low", "high"])
@pytest.mark.parametrize("size", [(3000, 2250), (2250, 3000), (4000, 3000)])
def test_draft_moves_pixels_by_less_than_one(tmp_path: Path, detail: Any, size: tuple[int, int]) -> None:
    settings = processor(size={"longest_edge": 512}, max_image_size={"longest_edge": 256})
    path = folder(tmp_path, settings).path
    (path / "processor_config.json").write_text("{}")
    family = load_family(ModelFolder(path))
    layout = family.layout(*size, detail)
    data = encode(smooth(*size), "JPEG", quality=85)
    exact = decode(data, MediaLimits()).image
    draft = decode(data, MediaLimits(), lambda _width, _height: layout.draft_size).image
    assert draft.width < exact.width
    one, other = fill(family, exact, layout), fill(family, draft, layout)
    for tile, reduced in zip(one, other, strict=True):
        assert mean_error(Image.fromarray(tile), Image.fromarray(reduced)) < 1


def test_exact_decode_of_a_jpeg_equals_the_reference(tmp_path: Path) -> None:
    import io

    settings = processor(do_image_splitting=True)
    family = load_family(folder(tmp_path, settings))
    data = encode(smooth(1200, 900), "JPEG")
    expected = reference("smolvlm", settings)(images=[[Image.open(io.BytesIO(data))]], return_tensors="np")
    picture = decode(data, MediaLimits())
    out = fill(family, picture.image, family.layout(picture.width, picture.height, "auto"))
    assert np.array_equal(out.transpose(0, 3, 1, 2), expected["pixel_values"][0])


JUNK: list[Any] = [None, "x", -1, 0, 1.5, [], {}, True, [1, 2], float("nan")]


def _places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where fields are in an object, however deep."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield (*path, name)
            yield from _places(part, (*path, name))


@pytest.mark.parametrize("name", TINY)
def test_whatever_a_field_holds_a_folder_is_read_or_refused_in_words(name: str, tmp_path: Path) -> None:
    folder = TINY[name](tmp_path)
    refusals = []
    for file in folder.glob("*config.json"):
        text = file.read_text()
        for path in _places(json.loads(text)):
            for junk in JUNK:
                config = section = json.loads(text)
                for part in path[:-1]:
                    section = section[part]
                section[path[-1]] = junk
                file.write_text(json.dumps(config))
                try:
                    family = load_family(ModelFolder(folder))
                    family.layout(90, 60, "auto")
                    Defaults.of(ModelFolder(folder), (), 100)
                except BeholderError as error:
                    refusals.append(error.message)
        file.write_text(text)
    assert len(refusals) > 100
    assert not [message for message in refusals if "\n" in message]
