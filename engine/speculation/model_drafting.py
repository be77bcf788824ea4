"""Has a model guess for all sequences that draft, together: one forward a guess.

    positions      0 ──────────── start ──────────────── n      n + 1  n + 2  …
                   │ have entries  │ first forward:        │ last │ guess│ guess
                   │               │ what is missing       │ token│ 1    │ 2

Which slots have entries is kept with the slots (`SlotPool.followed`), not with sequences: so a drafter that was not
asked for a while catches up with what it has missed, a prompt that another sequence's drafts have followed needs
nothing, and wrong guesses, retraction and aborts need no care. Catching up is cut into pieces, so that streams do not
stutter.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.sampling import sample
from engine.speculation.draft_times import FEW
from engine.speculation.drafter import ChainDrafter, Drafter, DraftRow, split
from engine.speculation.lookahead import Lookahead
from engine.speculation.model_lengths import ModelCandidate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.batch import RowSampling
    from engine.kv.cache import KVCache
    from engine.sequence import Sequence
    from engine.speculation.acceptance import Rates

logger = logging.getLogger("beholder.engine")


@dataclasses.dataclass(slots=True, eq=False)
class _Guesses:
    """What is guessed for one sequence. `first`: the position of the first guess."""

    sequence: Sequence
    first: int
    length: int
    ahead: Lookahead | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    is_over: bool = False

    def ends_with(self, token_id: int) -> bool:
        """Whether the answer ends with such a next guess: nobody needs to know what would follow, so it need not be
        checked.
        """
        params = self.sequence.request.sampling
        return token_id in params.stop_token_ids and (
            len(self.sequence.output_ids) + len(self.token_ids) >= params.min_tokens
        )


class ModelDrafting:
    """See above. Guesses are drawn as the target draws, with the same noise, penalties and masks: so they are right as
    often as two models can agree.

    Args:
        drafter: The model.
        kv: The target's cache.
        vocab_size: The target's.
        clock: Seconds, for `took`.

    Attributes:
        kind: What its guesses are called.
        cost, late_cost: See `Drafter`.
        is_broken: A forward of the drafter has raised; it is not asked again.
        took: Of the last call of `draft`: sequences, tokens beyond one each in the first forward, forwards, seconds of
            the first and of the others. None where it did nothing.
    """

    def __init__(self, drafter: Drafter, kv: KVCache, vocab_size: int, clock: Callable[[], float]) -> None:
        self.kind = drafter.kind
        self.cost, self.late_cost = drafter.cost, drafter.late_cost
        self.is_broken = False
        self.took: tuple[int, int, int, float, float] | None = None
        self._drafter = drafter
        self._chains = drafter if isinstance(drafter, ChainDrafter) else None
        self._kv = kv
        self._vocab_size = vocab_size
        self._clock = clock
        self._drafted: dict[int, _Guesses] = {}

    def candidate(self, sequence: Sequence, limit: int, rates: Rates) -> ModelCandidate | None:
        """What could be guessed of a sequence that decodes, at most `limit` tokens."""
        limit = min(limit, self._drafter.max_positions - sequence.num_computed - 1)
        if limit <= 0 or self.is_broken:
            return None
        return ModelCandidate(limit, rates, sequence.num_computed - self._start(sequence))

    def draft(self, wanted: Ordered[tuple[Sequence, int]], most_late: int) -> list[list[int]]:
        """Guesses of each sequence, at most as many as asked for, which have slots already; perhaps none. Nobody
        catches up with more than `most_late` tokens before, all together.
        """
        self.took = None
        everybody = [
            _Guesses(
                sequence,
                sequence.num_computed + 1,
                length,
                None if sequence.grammar is None else Lookahead(sequence.grammar, self._vocab_size),
            )
            for sequence, length in wanted
        ]
        try:
            self._guess(everybody, min(most_late, self._drafter.most_late))
        except Exception:
            logger.exception("guessing failed; the %s is not asked again", self.kind.source)
            self.is_broken = True
            self._kv.pool.followed[:] = False
            return [[] for _ in wanted]
        self._drafted = {guesses.sequence.serial: guesses for guesses in everybody}
        return [guesses.token_ids for guesses in everybody]

    def give_back(self, sequence: Sequence, count: int) -> None:
        """The last slots of a sequence were meant for guesses that were not made."""
        if count:
            assert sequence.hold is not None
            self._kv.shrink(sequence.hold, sequence.hold.num_slots - count)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """So many of the guesses stand: entries that were made of them while guessing are those of the text."""
        guesses = self._drafted.pop(sequence.serial, None)
        hold = sequence.hold
        if guesses is None or hold is None or not self._drafter.keeps_guesses:
            return
        count = min(num_accepted, len(guesses.token_ids) - 1)  # the last guess was not computed
        if count > 0:
            slots = self._kv.table.read_run(hold.row, guesses.first, guesses.first + count)
            self._kv.pool.followed[slots] = True

    def _guess(self, everybody: list[_Guesses], most_late: int) -> None:
        rows, asking, late = self._first_rows(everybody, most_late)
        if not rows:
            return
        chains = self._chains
        sampling = [_sampling(guesses) for guesses in asking]
        is_drawn = [chains is not None and chains.draws(how) for how in sampling]
        if chains is None or not asking:
            self.took = len(rows), late, *self._one_by_one(rows, asking)
            return
        started_s = self._clock()
        num_rows, are_alike = len(rows), any(is_drawn) == all(is_drawn)
        if late > FEW * num_rows or not are_alike:  # before, so that it is known what a guess takes
            before, rows = split(rows)
            if before:
                self._drafter.forward(before, guessed=False)
        began_s = self._clock()
        num_forwards = max(guesses.length for guesses in asking)
        if all(is_drawn):
            _guess_at_once(chains, rows, asking, sampling)
        elif are_alike:
            num_forwards, *_ = self._one_by_one(rows, asking)
        else:
            for is_quick in (True, False):
                kind = [index for index, drawn in enumerate(is_drawn) if drawn is is_quick]
                of_kind, asked = [rows[index] for index in kind], [asking[index] for index in kind]
                if is_quick:
                    _guess_at_once(chains, of_kind, asked, [sampling[index] for index in kind])
                else:
                    self._one_by_one(of_kind, asked)
        ended_s = self._clock()
        each_s = (ended_s - began_s) / num_forwards
        self.took = num_rows, late, num_forwards, began_s - started_s + each_s, ended_s - began_s - each_s

    def _one_by_one(self, rows: list[DraftRow], asking: list[_Guesses]) -> tuple[int, float, float]:
        """A forward a guess: how many, and seconds of the first and of the others."""
        started_s = self._clock()
        logits = self._drafter.forward(rows, guessed=False)
        first_s = self._clock() - started_s
        num_forwards = 1
        while asking:
            sampled = sample(logits, [_sampling(guesses) for guesses in asking])
            for guesses, token in zip(asking, sampled, strict=True):
                _take(guesses, token.token_id)
            asking = [guesses for guesses in asking if not guesses.is_over and len(guesses.token_ids) < guesses.length]
            if asking:
                logits = self._drafter.forward([self._next_row(guesses) for guesses in asking], guessed=True)
                num_forwards += 1
        return num_forwards, first_s, self._clock() - started_s - first_s

    def _first_rows(self, everybody: list[_Guesses], most_late: int) -> tuple[list[DraftRow], list[_Guesses], int]:
        """What is missing up to each sequence's last token, as far as `most_late` allows; who is complete then, and how
        many tokens were missing beyond one each.

        A position counts as there as soon as it is planned: of two sequences that share a prompt, one computes it, and
        in each layer all keys are written before anybody reads.
        """
        rows, asking = [], []
        total = 0
        for guesses in everybody:
            sequence = guesses.sequence
            hold = sequence.hold
            assert hold is not None
            if guesses.ahead is not None and guesses.ahead.is_over:
                continue
            start, stop = self._start(sequence), sequence.num_computed + 1
            end = min(stop, start + max(most_late - total, 0))
            if end == start:
                continue
            total += end - start - 1
            self._kv.pool.followed[self._kv.table.read_run(hold.row, start, end)] = True
            rows.append(self._row(sequence, start, end, asks=end == stop))
            if end == stop:
                asking.append(guesses)
        return rows, asking, total

    def _start(self, sequence: Sequence) -> int:
        """The first position, at most that of the last token, that has no entry."""
        hold, lag, last = sequence.hold, self._drafter.lag, sequence.num_computed
        assert hold is not None
        if last <= lag:
            return lag
        followed = self._kv.pool.followed.take(self._kv.table.read_run(hold.row, lag, last))
        first = int(followed.argmin())
        return lag + (len(followed) if followed[first] else first)

    def _row(self, sequence: Sequence, start: int, stop: int, *, asks: bool) -> DraftRow:
        hold, lag = sequence.hold, self._drafter.lag
        assert hold is not None
        vision = None
        if any(picture.overlaps(start, stop) for picture in sequence.pictures):
            vision = sequence.prompt_keys[start:stop] != sequence.prompt_ids[start:stop]
            if stop - start > len(vision):
                vision = _padded(vision, stop - start)
        return DraftRow(
            hold.row,
            start,
            sequence.ids(start, stop),
            vision,
            sequence.rope_positions(start - lag, stop - lag),
            sequence.position_delta,
            asks,
        )

    def _next_row(self, guesses: _Guesses) -> DraftRow:
        sequence = guesses.sequence
        assert sequence.hold is not None
        position = guesses.first + len(guesses.token_ids) - 1
        token_ids = guesses.token_ids[-1:]
        positions = sequence.rope_positions(position - self._drafter.lag, position - self._drafter.lag + 1)
        return DraftRow(sequence.hold.row, position, token_ids, None, positions, sequence.position_delta)


def _padded(vision: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    padded = np.zeros(length, np.bool_)
    padded[: len(vision)] = vision
    return padded


def _guess_at_once(
    drafter: ChainDrafter, rows: list[DraftRow], asking: list[_Guesses], sampling: list[RowSampling]
) -> None:
    """All guesses in one call. Behind the first one a grammar is not asked what it allows: a guess that it does not is
    dropped afterwards, with those behind it.
    """
    lengths = [guesses.length for guesses in asking]
    for guesses, token_ids in zip(asking, drafter.guess(rows, lengths, sampling), strict=True):
        for token_id in token_ids:
            if guesses.ends_with(token_id):
                break
            guesses.token_ids.append(token_id)


def _take(guesses: _Guesses, token_id: int) -> None:
    """The next guess, unless it ends the answer."""
    guesses.is_over = guesses.ends_with(token_id)
    if guesses.ahead is not None and not guesses.is_over:
        guesses.ahead.advance(token_id)
        guesses.is_over = guesses.ahead.is_over
    if not guesses.is_over:
        guesses.token_ids.append(token_id)


def _sampling(guesses: _Guesses) -> RowSampling:
    """As the target will draw there, but nobody wants to know log probabilities."""
    sampling = guesses.sequence.sampling(guesses.token_ids, guesses.ahead)
    if sampling.params.logprobs is None:
        return sampling
    return dataclasses.replace(sampling, params=msgspec.structs.replace(sampling.params, logprobs=None))
