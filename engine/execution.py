"""Runs a plan: encodes its pictures, turns chunks into rows, calls the model. What the runner raises ends here.

Called by `engine.core` once a step. Changes no sequence; says which chunks could not be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from itertools import islice
from typing import TYPE_CHECKING, overload

from engine.batch import (
    FUTURE_TOKEN,
    DraftedAlike,
    Flight,
    OverlappedRunner,
    Row,
    RowSampling,
    Runner,
    SampledToken,
    is_awaited,
)
from engine.encoding import Encoding
from engine.grammar import Grammars, RowMasks, Wanted
from engine.kv.pool import SlotPool
from engine.scheduler import Chunk, Plan
from engine.speculation.tree import lineages
from engine.speculation.verify import standing
from engine.step_budget import StepBudget
from engine.vision_cache import VisionCache

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("beholder.engine")


class Execution:
    """The runner, seen from the engine.

    Attributes:
        waited_s: How long the last call of `collect` waited for the device.
    """

    def __init__(
        self,
        runner: Runner,
        pool: SlotPool,
        vision: VisionCache,
        grammars: Grammars,
        clock: Callable[[], float],
        budget: StepBudget,
    ) -> None:
        self._runner = runner
        self._is_awaited = is_awaited(runner)
        self._grammars = grammars
        self._pool = pool
        self._vision = vision
        self._clock = clock
        self._budget = budget
        self.waited_s = 0.0

    def encode(self, plan: Plan) -> set[int]:
        """Encode the pictures of the plan, or the slices that it names. Returns the keys of those where that failed."""
        encodings = [encoding for encoding in plan.encodings if encoding.entry.holders]  # the others are gone again
        if not encodings:
            return set()
        start_s = self._clock()
        failed: set[int] = set()
        whole = [encoding for encoding in encodings if encoding.is_whole]
        for together in (whole, *([encoding] for encoding in encodings if not encoding.is_whole)):
            if together:
                failed |= self._encode(together)
        plan.encoding_s = self._clock() - start_s if self._is_awaited else None
        return failed

    def _encode(self, encodings: list[Encoding]) -> set[int]:
        """Pictures as a whole together, or slices of one."""
        start_s = self._clock()
        try:
            if encodings[0].is_whole:
                self._fill(encodings)
            else:
                self._go_on(encodings[0])
        except Exception:
            logger.exception("encoding of %d pictures failed", len(encodings))
            return {encoding.picture.key for encoding in encodings}
        elapsed_s = self._clock() - start_s
        for sequence in {encoding.sequence.serial: encoding.sequence for encoding in encodings}.values():
            sequence.clock.vision_s += elapsed_s
        if self._is_awaited and len(encodings) == 1:
            self._budget.encoded(encodings[0].size, encodings[0].count, elapsed_s)
        return set()

    def run(self, chunks: list[Chunk]) -> list[list[SampledToken]] | None:
        """One forward; for each chunk that samples, in order, its next token and those that follow drafts that were
        right. None when it failed.
        """
        self._pool.batch_started()
        try:
            return _standing(self._runner.step(self._rows(chunks)), chunks)
        except Exception:
            logger.exception("a batch of %d rows failed", len(chunks))
            return None
        finally:
            self._pool.batch_finished()

    def launch(self, runner: OverlappedRunner, chunks: list[Chunk]) -> Flight | None:
        """Send one forward to a device that runs batches in order. None when that failed."""
        try:
            return runner.launch(self._rows(chunks))
        except Exception:
            logger.exception("a batch of %d rows failed", len(chunks))
            return None

    def collect(self, flight: Flight, chunks: list[Chunk]) -> list[list[SampledToken]] | None:
        """Wait for what `launch` sent; then as `run`."""
        started_s = self._clock()
        try:
            flight.wait()
            self.waited_s = self._clock() - started_s
            return _standing(flight.result(), chunks)
        except Exception:
            logger.exception("a batch of %d rows failed", len(chunks))
            return None

    def _rows(self, chunks: list[Chunk]) -> list[Row]:
        if not any(chunk.sequence.grammar is not None for chunk in chunks):
            return [self._row(chunk, None) for chunk in chunks]
        masks = self._masks(chunks)
        return [self._row(chunk, masks.get(chunk.sequence.serial)) for chunk in chunks]

    def _fill(self, encodings: list[Encoding]) -> None:
        """Encode pictures as a whole. Raises RuntimeError when tokens or pictures are not as many as promised."""
        pixels = [encoding.sequence.load_pixels(encoding.picture.pixels) for encoding in encodings]
        for encoding, embeddings in zip(encodings, self._runner.encode(pixels), strict=True):
            _show(encoding, embeddings)

    def _go_on(self, encoding: Encoding) -> None:
        """Run slices of a picture. Raises RuntimeError when its tokens are not as many as promised."""
        entry = encoding.entry
        if entry.encoding is None:
            entry.encoding = self._runner.begin(encoding.sequence.load_pixels(encoding.picture.pixels))
        entry.encoding.run(encoding.count)
        if encoding.first + encoding.count == entry.num_slices:
            embeddings, entry.encoding = entry.encoding.result(), None
            _show(encoding, embeddings)

    def _masks(self, chunks: list[Chunk]) -> dict[int, RowMasks]:
        """Have masks computed for the chunks that sample under a grammar, while the model runs. By serial, one for the
        next token and one for that after each draft.
        """
        shaped = [chunk for chunk in chunks if chunk.samples and chunk.sequence.grammar is not None]
        if not shaped:
            return {}
        wanted = []
        for chunk in shaped:
            sequence = chunk.sequence
            params = sequence.request.sampling
            num_early = max(params.min_tokens - len(sequence.output_ids), 0)
            assert sequence.grammar is not None
            wanted.append(Wanted(sequence.grammar, params.stop_token_ids, num_early, chunk.drafts, chunk.parents))
        masks = self._grammars.masks(wanted)
        return {chunk.sequence.serial: mask for chunk, mask in zip(shaped, masks, strict=True)}

    def _row(self, chunk: Chunk, masks: RowMasks | None) -> Row:
        sequence, start = chunk.sequence, chunk.start
        assert sequence.hold is not None
        sampling = sequence.sampling((), masks[0] if masks else None) if chunk.samples else None
        first = start - len(sequence.prompt_ids)
        drafted: Ordered[RowSampling] = Drafted(chunk, masks) if chunk.drafts else ()
        if drafted and first >= 0:
            ids, delta = [*sequence.output_ids[first:], *chunk.drafts], sequence.position_delta
            return Row(sequence.hold.row, start, ids, sampling, (), None, delta, drafted, chunk.parents, masks)
        if first >= 0:
            ids = sequence.output_ids[first : first + chunk.count] or [FUTURE_TOKEN]
            return Row(sequence.hold.row, start, ids, sampling, (), None, sequence.position_delta, masks=masks)
        stop = start + chunk.count - len(chunk.drafts)
        vision = []
        for picture in sequence.pictures:
            if picture.overlaps(start, stop):
                embeddings = self._vision.get(picture.key).embeddings
                assert embeddings is not None
                vision.extend(picture.rows(start, stop, embeddings))
        positions = sequence.rope_positions(start, start + chunk.count)
        ids, delta = [*sequence.ids(start, stop), *chunk.drafts], sequence.position_delta
        return Row(sequence.hold.row, start, ids, sampling, vision, positions, delta, drafted, masks=masks)


class Drafted(DraftedAlike):
    """See `DraftedAlike`: made when they are asked for, which a step whose rows take the largest logit does not."""

    __slots__ = ("_chunk", "_masks")

    def __init__(self, chunk: Chunk, masks: RowMasks | None) -> None:
        self._chunk = chunk
        self._masks = masks

    def __len__(self) -> int:
        return len(self._chunk.drafts)

    @overload
    def __getitem__(self, index: int) -> RowSampling: ...

    @overload
    def __getitem__(self, index: slice) -> list[RowSampling]: ...

    def __getitem__(self, index: int | slice) -> RowSampling | list[RowSampling]:
        indices = range(len(self))[index]
        if not isinstance(indices, int):
            return [self[one] for one in indices]
        lineage = lineages(self._chunk.drafts, self._chunk.parents)[indices]
        return self._chunk.sequence.sampling(lineage, self._masks[indices + 1] if self._masks else None)

    def __iter__(self) -> Iterator[RowSampling]:
        sequence, masks = self._chunk.sequence, self._masks
        for index, lineage in enumerate(lineages(self._chunk.drafts, self._chunk.parents)):
            yield sequence.sampling(lineage, masks[index + 1] if masks else None)


def _show(encoding: Encoding, embeddings: torch.Tensor) -> None:
    """Put a picture's embeddings into its cache entry."""
    entry = encoding.entry
    if embeddings.shape[0] != entry.num_tokens:
        raise RuntimeError(f"a picture of {entry.num_tokens} tokens was encoded as {embeddings.shape[0]}")
    entry.embeddings = embeddings


def _standing(sampled: list[SampledToken], chunks: list[Chunk]) -> list[list[SampledToken]]:
    """Of each chunk that samples, the tokens that stand. Raises RuntimeError where not as many as asked for came."""
    expected = sum(1 + len(chunk.drafts) for chunk in chunks if chunk.samples)
    if len(sampled) != expected:
        raise RuntimeError(f"the runner returned {len(sampled)} tokens where {expected} were to be sampled")
    tokens = iter(sampled)
    return [
        standing(
            chunk.drafts, [next(tokens), *islice(tokens, len(chunk.drafts))], chunk.sequence.grammar, chunk.parents
        )
        if chunk.drafts
        else [next(tokens)]
        for chunk in chunks
        if chunk.samples
    ]
