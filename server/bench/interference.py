"""`beholder bench interference`: what a new picture does to those who are reading: streams that decode, and a picture
every so often.

    beholder bench interference [--streams 32] [--picture-every-ms 500] [--image-size 1024x768]
    beholder bench interference --base-url http://127.0.0.1:8000 [--model NAME] …

Seconds of the streams alone and seconds with pictures take turns, since steps grow longer with the streams' texts;
their questions are long already, so that they do so slowly. Streams should not end meanwhile: `--stream-tokens`.
Pictures come at fixed times, whether the last one is answered or not; every picture is another. They are drawn before,
and sent by a process of their own, which encodes its bodies before the first one is due: the process that reads the
streams does nothing else meanwhile, so that a gap is the server's and not this client's. ITL is the gap between two
events of a stream as its client sees it, or, where half of them and more come together with the one before, between two
reads that bring some; by token, where the server tells token ids: those of half a character come with the next one, and
are no gap. TTFT is the time from sending a picture to the first event of its answer.
*p99 / alone* compares each gap with the median of the seconds alone before and after it, whose texts were as long.

With `--base-url` any OpenAI-compatible server is measured. Without, two servers are started and measured in turn: one
that takes pictures and prompts as soon as they come (`--ttft-target-ms 0`), and one that keeps to its targets;
both with the options of `beholder serve` in `--serve='--max-running 64'`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from server.bench.arguments import count, positive
from server.bench.chat import Answer, Chat
from server.bench.figures import percentile, print_rows
from server.bench.picture_sender import LONGEST_WAIT_S, PictureSender, Sending
from server.bench.pictures import size
from server.bench.serving import add_serve_option, refuse_serve_option, serving

SIDES: Final = {"as they come": ["--ttft-target-ms", "0"], "by targets": []}
STORY: Final = "Tell a long story about a lighthouse and the people who live in it. "


@dataclass
class Round:
    """What clients saw: gaps of streams in ms, alone and beside pictures, those as parts of the median alone; and what
    became of the pictures.
    """

    quiet_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, other: Round) -> None:
        """Take in another round."""
        self.quiet_ms += other.quiet_ms
        self.beside_ms += other.beside_ms
        self.relative += other.relative
        self.ttft_ms += other.ttft_ms
        self.failed += other.failed


@dataclass(frozen=True)
class Scenario:
    """What is sent."""

    streams: int
    every_s: float
    seconds: float
    turns: int
    stream_words: int
    stream_tokens: int
    picture_tokens: int

    @property
    def pictures_a_turn(self) -> int:
        """How many come."""
        return num_pictures(self.seconds, self.every_s)


def main(arguments: list[str]) -> int:
    """Print the figures; the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="beholder bench interference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="", help="a server that runs (default: two are started)")
    parser.add_argument("--model", default="", help="its name there; without --base-url a model folder")
    parser.add_argument("--api-key", default="")
    add_scenario_options(parser)
    parser.add_argument("--rounds", type=count, default=3, help="of each side (default: 3)")
    parser.add_argument("--stream-tokens", type=count, default=1024, help="of a stream's answer (default: 1024)")
    parser.add_argument("--picture-tokens", type=count, default=16, help="of a picture's answer (default: 16)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_serve_option(parser)
    given = parser.parse_args(arguments)
    refuse_serve_option(parser, given)
    every_s = given.picture_every_ms / 1e3
    scenario = Scenario(
        given.streams,
        every_s,
        given.seconds,
        given.turns,
        given.stream_words,
        given.stream_tokens,
        given.picture_tokens,
    )
    totals: dict[str, Round] = {}
    with contextlib.ExitStack() as stack:
        num_all = given.rounds * given.turns * scenario.pictures_a_turn
        sender = stack.enter_context(PictureSender(given.image_size, num_all))
        if given.base_url:
            sides = {given.base_url: given.base_url}
        else:
            # Nothing is guessed: gaps are steps.
            always = ("--speculation", "none", *given.serve)
            sides = {
                name: stack.enter_context(serving(given.model, *options, *always))[0] for name, options in SIDES.items()
            }
        name_there = given.model if given.base_url else ""
        # To go through all that was loaded takes the collector as long as many a gap, and to look for something in the
        # times that are kept half a millisecond, once a second.
        gc.collect()
        gc.freeze()
        gc.disable()
        stack.callback(gc.enable)
        for number in range(given.rounds):
            for name, url in sides.items():
                found = asyncio.run(measure(url, scenario, sender, number, model=name_there, api_key=given.api_key))
                totals.setdefault(name, Round()).add(found)
            print(f"round {number + 1} of {given.rounds} done", file=sys.stderr, flush=True)
    print_rows([{"side": name, **figures(total)} for name, total in totals.items()], as_json=given.json)
    return 0


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Adds what says how much is decoded and how many pictures come."""
    parser.add_argument("--streams", type=count, default=32, help="that decode all the time (default: 32)")
    parser.add_argument("--picture-every-ms", type=positive, default=500, help="(default: 500)")
    parser.add_argument("--image-size", type=size, default=(1024, 768), help="of the JPEGs (default: 1024x768)")
    parser.add_argument("--seconds", type=positive, default=2, help="alone, and again with pictures (default: 2)")
    parser.add_argument("--turns", type=count, default=4, help="of both in a round (default: 4)")
    parser.add_argument("--stream-words", type=count, default=400, help="of a stream's question (default: 400)")


def story(num_words: int) -> str:
    """A question of about so many words."""
    return STORY * (num_words // len(STORY.split()))


def num_pictures(seconds: float, every_s: float) -> int:
    """Of a turn."""
    return max(round(seconds / every_s), 1)


def figures(total: Round) -> dict[str, float | int | None]:
    """The figures of a side, in ms."""

    def at(values: Sequence[float], q: float) -> float | None:
        return round(percentile(values, q), 1) if values else None

    return {
        "alone ITL p50": at(total.quiet_ms, 50),
        "alone p99": at(total.quiet_ms, 99),
        "ITL p50": at(total.beside_ms, 50),
        "p99": at(total.beside_ms, 99),
        "slowest": at(total.beside_ms, 100),
        "p99 / alone": round(percentile(total.relative, 99), 2) if total.relative else None,
        "TTFT p50": at(total.ttft_ms, 50),
        "TTFT p90": at(total.ttft_ms, 90),
        "pictures": len(total.ttft_ms),
        "failed": total.failed,
    }


async def measure(
    url: str, scenario: Scenario, sender: PictureSender, number: int = 0, *, model: str = "", api_key: str = ""
) -> Round:
    """One round against a server.

    Args:
        url: Of the server, with or without ``/v1``.
        scenario: What is sent.
        sender: Of as many pictures as all rounds take.
        number: Of the round; each asks other questions.
        model: The model's name there; empty: the first that it tells.
        api_key: What it wants to see.

    Raises:
        RuntimeError: Streams failed, or did not begin in time.
        BrokenProcessPool: The sender's process ended.
    """
    async with Chat.with_server(url, model=model, api_key=api_key) as chat:
        await sender.draw()
        sending = Sending(
            url,
            chat.model,
            api_key,
            first=number * scenario.turns * scenario.pictures_a_turn,
            count=scenario.pictures_a_turn,
            every_s=scenario.every_s,
            max_tokens=scenario.picture_tokens,
        )
        return await _Load(chat, scenario, sender, sending, number).run()


def gaps_of(quiet_ms: Sequence[Sequence[float]], beside_ms: Sequence[Sequence[float]]) -> Round:
    """What streams saw in turns, in ms: gaps alone and beside pictures, and alone once more in the end.

    Where tokens come several at a time the median gap may be 0, which nothing compares with: then gaps between reads
    count, in all turns alike.
    """
    if any(gaps and not percentile(gaps, 50) for gaps in quiet_ms):
        quiet_ms = [[gap for gap in gaps if gap] for gaps in quiet_ms]
        beside_ms = [[gap for gap in gaps if gap] for gaps in beside_ms]
    found = Round([gap for gaps in quiet_ms for gap in gaps], [gap for gaps in beside_ms for gap in gaps])
    for (before, after), beside in zip(itertools.pairwise(quiet_ms), beside_ms, strict=True):
        around = [*before, *after]
        if around:
            alone_ms = percentile(around, 50)
            found.relative += [gap / alone_ms for gap in beside]
    return found


class _Load:
    def __init__(self, chat: Chat, scenario: Scenario, sender: PictureSender, sending: Sending, number: int) -> None:
        self._chat = chat
        self._scenario = scenario
        self._sender = sender
        self._sending = sending
        self._number = number
        self._result = Round()
        self._quiet_ms: list[list[float]] = []  # gaps by turn: alone, and
        self._beside_ms: list[list[float]] = []  # beside pictures
        self._gaps: list[tuple[float, float]] = []  # when they ended, and how long they were in ms
        self._begun: set[int] = set()

    async def run(self) -> Round:
        streams = [asyncio.create_task(self._stream(index)) for index in range(self._scenario.streams)]
        try:
            await self._all_begun(streams)
            for turn in range(self._scenario.turns):
                await self._alone(streams)
                await self._turn(turn, streams)
            await self._alone(streams)
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        self._result.add(gaps_of(self._quiet_ms, self._beside_ms))
        return self._result

    async def _alone(self, streams: Sequence[asyncio.Task[None]]) -> None:
        self._gaps.clear()
        await self._pass(self._scenario.seconds, streams)
        self._quiet_ms.append([gap_ms for _, gap_ms in self._gaps])

    async def _turn(self, turn: int, streams: Sequence[asyncio.Task[None]]) -> None:
        """Streams with pictures, then until these are answered."""
        self._gaps.clear()
        first = self._sending.first + turn * self._sending.count
        sending = asyncio.create_task(self._sender.send(dataclasses.replace(self._sending, first=first)))
        try:
            await self._pass(None, [*streams, sending])
            sent = await sending
        finally:
            sending.cancel()
        # Before it the sender makes ready, and the rest of the queue is no part of the picture rate.
        self._beside_ms.append([gap_ms for now_s, gap_ms in self._gaps if sent.begun_s <= now_s < sent.ended_s])
        self._result.ttft_ms += sent.ttft_ms
        self._result.failed += sent.failed

    async def _pass(self, seconds: float | None, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Let time go by, unless one of them ends or fails."""
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _all_begun(self, streams: Sequence[asyncio.Task[None]]) -> None:
        until_s = time.perf_counter() + LONGEST_WAIT_S
        while len(self._begun) < len(streams):
            if time.perf_counter() > until_s:
                raise RuntimeError(f"{len(self._begun)} of {len(streams)} streams began within {LONGEST_WAIT_S:.0f} s")
            await self._pass(0.05, streams)

    async def _stream(self, index: int) -> None:
        """One reader, who asks again when an answer is complete."""
        turn = 0
        while True:
            text = f"{index}.{self._number}.{turn}: {story(self._scenario.stream_words)}"
            last_s: float | None = None
            asked, answer = [{"role": "user", "content": text}], Answer()
            async for now_s in self._chat.events(asked, self._scenario.stream_tokens, answer, token_ids=True):
                if last_s is not None:
                    self._gaps += [(now_s, (now_s - last_s) * 1e3 / answer.num_ids)] * answer.num_ids
                last_s = now_s
                self._begun.add(index)
            turn += 1
