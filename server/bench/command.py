"""`beholder bench [KIND] …`: which of the benchmarks is meant."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from preprocess.errors import BeholderError

KINDS: Final = {
    "transformers": ("beside_transformers", "this machine's figures beside plain transformers (what no KIND measures)"),
    "load": ("load", "clients that ask about pictures: requests/s, TTFT, ITL; any OpenAI-compatible server"),
    "live": ("live", "cameras over WebSocket: age of frames, how many are looked at, what a still scene costs"),
    "interference": ("interference", "what new pictures do to running streams; any OpenAI-compatible server"),
    "pace": ("pace", "the same without HTTP, by processor time, and what steady streams cost in throughput"),
    "idle": ("idle", "how long a GPU stands idle while streams decode, from a trace; which kernels take longest"),
    "speculation": ("speculation", "the engine with and without drafts, by workload"),
    "replay": ("replay", "what checking drafts costs and brings at scripted acceptance"),
}
"""Its name, its module of this package, and what it measures."""
DEFAULT: Final = "transformers"


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names; the exit code of the command."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_help())
        return 0
    is_named = bool(arguments) and not arguments[0].startswith("-")
    kind, options = (arguments[0], arguments[1:]) if is_named else (DEFAULT, arguments)
    if kind not in KINDS:
        print(f"beholder: there is no benchmark {kind!r}; expected one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    module, _ = KINDS[kind]
    try:
        return int(importlib.import_module(f"server.bench.{module}").main(options))
    except (BeholderError, RuntimeError, ConnectionError) as error:
        print(f"beholder: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


def _help() -> str:
    width = max(map(len, KINDS))
    lines = [f"  {kind:{width}}  {what}" for kind, (_, what) in KINDS.items()]
    return "\n".join(
        ["usage: beholder bench [KIND] [options]", "", *lines, "", "`beholder bench KIND --help` tells its options."]
    )
