"""The mailbox alone: with `latest`, nothing older than the newest accepted frame may wait, even once that is gone."""

from __future__ import annotations

from server.stream.mailbox import Frame, Mailbox


def frame(number: int) -> Frame:
    return Frame(number, b"frame", 0.0, 0.0)


def test_a_change_to_latest_drops_older_frames_even_when_the_newest_is_gone() -> None:
    mailbox = Mailbox(max_queue=4, latest_only=False)
    first, second = frame(1), frame(2)
    mailbox.put(first)
    mailbox.put(second)
    mailbox.take_this(second)
    mailbox.drop(second, "cancelled")
    mailbox.keep_latest_only(True)
    assert mailbox.take() is None
    assert mailbox.dropped["replaced"] == 1
    mailbox.check()


def test_a_change_to_latest_keeps_the_newest() -> None:
    mailbox = Mailbox(max_queue=4, latest_only=False)
    frames = [frame(number) for number in range(3)]
    for one in frames:
        mailbox.put(one)
    mailbox.keep_latest_only(True)
    assert mailbox.take() is frames[2]
    mailbox.check()


def test_a_frame_put_back_gives_way_to_a_newer_one_that_was_taken_meanwhile() -> None:
    mailbox = Mailbox(max_queue=4)
    first, second = frame(1), frame(2)
    mailbox.put(first)
    assert mailbox.take() is first
    mailbox.put(second)
    assert mailbox.take() is second
    mailbox.put_back(first)
    assert not mailbox.waiting
    mailbox.put_back(second)
    assert mailbox.take() is second
    mailbox.check()
