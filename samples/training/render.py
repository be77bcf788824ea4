"""Draws many pictures at once on any torch device, from the numbers that describe them.

Knows pixels only. `Plan` is what a worker process sends: flat arrays, so that it pickles fast.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from samples.training.pack import SIDE
from samples.training.world import Picture

STRIP = (128, 256)  # height and width of a text mask


@dataclass
class Plan:
    """Numbers of `count` pictures; `layer_*` are ordered by depth, so that depth d is one slice."""

    count: int
    backgrounds: NDArray[np.float32]  # (count, 14)
    finish: NDArray[np.float32]  # (count, 4)
    layer_ends: list[int]  # layers of depth d are [layer_ends[d - 1], layer_ends[d])
    layer_picture: NDArray[np.int64]
    layer_sprite: NDArray[np.int64]
    layer_numbers: NDArray[np.float32]  # (layers, 10): x, y, width, height, angle, flip, tinted, r, g, b
    text_ends: list[int]
    text_picture: NDArray[np.int64]
    text_masks: NDArray[np.uint8]  # (texts, 128, 256)
    text_numbers: NDArray[np.float32]  # (texts, 8): x, y, width, height, angle, r, g, b


def plan(pictures: list[Picture]) -> Plan:
    """Flatten pictures into arrays."""
    layers, texts = [], []
    for place, picture in enumerate(pictures):
        for depth, item in enumerate(picture.items):
            root = math.sqrt(item.stretch)
            tint = item.tint or (0.0, 0.0, 0.0)
            numbers = (
                item.x, item.y, item.size * root, item.size / root, item.angle, float(item.flip),
                float(item.tint is not None), *tint,
            )  # fmt: skip
            layers.append((depth, place, item.sprite, numbers))
        for depth, strip in enumerate(picture.writing):
            texts.append(
                (depth, place, strip.mask, (strip.x, strip.y, strip.width, strip.height, strip.angle, *strip.colour))
            )
    layers.sort(key=lambda layer: layer[0])
    texts.sort(key=lambda text: text[0])
    return Plan(
        len(pictures),
        np.array([picture.background.numbers for picture in pictures], np.float32).reshape(-1, 14),
        np.array([picture.finish for picture in pictures], np.float32).reshape(-1, 4),
        np.cumsum(np.bincount([layer[0] for layer in layers])).tolist() if layers else [],
        np.array([layer[1] for layer in layers], np.int64),
        np.array([layer[2] for layer in layers], np.int64),
        np.array([layer[3] for layer in layers], np.float32).reshape(-1, 10),
        np.cumsum(np.bincount([text[0] for text in texts])).tolist() if texts else [],
        np.array([text[1] for text in texts], np.int64),
        np.stack([text[2] for text in texts]) if texts else np.zeros((0, *STRIP), np.uint8),
        np.array([text[3] for text in texts], np.float32).reshape(-1, 8),
    )


def backgrounds(numbers: Tensor, height: int, width: int) -> Tensor:
    """(count, 14) to (count, 3, height, width).

    A row is: kind, first colour (3), second colour (3), angle, frequency, horizon, and four phases. Kinds: 0 plain,
    1 gradient, 2 horizon, 3 stripes, 4 checks, 5 blotches.
    """
    device = numbers.device
    y = torch.linspace(0, 1, height, device=device)[None, :, None]
    x = torch.linspace(0, 1, width, device=device)[None, None, :]
    kind, angle, frequency, horizon, p1, p2, p3, p4 = (numbers[:, k, None, None] for k in (0, 7, 8, 9, 10, 11, 12, 13))
    along = x * angle.cos() + y * angle.sin()
    across = y * angle.cos() - x * angle.sin()
    wave = torch.sin(along * frequency * 6.28 + p1)
    checks = torch.sign(wave * torch.sin(across * frequency * 6.28 + p2))
    blotches = (
        torch.sin(x * frequency * 1.7 + p1 + torch.sin(y * 5 + p2) * 2)
        + torch.sin(y * frequency * 2.1 + p3 + torch.sin(x * 7 + p4) * 2)
    ) / 2
    mix = torch.zeros_like(along)
    mix = torch.where(kind == 1, along.clamp(-0.5, 1.5) * 0.5 + 0.25, mix)
    mix = torch.where(kind == 2, ((y - horizon) * 200).clamp(0, 1).expand_as(mix), mix)
    mix = torch.where(kind == 3, (wave * 4).clamp(-1, 1) * 0.2 + 0.2, mix)
    mix = torch.where(kind == 4, checks * 0.2 + 0.2, mix)
    mix = torch.where(kind == 5, blotches * 0.5 + 0.5, mix).clamp(0, 1)[:, None]
    return numbers[:, 1:4, None, None] * (1 - mix) + numbers[:, 4:7, None, None] * mix


def placement(x: Tensor, y: Tensor, width: Tensor, height: Tensor, angle: Tensor, flip: Tensor) -> Tensor:
    """Matrices (n, 2, 3) for `affine_grid` that put a drawing of unit square at a place."""
    cos, sin = angle.cos(), angle.sin()
    cx, cy = 2 * x - 1, 2 * y - 1
    sign = 1 - 2 * flip
    a, b = cos / width * sign, sin / width * sign
    c, d = -sin / height, cos / height
    return torch.stack((torch.stack((a, b, -a * cx - b * cy), -1), torch.stack((c, d, -c * cx - d * cy), -1)), 1)


class Renderer:
    """Holds the drawings on the device: premultiplied, in three sizes, so that small things do not alias."""

    def __init__(
        self, sprites: NDArray[np.uint8], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        full = torch.from_numpy(sprites)
        self.levels: list[Tensor] = []
        parts = []
        for part in full.split(512):
            part = part.to(self.device).permute(0, 3, 1, 2).float()
            parts.append(torch.cat((part[:, :3] * part[:, 3:] / 255, part[:, 3:]), 1).round().to(torch.uint8))
        self.levels.append(torch.cat(parts))
        for _ in range(2):
            self.levels.append(
                torch.cat(
                    [F.avg_pool2d(part.float(), 2).round().to(torch.uint8) for part in self.levels[-1].split(512)]
                )
            )

    def _over(self, canvas: Tensor, drawing: Tensor, theta: Tensor, chosen: Tensor) -> None:
        """Blend premultiplied drawings (n, 4, h, w) over the chosen pictures."""
        height, width = canvas.shape[-2:]
        grid = F.affine_grid(theta.to(self.dtype), [len(chosen), 4, height, width], align_corners=False)
        painted = F.grid_sample(drawing, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        canvas[chosen] = canvas[chosen] * (1 - painted[:, 3:]) + painted[:, :3]

    def draw(self, plan: Plan, height: int, width: int, grain: bool = True) -> Tensor:
        """(count, 3, height, width) in [0, 1]; `grain` adds the random noise that `finish` asks for."""
        send = lambda array: torch.from_numpy(array).to(self.device, non_blocking=True)  # noqa: E731
        canvas = backgrounds(send(plan.backgrounds), height, width).to(self.dtype)
        start = 0
        for end in plan.layer_ends:
            numbers = plan.layer_numbers[start:end]
            pixels = np.maximum(numbers[:, 2], numbers[:, 3]) * max(height, width)
            levels = np.clip(np.floor(np.log2(SIDE * 1.2 / np.maximum(pixels, 1))), 0, 2).astype(int)
            for level in range(3):
                own = np.nonzero(levels == level)[0]
                if len(own) == 0:
                    continue
                n = send(numbers[own])
                drawing = self.levels[level][send(plan.layer_sprite[start:end][own])].to(self.dtype) / 255
                drawing = self._tinted(drawing, n[:, 6], n[:, 7:10])
                theta = placement(n[:, 0], n[:, 1], n[:, 2], n[:, 3], n[:, 4], n[:, 5])
                self._over(canvas, drawing, theta, send(plan.layer_picture[start:end][own]))
            start = end
        start = 0
        for end in plan.text_ends:
            n = send(plan.text_numbers[start:end])
            mask = send(plan.text_masks[start:end]).to(self.dtype)[:, None] / 255
            drawing = torch.cat((mask * n[:, 5:8, None, None].to(self.dtype), mask), 1)
            theta = placement(n[:, 0], n[:, 1], n[:, 2], n[:, 3], n[:, 4], torch.zeros_like(n[:, 0]))
            self._over(canvas, drawing, theta, send(plan.text_picture[start:end]))
            start = end
        return self._finished(canvas, plan.finish, grain)

    def _tinted(self, drawing: Tensor, tinted: Tensor, paint: Tensor) -> Tensor:
        """Repaint premultiplied drawings in one colour, keeping light and shade a little."""
        alpha = drawing[:, 3:]
        light = drawing[:, :3].mean(1, keepdim=True)
        shade = (0.55 * alpha + 0.45 * light).to(self.dtype)
        repainted = torch.cat((shade * paint[:, :, None, None].to(self.dtype), alpha), 1)
        return torch.where(tinted[:, None, None, None] > 0, repainted, drawing)

    def _finished(self, canvas: Tensor, finish: NDArray[np.float32], grain: bool) -> Tensor:
        blurred = np.nonzero(finish[:, 0] > 0)[0]
        if len(blurred):
            chosen = torch.from_numpy(blurred).to(self.device)
            soft = canvas[chosen]
            sigma = torch.from_numpy(finish[blurred, 0]).to(self.device)[:, None]
            taps = torch.arange(-3, 4, device=self.device)[None].float()
            kernel = torch.exp(-(taps**2) / (2 * sigma**2)).to(self.dtype)
            kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)  # (n * 3, 7)
            n, _, height, width = soft.shape
            flat = F.pad(soft.reshape(1, n * 3, height, width), (3, 3, 3, 3), mode="replicate")
            flat = F.conv2d(flat, kernel[:, None, None, :], groups=n * 3)
            canvas[chosen] = F.conv2d(flat, kernel[:, None, :, None], groups=n * 3).view(n, 3, height, width)
        numbers = torch.from_numpy(finish).to(self.device).to(self.dtype)[:, :, None, None, None]
        canvas = (canvas - 0.5) * numbers[:, 2] + 0.5 + numbers[:, 1]
        if grain:
            canvas = canvas + torch.randn_like(canvas) * numbers[:, 3]
        return canvas.clamp(0, 1)
