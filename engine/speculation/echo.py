"""Drafts from what the same session answered before: a camera that sees the same scene says the same again.

    earlier answer   A  red  ball  on  a  green  table .  ⏹
    this answer      A  blue ball                          the word differs; what follows it there is guessed again
                             ▲ `at`: next guess

Where nothing tells which of several answers this one repeats, guesses end before a token that another place does not
say behind the same two tokens: there the answers' shape ends, and what fills it begins.

A session's newest answers are kept, at most `MAX_ANSWERS` of `MAX_TOKENS` tokens for `MAX_SESSIONS` sessions, the least
recently used forgotten first. Answers of no session share a place with those of the same grammar, whose shape repeats.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.speculation.continuations import BREAK, Continuations
from engine.speculation.drafting import Drafting, Kind, Proposal, agreement

if TYPE_CHECKING:
    from engine.sequence import Sequence

MAX_SESSIONS: Final = 256
MAX_ANSWERS: Final = 3
MAX_TOKENS: Final = 1024
QUESTION_TOKENS: Final = 24
"""Two prompts that end in so many equal text tokens ask the same."""
NEAR: Final = 8
"""After a word that differs, the earlier answer is searched so far ahead for it."""
FIRM: Final = 3
"""After so many equal tokens no other place is looked for."""
MAX_AGREED: Final = 8
"""Of so many answers it is known how far they said what the one before had said."""
PRIOR_ANSWERS: Final = 0.5
"""What is believed without them counts as much as so many."""
MAX_ASTRAY: Final = 4
"""After so many different tokens in a row nothing is guessed, until a longer piece is found again."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was said, its end id included, and the end of the text that asked for it."""

    question: tuple[int, ...]
    token_ids: tuple[int, ...]


class _Session:
    """Its newest answers, and how many tokens of each were those of the one that it was expected to repeat."""

    __slots__ = ("agreed", "answers")

    def __init__(self) -> None:
        self.answers: deque[_Answer] = deque(maxlen=MAX_ANSWERS)
        self.agreed: deque[int] = deque(maxlen=MAX_AGREED)

    def expected(self, question: Ordered[int]) -> list[_Answer]:
        """Its answers, the last of them the one that the next most probably repeats: the newest that answered the same
        question, else the newest.
        """
        return sorted(self.answers, key=lambda answer: answer.question == question)


class Echo:
    """See `Source`."""

    name = "echo"

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def resembles(self, sequence: Sequence) -> bool:
        """Whether this one's answer may well repeat one: its session has answered the same question, or it has none and
        others have answered in the same shape.
        """
        session = self._sessions.get(_key(sequence))
        if session is None or not sequence.request.session_id:
            return session is not None
        question = _question(sequence)
        return any(answer.question == question for answer in session.answers)

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        place = drafting.states.get(self.name)
        if place is None:
            known, at, is_firm = self.earlier(sequence)
            place = drafting.states[self.name] = _Place(known, at, is_firm=is_firm) if known else "nothing"
        if not isinstance(place, _Place):
            return None
        place.follow(sequence.output_ids)
        proposal = place.propose(sequence.output_ids, limit)
        if place.has_moved:
            drafting.acceptance.pop(Kind.ECHO, None)  # which was believed of another place
        return proposal

    def weighed(self, drafting: Drafting, proposed: list[Proposal]) -> list[Proposal]:
        """The same proposals, this source's the first of them if it has one, all others having been asked. Where an
        answer goes on as others in the same shape did is right by shape and wrong by contents: it is believed where
        somebody else says the same, and not where nobody does. The session's answers to the same question are trusted.
        """
        place = drafting.states.get(self.name)
        if not proposed or not isinstance(place, _Place) or place.is_trusted:
            return proposed
        own, *others = proposed
        if own.kind not in (Kind.ECHO, Kind.ECHO_ASTRAY):
            return proposed
        is_shared = any(other.token_ids[0] == own.token_ids[0] for other in others)
        return [Proposal(Kind.ECHO if is_shared else Kind.ECHO_ASTRAY, own.token_ids), *others]

    def earlier(self, sequence: Sequence) -> tuple[list[int], int, bool]:
        """Answers that this one's may repeat, a break behind each, and where the one that it most probably repeats
        begins; nothing where there are none. And whether it is that probable from the first: where the same session
        answered the same question.
        """
        session = self._sessions.get(_key(sequence))
        if session is None:
            return [], 0, False
        question = _question(sequence)
        known: list[int] = []
        ordered = session.expected(question)
        for answer in ordered:
            known += (*answer.token_ids, BREAK)
        is_firm = bool(sequence.request.session_id) and ordered[-1].question == question
        return known, len(known) - len(ordered[-1].token_ids) - 1, is_firm

    def survival(self, sequence: Sequence, prior: Ordered[float]) -> list[float]:
        """How probably each of the first tokens of the earlier answer is said again, and all before it: by the newest
        answers. `prior`: what is believed without them.
        """
        session = self._sessions.get(_key(sequence))
        agreed = () if session is None else session.agreed
        weight = len(agreed) + PRIOR_ANSWERS
        return [
            (sum(length >= count for length in agreed) + PRIOR_ANSWERS * right) / weight
            for count, right in enumerate(prior, start=1)
        ]

    def ended(self, sequence: Sequence) -> None:
        """Keep the answer for the session's next one."""
        key = _key(sequence)
        if not key or len(sequence.output_ids) < 2:
            return
        answer = _Answer(_question(sequence), tuple(sequence.output_ids[:MAX_TOKENS]))
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            session.agreed.append(agreement(answer.token_ids, session.expected(answer.question)[-1].token_ids))
        self._sessions.move_to_end(key)
        answers = session.answers
        if answer in answers:
            answers.remove(answer)
        answers.append(answer)


class _Place:
    """Where one answer is in the session's earlier ones, `at` in `known` at first."""

    def __init__(self, known: Ordered[int], at: int, *, is_firm: bool) -> None:
        self._known = Continuations()
        self._known.extend(known)
        self._at = at
        self._num_output = 0
        self._run = 0  # equal tokens up to here
        self._astray = 0  # different ones
        self._is_firm = is_firm
        self.is_trusted = is_firm
        self._doubtful = set() if is_firm else _doubtful(self._known.ids)
        self.has_moved = False
        """To another place, firmly, in the last call of `propose`."""

    def follow(self, output_ids: Ordered[int]) -> None:
        """Take what was said since."""
        known = self._known.ids
        for index in range(self._num_output, len(output_ids)):
            token_id = output_ids[index]
            if self._at < len(known) and known[self._at] == token_id:
                self._at += 1
                self._run += 1
                self._astray = 0
                continue
            self._is_firm = False
            self._run = 0
            self._astray += 1
            ahead = known[self._at : self._at + NEAR]
            if BREAK in ahead:
                ahead = ahead[: ahead.index(BREAK)]
            # Left out since, or else another word in the place of this one.
            self._at += ahead.index(token_id) + 1 if token_id in ahead else 1 if ahead else 0
        self._num_output = len(output_ids)
        self._is_firm = self._is_firm or self._run >= FIRM

    def propose(self, output_ids: Ordered[int], limit: int) -> Proposal | None:
        self.has_moved = False
        if not self._is_firm:
            match = self._known.find(output_ids[-16:])
            if match is not None and match.length > self._run:
                self.has_moved = match.length >= FIRM and self._at != match.at
                self._at, self._run, self._astray = match.at, match.length, 0
                self._is_firm = self._run >= FIRM
        if self._astray > MAX_ASTRAY:
            return None
        guesses = self._known.ids[self._at : self._at + limit]
        if BREAK in guesses:
            guesses = guesses[: guesses.index(BREAK)]
        if not guesses:
            return None
        places = range(self._at, self._at + len(guesses))
        sure = next((index for index, place in enumerate(places) if place in self._doubtful), len(guesses))
        if not sure and not self._is_firm:
            return None
        kind = Kind.ECHO if self._is_firm and sure else Kind.ECHO_ASTRAY
        return Proposal(kind, guesses[: max(sure, 1)])


def _doubtful(ids: Ordered[int]) -> set[int]:
    """Places where others go on otherwise behind the same two tokens."""
    places: dict[tuple[int, int], list[int]] = {}
    for place in range(2, len(ids)):
        if BREAK not in ids[place - 2 : place + 1]:
            places.setdefault((ids[place - 2], ids[place - 1]), []).append(place)
    several = (own for own in places.values() if len({ids[place] for place in own}) > 1)
    return {place for own in several for place in own}


def _key(sequence: Sequence) -> str:
    """Whose answers resemble this one's. Empty: nobody's."""
    request = sequence.request
    return f"session {request.session_id}" if request.session_id else request.sampling.grammar


def _question(sequence: Sequence) -> tuple[int, ...]:
    """The last text tokens of the prompt. They are asked for at the begin of an answer and at its end."""
    drafting = sequence.drafting
    if drafting is not None and drafting.question is not None:
        return drafting.question
    ids, keys = (own[-QUESTION_TOKENS:].tolist() for own in (sequence.prompt_ids, sequence.prompt_keys))
    question = tuple(token_id for token_id, key in zip(ids, keys, strict=True) if token_id == key)
    if drafting is not None:
        drafting.question = question
    return question
