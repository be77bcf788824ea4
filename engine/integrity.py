"""Proof that what sequences hold is owned exactly once, between steps: in tests, and wherever `check` is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.intake import Intake
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State


def check(sequences: Collection[Sequence], scheduler: Scheduler, intake: Intake, in_flight: Mapping[int, int]) -> None:
    """Every slot, row, picture and id.

    Args:
        sequences: Which are being served.
        scheduler: Who owns them, and what they hold.
        intake: Who owns the ids of their pictures.
        in_flight: By serial number, how many drafts of a sequence the step in flight checks.

    Raises:
        AssertionError: Something is owned twice, or by nobody.
    """
    running, waiting = scheduler.running, list(scheduler.waiting)
    live = [*running, *waiting]
    shaped = [sequence for sequence in live if sequence.grammar is not None]
    assert all(other.grammar.token_ids == other.output_ids for other in shaped if other.grammar is not None)
    assert {id(sequence) for sequence in live} == {id(sequence) for sequence in sequences}
    assert len(live) == len(sequences), "a sequence that both waits and runs"
    assert all(sequence.state is State.RUNNING and sequence.hold is not None for sequence in running)
    assert all(sequence.state is State.WAITING and sequence.hold is None for sequence in waiting)
    assert scheduler.waiting.num_tokens == sum(sequence.num_prompt_tokens for sequence in waiting)
    for sequence in running:
        assert sequence.hold is not None
        assert sequence.hold.num_slots == sequence.num_computed + in_flight.get(sequence.serial, 0)
    scheduler.kv.check([sequence.hold for sequence in running if sequence.hold is not None])
    pictures = [(sequence, picture) for sequence in live for picture in sequence.pictures]
    scheduler.vision.check((picture.key, (owner.serial, picture.index)) for owner, picture in pictures if picture.held)
    pins: dict[tuple[bytes, int], int] = {}
    for _, picture in pictures:
        key = (picture.digest, picture.num_tokens)
        pins[key] = pins.get(key, 0) + 1
    intake.vision_ids.check(pins)
