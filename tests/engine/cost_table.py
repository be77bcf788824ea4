"""Costs of a step that a test chooses, in place of measured ones."""

from __future__ import annotations

from engine.step_costs import Load

MS = 1e-3


class Table:
    """Fixed costs: 10 ms to decode, a quarter millisecond a token of a prompt, a millisecond a slice; `unknown` sizes
    of slices have not been measured.
    """

    def __init__(self, *, token_s: float = 0.25 * MS, slice_s: float = 1 * MS, pair_s: float = 0.0) -> None:
        self.token_s = token_s
        self.pair_s = pair_s
        self.one_slice_s = slice_s
        self.unknown: set[float] = set()
        self.loads: list[Load] = []

    def decode_s(self, rows: int, tokens: int) -> float:
        """See `Costs`; so the others."""
        return 10 * MS + self.prompt_s(tokens - rows)

    def prompt_s(self, tokens: int, rows: int = 0) -> float:
        """Tokens, at their price."""
        return self.token_s * tokens

    def reading_s(self, pairs: float) -> float:
        """At theirs, none by default."""
        return self.pair_s * pairs

    def slice_s(self, size: float) -> float:
        """Slices, at theirs."""
        return self.one_slice_s

    def knows_slice(self, size: float) -> bool:
        """What is not unknown."""
        return size not in self.unknown

    @property
    def doubts_decode(self) -> bool:
        """It is fixed."""
        return False

    def stepped(self, load: Load, elapsed_s: float, encoding_s: float | None) -> None:
        """Kept."""
        self.loads.append(load)

    def encoded(self, size: float, num_slices: int, elapsed_s: float) -> None:
        """Is known from now on."""
        self.unknown.discard(size)
