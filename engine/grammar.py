"""Keeps answers inside their grammars: compiles beside the engine's loop, computes masks while the model runs.

    submit ─▶ Grammars.begin ─▶ GrammarState, compiled on a thread; the scheduler lets it in once it is ready
    step:     Grammars.masks(states) starts ─▶ the model runs ─▶ sampling waits for the masks ─▶ state.accept(token)

llguidance does the parsing; it lets go of Python's lock meanwhile. Special tokens never pass, whatever a grammar says,
but for the ids that end an answer, and those only where the grammar may end.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import cached_property
from typing import Final, overload

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from preprocess.errors import BeholderError, ClientError
from preprocess.families import load_family
from preprocess.grammar import LIMITS
from preprocess.model_folder import ModelFolder
from preprocess.tokenizer import load_tokenizer

Words = NDArray[np.int32]

MAX_KNOWN: Final = 16
"""Compiled grammars that are kept for the next request with the same one."""
PATIENCE_S: Final = 0.25
"""Processor time that a grammar's masks may take beyond `FREE_S` a token; what takes more is ended, for the others'
sake. Ordinary schemas take a tenth of `FREE_S`.
"""
FREE_S: Final = 0.002

logger = logging.getLogger("beholder.engine")


class Vocabulary:
    """The model's tokens, as the library wants them.

    Attributes:
        tokenizer: The library's own form of it.
        end_ids: Ids that end an answer.
        never: Bits of the ids that no grammar lets through.
    """

    def __init__(self, folder: ModelFolder, vocab_size: int) -> None:
        tokenizer = load_tokenizer(folder)
        end_ids = list(folder.eos_ids)
        own: int | None = tokenizer.token_to_id(folder.named_tokens.get("eos_token", ""))
        if own is not None and own not in end_ids:
            end_ids.append(own)
        self.end_ids = end_ids
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self.tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=end_ids)
        protected = {load_family(folder).image_token_id}
        spelled = load_family(folder).protected_tokens()
        for token_id, token in tokenizer.get_added_tokens_decoder().items():
            if token.special or token.content in spelled:
                protected.add(token_id)
        self.never = bits_of(protected - set(end_ids), -(-size // 32))


class GrammarState:
    """One sequence's place in its grammar. Invariant: it has accepted exactly the sequence's output ids.

    Attributes:
        text: The grammar.
        token_ids: What it has accepted.
        failure: Why the sequence cannot go on, if it cannot.
        cost_s: Processor time that its masks took, beyond what every token may.
        right_masks: Which of the last step's masks are right; tokens drawn under others mean nothing.
    """

    def __init__(self, text: str, compiled: Future[LLMatcher | None]) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.failure: BeholderError | None = None
        self.cost_s = 0.0
        self.right_masks = [True]
        self.compiled = compiled
        self._matcher: LLMatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled, or has failed to."""
        return self.compiled.done()

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow: the answer is complete."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> bool:
        """The sequence's next token. False: the sequence has failed, see `failure`."""
        if self.failure is None:
            matcher = self.matcher()
            if matcher is None or not matcher.consume_token(token_id):
                self.fail("not compiled" if matcher is None else matcher.get_error())
        self.token_ids.append(token_id)
        return self.failure is None

    def matcher(self) -> LLMatcher | None:
        """Where the library is in the grammar; None when it could not compile it."""
        if self._matcher is None:
            compiled = self.compiled.result()
            self._matcher = None if compiled is None else compiled.deep_copy()
        return self._matcher

    def forced_tokens(self) -> list[int]:
        """What the grammar leaves no choice about next, as the tokenizer would spell it. Call between steps only."""
        matcher = self.matcher()
        if self.failure is not None or matcher is None or matcher.is_stopped():
            return []
        return list(matcher.compute_ff_tokens())

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens may come next, one after the other. Call between steps only."""
        matcher = self.matcher()
        if self.failure is not None or matcher is None or matcher.is_stopped():
            return 0
        allowed: int = matcher.validate_tokens(token_ids if isinstance(token_ids, list) else list(token_ids))
        return allowed

    def start_over(self, matcher: LLMatcher | None) -> None:
        """Go on with a fresh matcher, from the same place."""
        self._matcher = matcher
        if matcher is not None:
            matcher.consume_tokens(self.token_ids)

    def fail(self, complaint: str) -> None:
        """The sequence cannot go on."""
        logger.warning("a grammar cannot go on after %d tokens: %s", len(self.token_ids), complaint[:200])
        self.failure = ClientError(
            "The answer cannot go on in the shape that was asked for: from here its grammar is too complex, or leads "
            "nowhere. Simplify the schema or grammar.",
            code="grammar_failed",
        )


@dataclass(frozen=True, slots=True)
class RowMask:
    """One row of a step's masks: see `engine.batch.TokenMask`."""

    step: Future[Words]
    row: int

    def words(self) -> Words:
        """Waits until the step's masks are known."""
        words: Words = self.step.result()[self.row]
        return words


class RowMasks(Sequence[RowMask]):
    """The masks of one row of a step: of its next token, and of that after each draft."""

    __slots__ = ("_first", "_num", "_step")

    def __init__(self, step: Future[Words], first: int, num: int) -> None:
        self._step, self._first, self._num = step, first, num

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> RowMask: ...

    @overload
    def __getitem__(self, index: slice) -> list[RowMask]: ...

    def __getitem__(self, index: int | slice) -> RowMask | list[RowMask]:
        rows = range(self._first, self._first + self._num)[index]
        return RowMask(self._step, rows) if isinstance(rows, int) else [RowMask(self._step, row) for row in rows]

    def words(self) -> Words:
        """(masks, words), as of each `RowMask`. Waits until they are known."""
        words: Words = self._step.result()[self._first : self._first + self._num]
        return words


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row that needs a mask, and one more after each of its `drafts` (`parents`: see `engine.speculation.tree`). Ends
    that are no `stop_token_ids`, or come among the next `num_early` tokens, pass only where nothing else can.
    """

    state: GrammarState
    stop_token_ids: Sequence[int]
    num_early: int
    drafts: Sequence[int] = ()
    parents: Sequence[int] | None = None


class Grammars:
    """All grammars of one engine. Its threads start with the first grammar.

    Args:
        model: The model folder, read when the first grammar comes or at `warm_up`.
        vocab_size: Width of the logits.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._known: OrderedDict[str, Future[LLMatcher | None]] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Loaded once; takes milliseconds for a small vocabulary, a second for a large one."""
        return Vocabulary(ModelFolder(self._model), self._vocab_size)

    def warm_up(self) -> None:
        """Load what the first request with a grammar would wait for."""
        self.load_ahead().matcher()

    def load_ahead(self) -> GrammarState:
        """The same without waiting for it."""
        return self.begin('start: "a"')

    def begin(self, text: str) -> GrammarState:
        """A state at the start of a grammar."""
        compiled = self._known.get(text)
        if compiled is None:
            compiled = self._known[text] = self._compilers.submit(self._compile, text)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        return GrammarState(text, compiled)

    def masks(self, wanted: Sequence[Wanted]) -> list[RowMasks]:
        """Start computing masks: for each row one, and one more for each draft."""
        step = self._maskers.submit(self._fill, list(wanted))
        counts = [1 + len(item.drafts) for item in wanted]
        ends = itertools.accumulate(counts)
        return [RowMasks(step, end - count, count) for count, end in zip(counts, ends, strict=True)]

    def wait(self, states: Iterable[GrammarState], timeout_s: float) -> None:
        """Wait until one of them is ready."""
        wait_for([state.compiled for state in states], timeout_s, return_when="FIRST_COMPLETED")

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-compiler")

    @cached_property
    def _maskers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-masks")

    def _compile(self, text: str) -> LLMatcher | None:
        """None, and a line in the log, when the library cannot read the model's vocabulary."""
        try:
            return LLMatcher(self.vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
        except Exception:
            logger.exception("the vocabulary of %s cannot be used for grammars", self._model)
            return None

    def _fill(self, wanted: Sequence[Wanted]) -> Words:
        """int32 (masks, words). A row that fails lets everything through: its token is refused in `accept`."""
        num_masks = sum(1 + len(item.drafts) for item in wanted)
        words = np.zeros((num_masks, -(-self._vocab_size // 32)), np.int32)
        if all(item.state.matcher() is not None for item in wanted):
            words = np.zeros((num_masks, len(self.vocabulary.never)), np.int32)
        first = 0
        for item in wanted:
            started_s = time.thread_time()
            own = words[first : first + 1 + len(item.drafts)]
            first += len(own)
            self._fill_row(own[0], item)
            item.state.right_masks = [True, *self._fill_drafts(own[1:], item)]
            free_s = FREE_S * sum(item.state.right_masks)
            item.state.cost_s = max(item.state.cost_s + time.thread_time() - started_s - free_s, 0.0)
            if item.state.cost_s > PATIENCE_S and item.state.failure is None:
                item.state.fail("its masks take too long")
        return words

    def _fill_drafts(self, rows: Words, wanted: Wanted) -> list[bool]:
        """Masks (drafts, words) for what follows each draft, as far as the grammar allows the drafts and goes on behind
        them; says which are right. The matcher ends where it was.
        """
        right = [False] * len(rows)
        matcher = wanted.state.matcher()
        if not right or matcher is None or wanted.state.failure is not None:
            return right
        parents = wanted.parents or range(len(rows))
        lead: list[int] = []  # the drafts that the matcher has consumed, by their numbers among the row's tokens
        for index, (row, draft, parent) in enumerate(zip(rows, wanted.drafts, parents, strict=True)):
            if parent and not right[parent - 1]:
                continue
            if not self._go_to(matcher, lead, parent, wanted) or matcher.is_stopped():
                break
            if not matcher.try_consume_tokens([draft]):
                continue
            lead.append(index + 1)
            if matcher.is_stopped():
                continue
            if self._mask(row, matcher):
                break
            self._prefer_going_on(row, wanted, len(lead))
            right[index] = True
        rows[~np.array(right)] = -1
        if lead and not matcher.rollback(len(lead)):
            wanted.state.start_over(self._compile(wanted.state.text))
        return right

    def _go_to(self, matcher: LLMatcher, lead: list[int], node: int, wanted: Wanted) -> bool:
        """Move the matcher from behind the drafts `lead` to behind draft `node` of a tree, and `lead` with it."""
        way: list[int] = []
        while node and node not in lead:
            way.append(node)
            node = 0 if wanted.parents is None else wanted.parents[node - 1]
        kept = lead.index(node) + 1 if node else 0
        if len(lead) > kept and not matcher.rollback(len(lead) - kept):
            return False
        del lead[kept:]
        for node in reversed(way):
            if not matcher.try_consume_tokens([wanted.drafts[node - 1]]):
                return False
            lead.append(node)
        return True

    def _fill_row(self, row: Words, wanted: Wanted) -> None:
        state = wanted.state
        if state.failure is None:
            complaint = self._mask(row, state.matcher())
            if complaint:  # copies share what a grammar has learnt, and its limits: start over once
                self._known.pop(state.text, None)
                state.start_over(self._compile(state.text))
                complaint = self._mask(row, state.matcher())
            if complaint:
                state.fail(complaint)
        if state.failure is not None:
            row.fill(-1)
            return
        self._prefer_going_on(row, wanted, 0)

    def _prefer_going_on(self, row: Words, wanted: Wanted, index: int) -> None:
        """Take ends that are not wanted at the `index`-th next token out of a mask, unless nothing would be left."""
        is_early = index < wanted.num_early
        unwelcome = [
            token_id for token_id in self.vocabulary.end_ids if is_early or token_id not in wanted.stop_token_ids
        ]
        if unwelcome:
            going_on = row & ~bits_of(unwelcome, len(row))
            if going_on.any():
                row[:] = going_on

    def _mask(self, row: Words, matcher: LLMatcher | None) -> str:
        """The matcher's mask in `row`; a complaint when there is none."""
        if matcher is None:
            return "not compiled"
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            return matcher.get_error() or "an unknown fault"
        row &= ~self.vocabulary.never
        return "" if row.any() else "no token is possible"


def bits_of(ids: Iterable[int], num_words: int) -> Words:
    """int32 (num_words,) with the bits of some ids set; ids beyond are left out."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[[token_id for token_id in ids if token_id < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
