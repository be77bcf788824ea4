"""Records what the video processors of transformers make of clips: frames, grids, prompts, positions, pixels.

They need torchvision, which the tests do without, so this runs wherever it is installed (with transformers 5.17 and
num2words), and its output lies beside it:

    PYTHONPATH=tests python tests/goldens/record_video_processors.py tests/goldens

Settings are those of a model folder. Pixels are stored as the uint8 values before normalising, in the layout of the
processor: patches for Qwen, frames for SmolVLM. Use torchvision 0.27 or later: before, LANCZOS is BICUBIC.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from coded_clips import CLIPS, CodedClip
from tiny_tokenizer import tiny_tokenizer

QWEN_TOKENS: Final = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
SMOL_TOKENS: Final = [
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<image>", "<video>", "<fake_token_around_image>",
    "<global-img>",
]  # fmt: skip

SMOLVLM: Final[dict[str, Any]] = {
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 64}},
    "size": {"longest_edge": 128},
    "max_image_size": {"longest_edge": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2: Final[dict[str, Any]] = {
    "fps": 2,
    "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 12 * 28 * 28},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN3: Final[dict[str, Any]] = {
    **QWEN2,
    "patch_size": 16,
    "size": {"shortest_edge": 16 * 32 * 32, "longest_edge": 60 * 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def sampling(**values: Any) -> dict[str, Any]:
    """SmolVLM's settings with others of sampling."""
    return {**SMOLVLM, "video_sampling": {**SMOLVLM["video_sampling"], **values}}


SETTINGS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "smolvlm": {
        "published": SMOLVLM,
        "three frames": sampling(max_frames=3),
        "two a second, five frames": sampling(fps=2, max_frames=5),
        "bicubic": {**sampling(fps=2, max_frames=5), "resample": 3},
    },
    "qwen2_vl": {
        "two a second": QWEN2,
        "one a second": {**QWEN2, "fps": 1},
        "six frames": {**QWEN2, "fps": 4, "max_frames": 6},
        "capped": {**QWEN2, "cap_pixels_per_frame": True, "max_video_tokens": 40},
    },
    "qwen2_5_vl": {"two a second": QWEN2, "one a second": {**QWEN2, "fps": 1}},
    "qwen3_vl": {
        "two a second": QWEN3,
        "one a second": {**QWEN3, "fps": 1},
        "six frames": {**QWEN3, "fps": 4, "max_frames": 6},
        "capped": {**QWEN3, "cap_pixels_per_frame": True, "max_video_tokens": 3},
    },
}
"""By family and name: fields of `video_preprocessor_config.json`."""

PIXELS: Final = {
    ("smolvlm", "two a second, five frames", "four seconds"),
    ("smolvlm", "three frames", "odd and upright"),
    ("smolvlm", "bicubic", "four seconds"),
    ("smolvlm", "bicubic", "odd and upright"),
    ("qwen2_vl", "two a second", "odd and upright"),
    ("qwen2_vl", "six frames", "four seconds"),
    ("qwen3_vl", "two a second", "odd and upright"),
    ("qwen3_vl", "six frames", "four seconds"),
}
"""What pixels are kept of."""

SIZES: Final = [(4, 480, 640), (4, 1080, 1920), (8, 30, 500), (20, 240, 320), (64, 120, 90), (5, 720, 1280), (2, 9, 9)]
"""(frames, height, width) of clips that only the grids are recorded of, under the processors' own default settings."""


class Recorder:
    """One family's processor, with a tokenizer that has its special tokens and little else."""

    def __init__(self, family: str) -> None:
        import transformers

        self.family = family
        tokens = SMOL_TOKENS if family == "smolvlm" else QWEN_TOKENS
        named = {}
        if family == "smolvlm":
            named = {"extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"}}
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tiny_tokenizer(tokens), pad_token="<|endoftext|>", **named
        )
        self._video, self._processor, self._image = {
            "smolvlm": ("SmolVLMVideoProcessor", "SmolVLMProcessor", "SmolVLMImageProcessor"),
            "qwen2_vl": ("Qwen2VLVideoProcessor", "Qwen2VLProcessor", "Qwen2VLImageProcessor"),
            "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
            "qwen3_vl": ("Qwen3VLVideoProcessor", "Qwen3VLProcessor", "Qwen2VLImageProcessor"),
        }[family]

    def processor(self, settings: dict[str, Any]) -> Any:
        """The processor of a folder with these settings of its video processor."""
        import transformers

        own = json.loads(json.dumps(settings))  # they change what they are given
        video = getattr(transformers, self._video)(**own, do_sample_frames=True)
        keys = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        if self.family == "smolvlm":
            image = getattr(transformers, self._image)(do_image_splitting=False, max_image_size={"longest_edge": 32})
            return transformers.SmolVLMProcessor(image, self._tokenizer, video, image_seq_len=4)
        shared = {key: own[key] for key in keys if key in own}
        pixels = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 64}
        image = getattr(transformers, self._image)(**shared, **pixels)
        return getattr(transformers, self._processor)(image, self._tokenizer, video)

    def prompt(self, parts: str) -> str:
        """A chat of one turn; in `parts` V is a clip, I a picture, and anything else is text."""
        if self.family == "smolvlm":
            text = parts.replace("V", "<video>").replace("I", "<image>")
            return f"<|im_start|>User: {text}<end_of_utterance>\nAssistant:"
        text = parts.replace("V", "<|vision_start|><|video_pad|><|vision_end|>")
        text = text.replace("I", "<|vision_start|><|image_pad|><|vision_end|>")
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def one_clip(self, settings: dict[str, Any], clip: CodedClip) -> tuple[dict[str, Any], Any]:
        """What is made of a prompt with one clip; and its pixels, uint8."""
        made = self.call(settings, [clip], "V what happens?")
        found: dict[str, Any] = {
            "frames": self.sampled(settings, clip),
            "prompt": counted(self._tokenizer.decode(made["input_ids"][0])),
        }
        if self.family == "smolvlm":
            values = made["pixel_values"][0]
        else:
            values = made["pixel_values_videos"]
            found["grid"] = made["video_grid_thw"][0].tolist()
        if "second_per_grid_ts" in made:
            found["second_per_grid_ts"] = float(made["second_per_grid_ts"][0])
        return found, self.as_uint8(values.numpy(), settings)

    def call(self, settings: dict[str, Any], clips: list[CodedClip], parts: str, pictures: int = 0) -> Any:
        """The processor's output for a prompt."""
        from PIL import Image

        images = [Image.fromarray(CLIPS["four seconds"].frame(number)) for number in range(pictures)]
        videos = [clip.frames() for clip in clips]
        return self.processor(settings)(
            text=[self.prompt(parts)],
            videos=([videos] if self.family == "smolvlm" else videos) or None,
            video_metadata=[metadata(clip) for clip in clips] or None,
            images=images or None,
            return_tensors="pt",
        )

    def sampled(self, settings: dict[str, Any], clip: CodedClip) -> list[int]:
        """Numbers of the frames that are looked at."""
        video = self.processor(settings).video_processor
        made = video([clip.frames()], video_metadata=[metadata(clip)], return_metadata=True)
        return [int(number) for number in made["video_metadata"][0].frames_indices]

    def as_uint8(self, values: Any, settings: dict[str, Any]) -> Any:
        """Undo the normalising; what comes out must be whole numbers."""
        shape = (1, 3, 1, 1) if self.family == "smolvlm" else (1, 3, 1)
        mean, std = (np.float64(settings[key]).reshape(shape) for key in ("image_mean", "image_std"))
        laid_out = values if self.family == "smolvlm" else values.reshape(len(values), 3, -1)
        pixels = (laid_out * std + mean) * 255
        whole = pixels.round()
        assert np.abs(pixels - whole).max() < 0.01, "no whole numbers"
        return whole.astype(np.uint8).reshape(values.shape)

    def positions(self, parts: str, clips: list[str], pictures: int) -> dict[str, Any]:
        """M-RoPE positions of a prompt, with all that they are made from."""
        import transformers

        settings = next(iter(SETTINGS[self.family].values()))
        made = self.call(settings, [CLIPS[name] for name in clips], parts, pictures)
        prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[self.family]
        model = getattr(getattr(transformers.models, self.family), f"modeling_{self.family}")
        model = getattr(model, f"{prefix}Model")
        me = SimpleNamespace(
            config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)),
        )
        me.get_vision_position_ids = model.get_vision_position_ids.__get__(me)
        seconds = made.get("second_per_grid_ts")
        positions, delta = model.get_rope_index(
            me,
            made["input_ids"],
            made["mm_token_type_ids"],
            image_grid_thw=made.get("image_grid_thw"),
            video_grid_thw=made.get("video_grid_thw"),
            **({} if seconds is None else {"second_per_grid_ts": seconds}),
        )
        return {
            "parts": parts,
            "clips": clips,
            "prompt": counted(self._tokenizer.decode(made["input_ids"][0])),
            "types": runs(made["mm_token_type_ids"][0].tolist()),
            "image_grids": made["image_grid_thw"].tolist() if pictures else [],
            "video_grids": made["video_grid_thw"].tolist() if clips else [],
            "second_per_grid_ts": [] if seconds is None else [float(second) for second in seconds],
            "tokens_per_second": 2,
            "positions": [runs(axis, step=1) for axis in positions[:, 0].tolist()],
            "delta": int(delta[0]),
        }

    def default_grids(self) -> list[list[int]]:
        """Grids of `SIZES` under the class's own settings."""
        import torch
        import transformers

        video = getattr(transformers, self._video)(do_sample_frames=False)
        grids = []
        for num_frames, height, width in SIZES:
            frames = torch.zeros((num_frames, 3, height, width), dtype=torch.uint8)
            grids.append(video([frames], return_tensors="pt")["video_grid_thw"][0].tolist())
        return grids


def metadata(clip: CodedClip) -> dict[str, Any]:
    """Fields of `VideoMetadata`."""
    return {
        "total_num_frames": clip.num_frames,
        "fps": float(clip.fps),
        "duration": float(clip.duration_s),
        "width": clip.width,
        "height": clip.height,
    }


def counted(prompt: str) -> str:
    """A run of one placeholder as the placeholder and its length: ``<|video_pad|>*12``."""
    return re.sub(
        r"(<\|video_pad\|>|<\|image_pad\|>|<image>)+", lambda run: f"{run[1]}*{len(run[0]) // len(run[1])}", prompt
    )


def runs(values: list[int], step: int = 0) -> list[list[int]]:
    """(first, length) of stretches in which each value is the one before it plus `step`."""
    found: list[list[int]] = []
    for value in values:
        if found and value == found[-1][0] + step * found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


PROMPTS: Final[list[tuple[str, list[str], int]]] = [
    ("V what happens?", ["four seconds"], 0),
    ("Look: I and V what differs? V I", ["odd and upright", "slow"], 2),
    ("I only a picture", [], 1),
]
"""Prompts whose positions are recorded: parts, clips, number of pictures."""


def main(folder: Path) -> None:
    """Record everything into `folder`."""
    import torchvision
    import transformers

    record: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torchvision": torchvision.__version__,
        "sizes": SIZES,
        "families": {},
    }
    pixels = {}
    for family, by_name in SETTINGS.items():
        recorder = Recorder(family)
        clips = []
        for index, (name, settings) in enumerate(by_name.items()):
            for clip_name, clip in CLIPS.items():
                if index and clip.num_frames > 100:
                    continue  # once is enough of what takes so much room
                found, values = recorder.one_clip(settings, clip)
                if (family, name, clip_name) in PIXELS:
                    found["pixels"] = f"{family}/{name}/{clip_name}"
                    pixels[found["pixels"]] = values
                clips.append({"settings": name, "clip": clip_name, **found})
        record["families"][family] = {"settings": by_name, "clips": clips}
        if family != "smolvlm":
            record["families"][family]["positions"] = [recorder.positions(*prompt) for prompt in PROMPTS]
            record["families"][family]["default_grids"] = recorder.default_grids()
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    (folder / "video_processors.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(folder / "video_processors.npz", **pixels)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
