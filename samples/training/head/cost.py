"""What a draft costs beside a step of the target, on this machine: whether a head of this size can pay. Run
    python -m samples.training.head.cost HEAD
for an exported folder. Both run as they are served: 8-bit weights in torch, one thread, one sequence. A chain of k pays
where its tokens a step (`evaluate.py`) are more than (target, k + 1 tokens, + k drafts) over (target, 1 token).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Row
from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.linear import Embedding, Linear
from preprocess.blocks.norm import RMSNorm
from samples.training.head.export import MODEL, load
from samples.training.model import SHAPE

PLACES = 160  # tokens that stand before: a picture, a question, half an answer


class Served:
    """A head for one sequence, from its folder, in the engine's own blocks, beside its target's tables."""

    def __init__(self, folder: Path, model: Path) -> None:
        shape = load(folder)[0].shape
        target, table = (
            Checkpoint(model, dtype=torch.bfloat16, device=torch.device("cpu")),
            "model.text_model.embed_tokens",
        )
        self.embed = Embedding.load(target, table, SHAPE.vocabulary, shape.width)
        self.says = Linear.load(target, table, shape.width, SHAPE.vocabulary, bias=False, kind="Embedding")
        checkpoint = Checkpoint(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
        width, dim, mid = shape.width, shape.head_dim, "midlayer"
        self.shape = shape
        rows = [shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
        qkv = [f"{mid}.self_attn.{name}_proj" for name in "qkv"]
        self.fc = Linear.load(checkpoint, "fc", shape.fused * width, width, bias=False)
        self.qkv = Linear.load(checkpoint, qkv, 2 * width, rows, bias=False)
        self.out = Linear.load(checkpoint, f"{mid}.self_attn.o_proj", rows[0], width, bias=False)
        gate_up = [f"{mid}.mlp.gate_proj", f"{mid}.mlp.up_proj"]
        self.gate_up = Linear.load(checkpoint, gate_up, width, [shape.hidden, shape.hidden], bias=False)
        self.down = Linear.load(checkpoint, f"{mid}.mlp.down_proj", shape.hidden, width, bias=False)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.of_token, self.of_state, self.of_mlp = (
            RMSNorm.load(checkpoint, f"{mid}.{name}", width, 1e-5) for name in names
        )
        self.norm = RMSNorm.load(checkpoint, "norm", width, 1e-5)
        checkpoint.finish()
        self.memory = torch.zeros(2, shape.kv_heads, PLACES + 16, dim, dtype=torch.bfloat16)
        angle = torch.arange(PLACES + 16)[:, None] * shape.rope_theta ** (-torch.arange(dim // 2) / (dim // 2))
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def draft(self, token: Tensor, hidden: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """One token: its id (1,) and the state before it (1, width) → the id foreseen, and the state after it."""
        shape = self.shape
        both = torch.cat((self.of_token(self.embed(token)), self.of_state(hidden)), 1)
        qkv = self.qkv(both).view(-1, shape.head_dim)  # (heads + 2 kv_heads, head_dim)
        first, second = qkv[: -shape.kv_heads].chunk(2, -1)
        cos, sin = self.cos[place], self.sin[place]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        self.memory[0, :, place], self.memory[1, :, place] = turned[shape.heads :], qkv[-shape.kv_heads :]
        q = turned[: shape.heads].view(1, shape.kv_heads, -1, shape.head_dim)
        keys, values = self.memory[:, None, :, : place + 1]
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, keys, values).view(1, -1))
        gate, up = self.gate_up(self.of_mlp(hidden)).chunk(2, -1)
        hidden = hidden + self.down(F.silu(gate) * up)
        return self.says(self.norm(hidden)).argmax(-1), hidden


def median_ms(work: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Median of the processor time of a call, and the distance between its quartiles, in ms."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 10:
        began = time.process_time()
        work()
        times.append(1000 * (time.process_time() - began))
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runner = load_runner(EngineConfig(str(arguments.model), threads=1, kv_tokens=512, max_context=512, max_running=1))
    assert isinstance(runner, TorchRunner)
    runner.slot_table[0] = torch.arange(1, 513)
    wanted: Any = object()  # asks the runner for logits; no token is drawn here
    runner.logits([Row(0, 0, [7] * PLACES, wanted)])
    head = Served(arguments.head, arguments.model)
    hidden = torch.randn(1, head.shape.width, dtype=torch.bfloat16)
    known = torch.randn(1, head.fc.inputs, dtype=torch.bfloat16)
    print(f"the target's step: {runner.kernel}; drafts: torch")
    works: dict[str, Callable[[], Any]] = {
        "target, 1 token": lambda: runner.logits([Row(0, PLACES, [7], wanted)]),
        "target, 3 tokens": lambda: runner.logits([Row(0, PLACES, [7] * 3, wanted, drafted=[wanted] * 2)]),
        "target, 4 tokens": lambda: runner.logits([Row(0, PLACES, [7] * 4, wanted, drafted=[wanted] * 3)]),
        "target, 6 tokens": lambda: runner.logits([Row(0, PLACES, [7] * 6, wanted, drafted=[wanted] * 5)]),
        "head, 1 draft": lambda: head.draft(torch.tensor([7]), hidden, PLACES),
        "head, fusing 1 state": lambda: head.fc(known),
        "table of 1 draft": lambda: head.says(hidden),
    }
    one = 0.0
    for name, work in works.items():
        middle, spread = median_ms(work, arguments.seconds)
        one = one or middle
        print(f"{name:22} {middle:7.3f} ms (quartiles {spread:.3f} apart)  {middle / one:5.2f} of the step", flush=True)


if __name__ == "__main__":
    main()
