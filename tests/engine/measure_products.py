"""Measures what the products of one request take by torch's own library, alone and for as long as a device's limit of
power shows: the least that a request of pictures can take on it.

    python -m tests.engine.measure_products qwen2.5-vl-3b qwen3-vl-8b qwen3-vl-2b

A request is a picture of 1024 × 768, its prompt, and two decode steps of 64 rows, which is what 128 tokens take of a
step with 64 clients. Attention and all else is left out. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

ROWS: Final = 64
ALONE_S: Final = 1.5
MIXED_S: Final = 3.0


@dataclass(frozen=True)
class Sizes:
    """Products as (inputs, outputs): of a layer of the encoder, of what stands around its layers with the tokens of
    each, of a layer of the language model, and its head.
    """

    patches: int
    encoder: Sequence[tuple[int, int]]
    encoder_layers: int
    around: Sequence[tuple[int, int, int]]
    decoder: Sequence[tuple[int, int]]
    decoder_layers: int
    prompt: int
    head: tuple[int, int]

    def of_encoder(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, inputs, outputs) of every product."""
        for _ in range(self.encoder_layers):
            yield from ((self.patches, *size) for size in self.encoder)
        yield from self.around

    def of_decoder(self, tokens: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """The same of a step."""
        for _ in range(self.decoder_layers):
            yield from ((tokens, *size) for size in self.decoder)
        yield rows, *self.head


MODELS: Final = {
    "qwen2.5-vl-3b": Sizes(
        3996,
        ((1280, 3840), (1280, 1280), (1280, 6912), (3456, 1280)),
        32,
        ((3996, 1176, 1280), (999, 5120, 5120), (999, 5120, 2048)),
        ((2048, 2560), (2048, 2048), (2048, 22016), (11008, 2048)),
        36,
        1040,
        (2048, 151936),
    ),
    "qwen3-vl-2b": Sizes(
        3072,
        ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)),
        24,
        ((3072, 1536, 1024), *((768, 4096, 4096), (768, 4096, 2048)) * 4),
        ((2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048)),
        28,
        820,
        (2048, 151936),
    ),
    "qwen3-vl-8b": Sizes(
        3072,
        ((1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152)),
        27,
        ((3072, 1536, 1152), *((768, 4608, 4608), (768, 4608, 4096)) * 4),
        ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)),
        36,
        820,
        (4096, 151936),
    ),
}


def graph_of(products: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    """Sends all of them, each with weights of its own."""
    weights = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _, inputs, outputs in products
    ]
    shapes = {(tokens, inputs) for tokens, inputs, _ in products}
    given = {shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes}

    def run() -> None:
        for (tokens, inputs, _), weight in zip(products, weights, strict=True):
            given[tokens, inputs] @ weight.T

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def mean_ms(work: Sequence[Callable[[], None]], seconds: float) -> float:
    """Of all of it, one after the other for so long; the second half counts."""
    events: list[torch.cuda.Event] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        events[-1].record()
        for send in work:
            send()
        if len(events) % 20 == 0:
            events[-1].synchronize()
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    half = len(events) // 2
    return float(events[half].elapsed_time(end)) / (len(events) - half)


def power() -> str:
    """The device's clock and what it draws, by its own tool."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Print a line for each part, and one for a request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    for name in parser.parse_args().models:
        sizes = MODELS[name]
        products = {
            "encoder": list(sizes.of_encoder()),
            "prompt": list(sizes.of_decoder(sizes.prompt, 1)),
            "decode": list(sizes.of_decoder(ROWS, ROWS)),
        }
        graphs = {part: graph_of(of_part) for part, of_part in products.items()}
        for part, send in graphs.items():
            first_ms, later_ms = mean_ms([send], 0.05), mean_ms([send], ALONE_S)
            rate = sum(2 * tokens * inputs * outputs for tokens, inputs, outputs in products[part]) / later_ms / 1e9
            print(f"{name} {part}: {first_ms:.2f} ms at first, {later_ms:.2f} later, {rate:.0f} TFLOP/s", flush=True)
        drawn: list[str] = []
        timer = threading.Timer(2 * MIXED_S / 3, lambda into=drawn: into.append(power()))
        timer.start()
        request = [graphs["encoder"], graphs["prompt"], graphs["decode"], graphs["decode"]]
        print(f"{name} a request: {mean_ms(request, MIXED_S):.2f} ms", flush=True)
        timer.join()
        print(*drawn)
        del graphs, request
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
