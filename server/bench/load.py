"""`beholder bench load`: clients that ask about pictures, one question after the other, and what they see of a server.

    beholder bench load [--model FOLDER] [--clients 1,8,64] [--reuse unique] …
    beholder bench load --base-url http://127.0.0.1:8000 [--model NAME] [--api-key KEY] …

Every request is a streamed chat that is answered with exactly `--max-tokens` tokens. Any OpenAI-compatible server can
be measured; the same `--seed` sends the same to all of them. Without `--base-url` a server is started, with the options
of `beholder serve` in `--serve='--max-running 8'`.

    unique   every request has new pictures: no cache can help
    turns    each picture is asked about `--turns` times, in a conversation that grows
    camera   frames of one scene that moves, always the same question

TTFT is the time from sending a request to the first event that brings something of the answer, ITL the mean gap of a
request's later tokens; both in milliseconds. Requests that failed count in no other figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from server.bench.arguments import count, count_from_0, counts
from server.bench.chat import Answer, Chat
from server.bench.figures import percentile, print_rows
from server.bench.pictures import data_url, picture, size
from server.bench.serving import add_serve_option, refuse_serve_option, serving

REUSES: Final = ("unique", "turns", "camera")
PROMPT: Final = "Describe this picture as a museum placard would, in a few sentences."
QUESTIONS: Final = (PROMPT, "Which colours are in it?", "What is at its left edge?", "What is unusual about it?")
SAID: Final = "That is hard to say."
"""What conversations hold as earlier answers: the same for every server."""
MOVED: Final = 2
"""Pixels from one frame of the camera to the next."""
WARM_UP: Final = 4

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Scenario:
    """What is sent."""

    reuse: str = "unique"
    turns: int = 4
    image_size: tuple[int, int] = (1024, 768)
    images: int = 1
    prompt: str = PROMPT
    max_tokens: int = 128

    def chains(self, count: int, seed: int) -> list[list[Messages]]:
        """Conversations that know nothing of each other: of each, what is sent in turn.

        Pictures are drawn by all cores: one takes 30 ms, and a level of 64 clients has hundreds.
        """
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda number: self._chain(number, seed), range(count)))

    def _chain(self, number: int, seed: int) -> list[Messages]:
        def drawn(index: int) -> bytes:
            if self.reuse == "camera":
                return picture(seed + index, *self.image_size, shift=MOVED * number)
            return picture(seed + number * self.images + index, *self.image_size)

        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(drawn(index))}} for index in range(self.images)
        ]
        messages: Messages = [{"role": "user", "content": [*content, {"type": "text", "text": self.prompt}]}]
        chain = [messages]
        for turn in range(1, self.turns if self.reuse == "turns" else 1):
            question = {"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]}
            chain.append([*chain[-1], {"role": "assistant", "content": SAID}, question])
        return chain


@dataclass
class Level:
    """What so many clients saw; milliseconds, one value a request."""

    clients: int
    elapsed_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Its figures."""
        return {
            "clients": self.clients,
            "requests": len(self.ttft_ms) + len(self.errors),
            "failed": len(self.errors),
            "requests/s": len(self.ttft_ms) / self.elapsed_s,
            "tokens/s": self.num_tokens / self.elapsed_s,
            **_percentiles("TTFT", self.ttft_ms),
            **_percentiles("ITL", self.itl_ms),
        }


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code of the command: 1 where requests failed."""
    given = _given(arguments)
    scenario = Scenario(
        given.reuse, given.turns, given.image_size, given.images, given.prompt or PROMPT, given.max_tokens
    )
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 30)
    rows = []
    with _server(given) as url:
        measured = measure(url, scenario, given.clients, given.rounds, seed, model=_name(given), api_key=given.api_key)
        for level in asyncio.run(measured):
            rows.append(level.row())
            for error in level.errors[:1]:
                print(f"{level.clients} clients, the first that failed: {error}", file=sys.stderr)
    print_rows(rows, as_json=given.json)
    return int(any(row["failed"] for row in rows))


async def measure(
    url: str,
    scenario: Scenario,
    clients: Sequence[int],
    rounds: int,
    seed: int,
    *,
    model: str = "",
    api_key: str = "",
) -> list[Level]:
    """What clients see.

    Args:
        url: Of the server, with or without ``/v1``.
        scenario: What is sent.
        clients: How many at once, one level after the other.
        rounds: Conversations of each client.
        seed: Of the pictures; no two levels send the same.
        model: The model's name there; empty: the first that it tells.
        api_key: What it wants to see.
    """
    async with Chat.with_server(url, model=model, api_key=api_key) as chat:
        await _level(chat, scenario, Level(WARM_UP), scenario.chains(WARM_UP, seed))
        seed += WARM_UP * scenario.images
        levels = []
        for count in clients:
            chains = scenario.chains(count * rounds, seed)
            seed += len(chains) * scenario.images
            levels.append(await _level(chat, scenario, Level(count), chains))
            print(f"{count} clients: done", file=sys.stderr, flush=True)
    return levels


async def _level(chat: Chat, scenario: Scenario, level: Level, chains: list[list[Messages]]) -> Level:
    waiting = iter(chains)

    async def client() -> None:
        for chain in waiting:  # one iterator: each takes the next
            for messages in chain:
                await _ask(chat, messages, scenario.max_tokens, level)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(level.clients)))
    level.elapsed_s = time.perf_counter() - started_s
    return level


async def _ask(chat: Chat, messages: Messages, max_tokens: int, level: Level) -> None:
    answer, times_s = Answer(), list[float]()
    sent_s = time.perf_counter()
    try:
        async for now_s in chat.events(messages, max_tokens, answer):
            times_s.append(now_s)
    except (ConnectionError, RuntimeError) as error:
        level.errors.append(f"{str(error) or type(error).__name__}")
        return
    if not times_s:
        level.errors.append("an answer without a word")
        return
    level.ttft_ms.append((times_s[0] - sent_s) * 1e3)
    level.itl_ms.append((times_s[-1] - times_s[0]) * 1e3 / max(answer.num_tokens - 1, 1))
    level.num_tokens += answer.num_tokens


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name} p{q}": percentile(values, q) if values else None for q in (50, 90, 99)}


@contextlib.contextmanager
def _server(given: argparse.Namespace) -> Iterator[str]:
    if given.base_url:
        yield given.base_url
    else:
        with serving(given.model, *given.serve) as (url, _):
            yield url


def _name(given: argparse.Namespace) -> str:
    return str(given.model) if given.base_url else ""


def _given(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="beholder bench load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="", help="a server that runs (default: one is started)")
    parser.add_argument("--model", default="", help="its name there; without --base-url a model folder")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--clients", type=counts, default=[1, 8, 64], help="at once (default: 1,8,64)")
    parser.add_argument("--rounds", type=count, default=8, help="conversations of each client (default: 8)")
    parser.add_argument("--reuse", choices=REUSES, default="unique", help="of pictures (default: unique)")
    parser.add_argument("--turns", type=count, help="of each conversation, with --reuse turns (default: 4)")
    parser.add_argument("--image-size", type=size, default=(1024, 768), help="of the JPEGs (default: 1024x768)")
    parser.add_argument("--images", type=count, default=1, help="in each request (default: 1)")
    parser.add_argument("--max-tokens", type=count, default=128, help="of each answer (default: 128)")
    parser.add_argument("--prompt", default="", help=f"(default: {PROMPT})")
    parser.add_argument(
        "--seed", type=count_from_0, help="of the pictures (default: another in each run, so no cache knows them)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_serve_option(parser)
    given = parser.parse_args(arguments)
    refuse_serve_option(parser, given)
    if given.turns is None:
        given.turns = 4
    elif given.reuse != "turns":
        parser.error(f"--turns does nothing with --reuse {given.reuse}; add --reuse turns, or leave --turns out")
    return given
