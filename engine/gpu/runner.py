"""Runs the model on an NVIDIA GPU and never waits between steps: `launch` sends a step's work and returns at once.

Steps are graph replays; those larger than any captured one run kernel by kernel. All go through one stream, so that
each step sees what the last one wrote. A drawn token stays on the device, where the next step reads it
(`FUTURE_TOKEN`), and is copied out behind an event for whoever asks for the result.

Rows with drafts have graphs of their own, without prompts. A step that has both would be two replays, so the engine is
asked to send none (`drafts_beside_prompts`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.flashinfer_modules import AttentionModules, NoModules
from engine.batch import DraftedAlike, PictureEncoding, Row, RowSampling, SampledToken
from engine.gpu.drafters import GraphedDraftModel, GraphedHead
from engine.gpu.draws import Draws, Wanted
from engine.gpu.eager_steps import EagerSteps
from engine.gpu.encoder_graphs import EncoderGraphs
from engine.gpu.flight import CudaFlight, JoinedFlight
from engine.gpu.forward import FusedDecoder
from engine.gpu.guess_graphs import GuessGraphs
from engine.gpu.sampling import is_plain
from engine.gpu.staging import Results
from engine.gpu.step_graphs import StepGraphs, StepResult
from engine.gpu.step_layout import StepRows, is_decode
from engine.gpu.verify_graphs import VerifyGraphs
from engine.models.decoder import Decoder
from engine.runner import MAX_DRAFTS, TorchRunner, VisionEncoder
from engine.speculation.drafter import Drafter
from engine.speculation.torch_drafters import Pools
from engine.start_times import Lap, no_lap
from preprocess.vision.slices import SlicedEncoding
from preprocess.wire import SamplingParams

MOST_PROMPT_TOKENS: Final = 4096
"""Tokens of prompts in one captured step; larger steps run kernel by kernel."""

FREE_TOKENS: Final = 128
"""A step of so few tokens takes hardly longer than one of a few: reading the weights takes the time."""

EXPECTING_S: Final = 1.0
"""So long at start for the graphs of pictures that are likely to come."""

logger = logging.getLogger("beholder.engine")


class CudaRunner(TorchRunner):
    """See `engine.batch.OverlappedRunner`. Arguments as `TorchRunner`'s, the kernels of attention, whether graphs of
    rows with drafts are captured before such rows come, and shapes of pictures that are likely to come; the type is
    bfloat16 or float16.

    Of progress only the encoder tells: the forward of a step is sent within milliseconds, and the next turn reports.
    """

    def __init__(
        self,
        model: Decoder,
        encoder: VisionEncoder,
        *,
        num_slots: int,
        max_positions: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        modules: AttentionModules,
        drafts: bool = False,
        expected: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        super().__init__(
            model,
            encoder,
            num_slots=num_slots,
            max_positions=max_positions,
            max_rows=max_rows,
            dtype=dtype,
            device=device,
            padding_rows=1,
        )
        self.max_drafts = MAX_DRAFTS
        self.max_first_drafts = 0
        self.drafts_beside_prompts = False  # they have graphs of their own
        table = self.padded_table
        self._future = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._draws = Draws(self._future)
        self._results = Results()
        self._modules = modules
        self._captures_more = True
        self._drafts = drafts
        self._expected = expected
        self._attention = FlashInferAttention(self.kv_pool, table, model.config.num_heads, modules)
        self._decoder = FusedDecoder(model, self.kv_pool)
        self._eager = EagerSteps(self._decoder, self._attention, self._future, num_taps=encoder.num_taps)
        self.graphs: StepGraphs | None = StepGraphs(
            self._decoder,
            self._attention,
            table,
            self._future,
            num_taps=encoder.num_taps,
            most_tokens=min(MOST_PROMPT_TOKENS, max_positions),
        )
        self.verify_graphs = VerifyGraphs(self._decoder, self._attention, self._future, self.graphs.memory)
        self._guess_graphs: GuessGraphs | None = None
        self._encoder_graphs = EncoderGraphs(encoder)

    def guess_with(self, drafter: Drafter) -> None:
        """See `TorchRunner.guess_with`."""
        super().guess_with(drafter)
        self._decoder.told = drafter.told
        if isinstance(drafter, GraphedDraftModel | GraphedHead):
            self._guess_graphs = drafter.graphs

    def pools(self) -> Pools:
        """See `TorchRunner.pools`."""
        assert self.graphs is not None
        return replace(super().pools(), graphs=self.graphs.memory)

    def warm_up(self, lap: Lap = no_lap) -> None:
        """See `Runner.warm_up`; kernels are compiled and the first graphs captured here."""
        assert self.graphs is not None
        if self.device.type == "cuda":
            self._compile()
            lap("Triton")
        _ = self._modules.tiled, self._modules.hopper
        lap("FlashInfer")
        super().warm_up()
        lap("first steps")
        self.graphs.capture()
        if self._guess_graphs is not None:
            self._guess_graphs.capture()
        lap("graphs")
        self._expect_pictures(time.monotonic() + EXPECTING_S)
        lap("pictures")
        super().warm_up()
        drawn = RowSampling(SamplingParams(max_tokens=1, temperature=1.0, top_k=20, top_p=0.8), output_index=0)
        self.step([Row(0, 0, [0], drawn)])
        torch.cuda.synchronize()
        lap("first replays")

    def _expect_pictures(self, until_s: float) -> None:
        """Have pictures of expected shapes encoded once, so that libraries know their sizes, and captured, as far as
        there is time; what is left follows in idle moments.
        """
        try:
            for shape in reversed(self._expected):  # the last one is captured first
                self._encoder_graphs.expect(shape, self.device)
            while time.monotonic() < until_s and self._encoder_graphs.prepare(self.device):
                pass
        except RuntimeError:  # such as no memory: nobody may ever send one
            logger.warning("pictures are not captured ahead", exc_info=True)

    def _compile(self) -> None:
        """Triton's kernels of steps, while FlashInfer's may still be on their way. Those of the encoder have run: its
        pictures were measured.
        """
        assert self.graphs is not None
        from engine.gpu.precompile import compile_launched

        self._attention.modules = NoModules()
        try:
            compile_launched(self._send_all)
        finally:
            self._attention.modules = self._modules

    def _send_all(self) -> None:
        assert self.graphs is not None
        self.graphs.send_all()
        if self._drafts:
            self.verify_graphs.send_all()
        if self._guess_graphs is not None:
            self._guess_graphs.send_all()

    def idle(self) -> bool:
        """See `Runner.idle`."""
        try:
            if self.graphs is not None and self._captures_more and self._capture_next(self.graphs):
                return True
        except Exception:  # such as no memory, or a kernel that does not compile: what is captured serves
            logger.warning("no more graphs are captured", exc_info=True)
            self._captures_more = False
        self._modules.look()
        return False

    def _capture_next(self, graphs: StepGraphs) -> bool:
        return (
            self._encoder_graphs.prepare(self.device)
            or graphs.capture_next()
            or (self._drafts and self.verify_graphs.capture_next())
        )

    def compile_all(self) -> None:
        """Fill the caches with what `idle` would have compiled, too."""
        self._modules.wait()

    @torch.inference_mode()
    def encode(self, pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Runner.encode`."""
        if not pixels:
            return []
        return self._encoder_graphs([self._staged(picture) for picture in pixels])

    def num_slices(self, shape: Sequence[int]) -> int:
        """See `Runner.num_slices`."""
        return self._encoder_graphs.num_slices(shape)

    def begin(self, pixels: torch.Tensor) -> PictureEncoding:
        """See `Runner.begin`."""
        return SlicedEncoding(self._encoder_graphs, self._staged(pixels))

    def _staged(self, pixels: torch.Tensor) -> torch.Tensor:
        """A picture on the device, without waiting for it. Its pages may change at once: torch keeps the pinned copy
        until it has been read.
        """
        return pixels.contiguous().pin_memory().to(self.device, non_blocking=True)

    def added_s(self, rows: int, tokens: int) -> float | None:
        """See `Runner.added_s`."""
        return None if self.graphs is None else self.graphs.added_s(rows, tokens)

    def step(self, rows: Sequence[Row]) -> list[SampledToken]:
        """See `Runner.step`."""
        return self.launch(rows).result()

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> CudaFlight | JoinedFlight:
        """See `engine.batch.OverlappedRunner.launch`."""
        self._encoder_graphs.pace.stepped()
        parts = _parts(rows)
        if len(parts) == 1:
            return self._launch(rows)
        counts = [0 if row.sampling is None else 1 + len(row.drafted) for row in rows]
        return JoinedFlight([self._launch([rows[index] for index in part]) for part in parts], parts, counts)

    def _launch(self, rows: Sequence[Row]) -> CudaFlight:
        """Rows that share a replay, or launches."""
        result = self._replayed(rows)
        if result is not None and all(map(_is_drawn, rows)):
            return CudaFlight(result.tokens, result.picks, {}, self._results, is_first=result.is_first)
        if result is not None:
            wanted = Wanted.of(rows, self.max_rows, result.picks)
            logits, tokens = result.logits, result.tokens
        else:
            wanted = Wanted.of(rows, self.max_rows)
            logits = self.logits(rows)
            tokens = self._draws.draw(logits, wanted)
        is_first = result is not None and result.is_first
        known = self._draws.redraw(logits, tokens, wanted)
        return CudaFlight(tokens, wanted.picks, known, self._results, is_first=is_first)

    def _replayed(self, rows: Sequence[Row]) -> StepResult | None:
        """The step as a graph; None where none fits."""
        if self.graphs is None:
            return None
        if any(row.drafted for row in rows):
            return self.verify_graphs.run(rows)
        sorted_rows = StepRows.of(rows)
        return self.graphs.run(sorted_rows) if self.graphs.fits(sorted_rows) else None

    def logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Runs the forward of a step kernel by kernel: see `EagerSteps.logits`."""
        return self._eager.logits(rows)


def _is_drawn(row: Row) -> bool:
    """Whether a graph draws all that a row wants. Drafts want no more than their row where they are `DraftedAlike`."""
    how = row.sampling
    return how is None or (is_plain(how) and (not row.drafted or isinstance(row.drafted, DraftedAlike)))


def _parts(rows: Sequence[Row]) -> list[list[int]]:
    """Rows by replay: those with drafts, and whoever else decodes where that adds little to them; and the others."""
    drafted = [index for index, row in enumerate(rows) if row.drafted]
    if not drafted:
        return [list(range(len(rows)))]
    others = [index for index, row in enumerate(rows) if not row.drafted]
    plain = [index for index in others if is_decode(rows[index])]
    width = max(len(rows[index].token_ids) for index in drafted)
    if len(plain) <= len(drafted) or (len(plain) + len(drafted)) * width <= FREE_TOKENS:
        drafted += plain
        others = [index for index in others if not is_decode(rows[index])]
    return [drafted, others] if others else [sorted(drafted)]
