"""told.h in Python: what the native sources are told and tell, the library that they are in, and what it keeps of one
sequence. Called by `engine.speculation.native_sources`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Ordered
from functools import cache
from typing import Final

from engine.extension import opened
from engine.speculation.drafting import Kind

VERSION: Final = 4
"""Of what told.h and this file agree on; raised in both when that changes, so that no stale build is used."""

MOST: Final = 64
"""Guesses of a proposal."""
BRANCHES: Final = 4
KINDS: Final = (
    Kind.NGRAM_SHORT,
    Kind.NGRAM_LONG,
    Kind.NGRAM_OLDER,
    Kind.ECHO,
    Kind.ECHO_ASTRAY,
    Kind.GRAMMAR,
    Kind.HABIT,
)
"""In the order of told.h."""
SOURCES: Final = {"echo": 1, "ngram": 2, "grammar": 4, "habit": 8}

_P, _I32, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_double


class Rules(ctypes.Structure):
    """`Rules` of told.h."""

    _fields_ = (
        ("priors", _F64 * (2 * len(KINDS))),
        ("prior_weight", _F64),
        ("most", _F64),
        ("rescue", _F64),
        ("sure", _F64),
        ("least_rate", _F64),
        ("least_habit", _F64),
        ("fading", _F64),
        ("sources", _I32),
        ("vocab_size", _I32),
        ("sequence_memory", _I32),
        ("source_memory", _I32),
        ("max_tokens", _I32),
        ("max_match", _I32),
        ("near", _I32),
        ("firm", _I32),
        ("max_astray", _I32),
        ("long", _I32),
        ("max_prompt", _I32),
        ("max_contexts", _I32),
    )


class Asked(ctypes.Structure):
    """`Asked` of told.h."""

    _fields_ = (
        ("sequence", _P),
        ("ids", _P),
        ("num_new", _I32),
        ("num_forced", _I32),
        ("max_tokens", _I32),
        ("num_said", _I32),
        ("checked", _I32),
        ("limit", _I32),
        ("paths", _I32 * BRANCHES),
    )


class Bet(ctypes.Structure):
    """`Bet` of told.h."""

    _fields_ = (
        ("steps", _P),
        ("plain_s", _F64),
        ("looking_s", _F64),
        ("credit_s", _F64),
        ("rate", _F64),
        ("doubt", _F64),
        ("least_doubt", _F64),
    )


class Found(ctypes.Structure):
    """`Found` of told.h."""

    _fields_ = (
        ("first", _F64),
        ("later", _F64),
        ("kind", _I32),
        ("length", _I32),
        ("token_ids", _I32 * MOST),
    )


@cache
def library() -> ctypes.PyDLL | None:
    """The library; None where it was not built, cannot be loaded, or was built from another version of its files. Its
    calls are too short to let go of Python's lock.
    """
    loaded = opened("engine.speculation._guesses", ctypes.PyDLL)
    if loaded is None or loaded.beholder_guesses_version() != VERSION:
        return None
    for name, result, arguments in (
        ("new", _P, (_P,)),
        ("free", None, (_P,)),
        ("begin", _P, (_P, _P, _P, _I32, _P, _I32, _I32, _I32)),
        ("end", None, (_P,)),
        ("look", _F64, (_P, _P, _I32, _P, _P)),
        ("choose", ctypes.c_int, (_P, _P, _I32, _P, _I32, _P)),
        ("decide", ctypes.c_int, (_P, _P, _I32, _P, _P, _P, _I32, _P)),
        ("cut", None, (_P, _P, _I32, _P)),
        ("prefer", None, (_P, _I32)),
        ("proposals", ctypes.c_int, (_P, _P, _P, _I32)),
    ):
        function = getattr(loaded, f"beholder_guesses_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class Told:
    """What guesses.cpp keeps of one sequence, as long as this object lives; and what it is told of it before a step.

    Attributes:
        num_output: How much of the output it was told.
        asked: What it is told next.
        at: Where that lies.
    """

    __slots__ = ("_ids", "_library", "asked", "at", "num_output")

    def __init__(self, library: ctypes.PyDLL, sequence_at: int, max_tokens: int, limit: int) -> None:
        self._library = library
        self._ids = array("i", (0,) * MOST)
        self.num_output = 0
        self.asked = Asked(sequence_at, self._ids.buffer_info()[0], 0, 0, max_tokens, 1, 0, limit)
        self.at = ctypes.addressof(self.asked)

    def __del__(self) -> None:
        self._library.beholder_guesses_end(self.asked.sequence)

    def checked(self, num_said: int, num_checked: int, paths: Ordered[int] = ()) -> None:
        """The step behind the last look gave so many tokens and checked so many of its best proposal; of a tree, how
        many of each proposal.
        """
        self.asked.num_said, self.asked.checked = num_said, num_checked
        self.asked.paths[: len(paths)] = paths

    def said(self, output_ids: Ordered[int], forced: Ordered[int] = ()) -> None:
        """What the sequence has said, and what its grammar forces. An answer that a stop string has cut since has said
        nothing new.
        """
        first, count, asked = self.num_output, max(len(output_ids), self.num_output), self.asked
        if count == first + 1 and not forced:
            self._ids[0] = output_ids[first]
        else:
            ids = array("i", (*output_ids[first:], *forced))
            if len(ids) > len(self._ids):
                self._ids = array("i", (0,) * (2 * len(ids)))
                asked.ids = self._ids.buffer_info()[0]
            self._ids[: len(ids)] = ids
        asked.num_new, asked.num_forced = count - first, len(forced)
        self.num_output = count
