"""Measures how often drafts are accepted: by shared noise, as the engine does it, and by classical rejection sampling.

    python -m tests.engine.speculation.measure_coupling [--model FOLDER] [--seeds 16] [--top-p 0.95]

A model describes the sample pictures. At each token of its answers there are its distribution p, and q of somebody who
drafts. Rejection sampling (Leviathan, Kalman and Matias 2023) accepts what q draws with probability 1 - TV(p, q), the
most that any scheme can which changes no distribution. With shared noise a draft stands when arg-max(log q + noise) and
arg-max(log p + noise) are the same token; over all noise that is the sum over tokens i of 1 / sum_j max(p_j / p_i,
q_j / q_i), at least (1 - TV) / (1 + TV). A point guess is right with probability p(guess) either way.

`measured` draws both tokens with the engine's own sampler, `independent` is what drafts with noise of their own, kept
when they are equal, would give.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Row, RowSampling, VisionRows
from engine.core import Engine
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.sampling import sample
from preprocess.prepare import Preparer
from preprocess.wire import (
    EngineRequest,
    ImagePart,
    Job,
    Lease,
    Message,
    Pixels,
    Prepared,
    SamplingParams,
    TextPart,
    TokenEvents,
)
from server.sampling_rules import sampling_options
from server.settings import Settings

QUESTIONS = ("Write a museum placard for this picture.", "Describe the picture in detail.")
PICTURES = Path(__file__).parents[3] / "samples" / "pictures"
TEMPERATURES = (0.5, 0.8, 1.0)
LEFT_OUT = 1
"""Layers that the early exit does without."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder (default: the bundled model)")
    parser.add_argument("--seeds", type=int, default=16, help="draws of each token (default: 16)")
    parser.add_argument("--top-p", type=float, default=0.95, help="of both distributions (default: 0.95)")
    options = parser.parse_args()
    settings = Settings.load({"model": options.model, "dtype": "float32"}).resolve_model()
    runner = load_runner(settings.engine_config())
    assert isinstance(runner, TorchRunner)
    requests = questions(Preparer(settings.preprocess_config(), None))
    answers = ask(Engine(settings.engine_config(), runner), requests)
    target, early = (
        torch.cat([logits_of(runner, request, answers[request.request_id], skip) for request in requests])
        for skip in (0, LEFT_OUT)
    )
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    drafts: dict[str, Callable[[float], tuple[torch.Tensor, float]]] = {
        "early exit, one layer less": lambda temperature: (early, temperature),
        "the same with noise of 2 in its logits": lambda temperature: (target + 2 * noise, temperature),
        "the same, twice as warm": lambda temperature: (target, 2 * temperature),
    }
    print(f"{len(target)} tokens of {len(requests)} answers, top-p {options.top_p}\n")
    print("| temperature | drafts | rejection sampling | shared noise | measured | independent |")
    print("|---|---|---|---|---|---|")
    for temperature in TEMPERATURES:
        p = probabilities(target, temperature, options.top_p)
        guesses = early.argmax(1)
        right = p.gather(1, guesses[:, None]).mean()
        drawn = draws(target, temperature, options)
        measured = (drawn == guesses).float().mean()
        print(f"| {temperature} | point guesses: early exit's best | {right:.3f} | {right:.3f} | {measured:.3f} | |")
        for name, of in drafts.items():
            logits, own = of(temperature)
            q = probabilities(logits, own, options.top_p)
            measured = (drawn == draws(logits, own, options)).float().mean()
            print(
                f"| {temperature} | {name} | {torch.minimum(p, q).sum(1).mean():.3f} | {shared(p, q):.3f} | "
                f"{measured:.3f} | {(p * q).sum(1).mean():.3f} |"
            )


def questions(preparer: Preparer) -> list[EngineRequest]:
    """Both questions about every picture, drawn at temperature 0.8."""
    requests = []
    for picture in sorted(PICTURES.glob("*.jpg")):
        for number, question in enumerate(QUESTIONS):
            message = Message("user", [ImagePart(data=picture.read_bytes()), TextPart(question)])
            options = sampling_options({"temperature": 0.8, "max_tokens": 64, "seed": number})
            prepared = preparer.prepare(Job(f"{picture.stem} {number}", [message], options, Lease(), 0.0))
            assert isinstance(prepared, Prepared), prepared
            requests.append(prepared.request)
    return requests


def ask(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Output ids by request."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request, pixels_of)
    while engine.has_work:
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                assert event.error is None, event.error
                answers[event.request_id] += event.token_ids
    return answers


@torch.inference_mode()
def logits_of(runner: TorchRunner, request: EngineRequest, answer: list[int], skip: int) -> torch.Tensor:
    """float32 (tokens of the answer, vocab): what the model expected there, without its last `skip` layers."""
    prompt = np.frombuffer(request.prompt_ids, "<i8").tolist()
    vision, length = [], len(prompt) + len(answer)
    for item in request.media:
        embeddings = runner.encode([pixels_of(item.pixels)])[0]
        first = 0
        for start, count in item.spans:
            vision.append(VisionRows(start, first, count, embeddings))
            first += count
    runner.slot_table[0, :length] = torch.arange(1, length + 1)
    asked = [RowSampling(request.sampling, index) for index in range(len(answer))]
    ids = [*prompt, *answer[:-1]]
    row = Row(0, 0, ids, asked[0], vision, rotary(request, len(ids)), drafted=asked[1:])
    layers = runner.model.layers
    runner.model.layers = layers[: len(layers) - skip]
    try:
        return runner.logits([row])
    finally:
        runner.model.layers = layers


def rotary(request: EngineRequest, length: int) -> NDArray[np.int32] | None:
    """(3, length) rotary positions where the model has three axes: the request's, and those that follow."""
    if not request.positions:
        return None
    given = np.frombuffer(request.positions, "<i4").reshape(3, -1)
    rest = np.arange(length - given.shape[1], dtype=np.int32) + given.max() + 1
    return np.concatenate((given, np.broadcast_to(rest, (3, len(rest)))), axis=1)


def probabilities(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """(tokens, vocab): what `engine.sampling` draws from."""
    likely = (logits / temperature).softmax(1)
    falling, ids = likely.sort(1, descending=True)
    falling[falling.cumsum(1) - falling >= top_p] = 0.0
    kept = torch.zeros_like(likely).scatter_(1, ids, falling)
    return kept / kept.sum(1, keepdim=True)


def draws(logits: torch.Tensor, temperature: float, options: argparse.Namespace) -> torch.Tensor:
    """(seeds, tokens): what the engine draws, each token with its own noise."""
    drawn = []
    for seed in range(options.seeds):
        params = SamplingParams(max_tokens=1, temperature=temperature, top_p=options.top_p, seed=seed)
        sampled = sample(logits, [RowSampling(params, index) for index in range(len(logits))])
        drawn.append([token.token_id for token in sampled])
    return torch.tensor(drawn)


def shared(p: torch.Tensor, q: torch.Tensor) -> float:
    """How probably one noise leads both to the same token, on average over the rows."""
    total = 0.0
    for own, other in zip(p.double(), q.double(), strict=True):
        both = ((own > 0) & (other > 0)).nonzero().flatten()
        either = ((own > 0) | (other > 0)).nonzero().flatten()
        ratios = torch.maximum(own[either] / own[both, None], other[either] / other[both, None])  # (both, either)
        total += float((1 / ratios.sum(1)).sum())
    return total / len(p)


def pixels_of(pixels: Pixels) -> torch.Tensor:
    """uint8, of inline bytes."""
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)


if __name__ == "__main__":
    main()
