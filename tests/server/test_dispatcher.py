"""The dispatcher against scripted processes: what it sends, and what its callers see when things go right and wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import (
    Abort,
    Admitted,
    ChildState,
    Delta,
    Deltas,
    DetokenizerReset,
    Drain,
    EngineInput,
    EngineRequest,
    GenerationOptions,
    ImageInfo,
    ImagePart,
    Job,
    Look,
    Looked,
    Message,
    Prepared,
    Refused,
    Rejected,
    Reset,
    ResetDone,
    SamplingParams,
    Segmenting,
    TextOptions,
    TextPart,
    VideoPart,
)
from preprocess.wire.framing import job_of
from server.dispatcher import Dispatcher
from server.generation import Generation

PICTURE_BYTES = 1000
CLIP_BYTES = 8000
ARENA = 64 * 1024


class Scripted:
    """A dispatcher whose messages to other processes are kept, decoded, in `sent`."""

    def __init__(self, num_workers: int = 2, max_waiting: int = 4, max_waiting_bytes: int = 1 << 20) -> None:
        self.sent: list[tuple[str, Job | Look | EngineRequest | Abort | Reset]] = []
        self.dispatcher = Dispatcher(
            self._keep,
            num_workers=num_workers,
            arena_size=ARENA,
            pixel_bytes_per_image=PICTURE_BYTES,
            pixel_bytes_per_clip=CLIP_BYTES,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
        )

    def _keep(self, name: str, *frames: bytes) -> None:
        is_job = name.startswith("worker")
        message: Any = job_of(frames) if is_job else msgspec.msgpack.decode(frames[0], type=EngineInput)
        self.sent.append((name, message))

    def tell(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.dispatcher.receive(msgspec.msgpack.encode(message))

    def bring_up(self) -> None:
        for role in ("engine", "detokenizer"):
            self.tell(ChildState(role, 0, up=True))
        for index in range(len(self.dispatcher.state()) - 2):
            self.tell(ChildState("preprocess", index, up=True))
        self.answer_reset()

    def answer_reset(self) -> None:
        name, reset = self.sent.pop()
        assert name == "engine"
        assert isinstance(reset, Reset)
        self.tell(ResetDone(reset.epoch), DetokenizerReset(reset.epoch))

    def jobs(self) -> list[Job]:
        return [message for _, message in self.sent if isinstance(message, Job)]

    def requests(self) -> list[EngineRequest]:
        return [message for _, message in self.sent if isinstance(message, EngineRequest)]

    def aborted(self) -> list[str]:
        return [message.request_id for _, message in self.sent if isinstance(message, Abort)]

    def prepare(self, job: Job, arena_bytes: int = 500) -> None:
        self.tell(prepared(job, arena_bytes))

    def admit_all(self) -> None:
        for request in self.requests():
            self.tell(Admitted(request.request_id))


def prepared(job: Job, arena_bytes: int = 500) -> Prepared:
    request = EngineRequest(job.request_id, bytes(8 * 5), [], SamplingParams(4, seed=7), TextOptions(), job.arrival_s)
    return Prepared(job.request_id, request, [ImageInfo(2, 3, "00", 4)], arena_bytes, 1.0, 2.0)


def picture() -> list[Message]:
    return [Message("user", [ImagePart(data=b"x" * 100), TextPart("what is it?")])]


def submit(scripted: Scripted, n: int = 1) -> asyncio.Task[Generation]:
    return asyncio.ensure_future(scripted.dispatcher.submit(picture(), GenerationOptions(), n=n))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def started(scripted: Scripted, n: int = 1) -> Generation:
    task = submit(scripted, n)
    await settle()
    scripted.prepare(scripted.jobs()[-1])
    await settle()
    scripted.admit_all()
    return await task


def run(story: Callable[[Scripted], Awaitable[None]], **options: int) -> None:
    async def whole() -> None:
        scripted = Scripted(**options)
        scripted.bring_up()
        await story(scripted)
        assert scripted.dispatcher.num_open == 0
        assert scripted.dispatcher.arena_bytes_used == 0

    asyncio.run(whole())


def done(request_id: str, text: str = "") -> Deltas:
    return Deltas([Delta(request_id, text, [], finish_reason="stop")])


def test_deltas_reach_the_caller_and_the_lease_ends_with_the_request() -> None:
    async def story(scripted: Scripted) -> None:
        generation = await started(scripted)
        assert scripted.dispatcher.arena_bytes_used == 512  # shrunk to what was used, in whole lines of 64 bytes
        (request,) = scripted.requests()
        scripted.tell(Deltas([Delta(request.request_id, "a ", [5])]), done(request.request_id, "cat"))
        assert [(index, delta.text) async for index, delta in generation] == [(0, "a "), (0, "cat")]

    run(story)


def test_each_choice_has_its_own_seed_and_the_call_ends_with_the_last() -> None:
    async def story(scripted: Scripted) -> None:
        generation = await started(scripted, n=3)
        requests = scripted.requests()
        assert [request.sampling.seed for request in requests] == [7, 8, 9]
        for request in reversed(requests):
            scripted.tell(done(request.request_id))
        assert [index async for index, _ in generation] == [2, 1, 0]

    run(story)


def test_a_worker_holds_one_job_and_others_wait_in_order() -> None:
    async def story(scripted: Scripted) -> None:
        tasks = [submit(scripted) for _ in range(3)]
        await settle()
        assert [name for name, _ in scripted.sent] == ["worker-0", "worker-1"]
        first = scripted.jobs()[0]
        scripted.tell(Refused(first.request_id, "no", 400, "bad"))
        assert scripted.sent[-1][0] == "worker-0"
        for job in scripted.jobs()[1:]:
            scripted.tell(Refused(job.request_id, "no", 400, "bad"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["no"] * 3

    run(story)


def test_more_waiting_requests_than_allowed_are_refused_with_retry_after() -> None:
    async def story(scripted: Scripted) -> None:
        tasks = [submit(scripted) for _ in range(4)]
        await settle()
        with pytest.raises(ClientError) as caught:
            await scripted.dispatcher.submit(picture(), GenerationOptions())
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s is not None
        for task in tasks:
            task.cancel()
        await settle()
        for job in scripted.jobs():
            scripted.prepare(job)

    run(story, max_waiting=2)


def test_more_waiting_bytes_than_allowed_are_refused() -> None:
    async def story(scripted: Scripted) -> None:
        tasks = [submit(scripted) for _ in range(3)]
        await settle()
        with pytest.raises(ClientError, match="busy"):
            await scripted.dispatcher.submit(picture(), GenerationOptions())
        for task in tasks:
            task.cancel()
        await settle()
        for job in scripted.jobs():
            scripted.prepare(job)

    run(story, max_waiting_bytes=150)


@pytest.mark.parametrize("stage", ["waiting", "preparing", "admitting"])
def test_cancelling_a_submit_at_any_stage_leaves_nothing(stage: str) -> None:
    async def story(scripted: Scripted) -> None:
        blockers = [submit(scripted) for _ in range(2)] if stage == "waiting" else []
        await settle()
        task = submit(scripted)
        await settle()
        if stage == "admitting":
            scripted.prepare(scripted.jobs()[-1])
            await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for blocker in blockers:
            blocker.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)
        if stage == "admitting":
            (request,) = scripted.requests()
            assert scripted.aborted() == [request.request_id]
            assert scripted.dispatcher.arena_bytes_used  # the engine may still read it
            scripted.tell(Deltas([Delta(request.request_id, "", [], finish_reason="abort")]))
        else:
            for job in scripted.jobs():
                scripted.prepare(job)

    run(story)


def test_cancelling_a_generation_aborts_each_choice_once() -> None:
    async def story(scripted: Scripted) -> None:
        generation = await started(scripted, n=2)
        generation.cancel()
        generation.cancel()
        ids = [request.request_id for request in scripted.requests()]
        assert scripted.aborted() == ids
        scripted.tell(*[Deltas([Delta(i, "", [], finish_reason="abort")]) for i in ids])

    run(story)


def test_a_refusal_by_the_engine_is_the_callers_error_and_aborts_the_other_choices() -> None:
    async def story(scripted: Scripted) -> None:
        task = submit(scripted, n=2)
        await settle()
        scripted.prepare(scripted.jobs()[0])
        await settle()
        first, second = scripted.requests()
        scripted.tell(Admitted(first.request_id))
        scripted.tell(Rejected(second.request_id, "full", 429, "queue_full", retry_after_s=2.0))
        with pytest.raises(ClientError, match="full") as caught:
            await task
        assert caught.value.retry_after_s == 2.0
        assert scripted.aborted() == [first.request_id]
        scripted.tell(Deltas([Delta(first.request_id, "", [], finish_reason="abort")]))

    run(story)


def test_a_job_whose_worker_died_moves_to_another_once_and_is_then_refused() -> None:
    async def story(scripted: Scripted) -> None:
        task = submit(scripted)
        await settle()
        scripted.tell(ChildState("preprocess", 0, up=False, reason="signal SIGSEGV"))
        assert [name for name, _ in scripted.sent] == ["worker-0", "worker-1"]
        scripted.tell(ChildState("preprocess", 1, up=False, reason="signal SIGSEGV"))
        with pytest.raises(ClientError) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (422, "image_undecodable")

    run(story)


def test_a_job_that_overran_its_deadline_is_refused_at_once_and_the_next_goes_on() -> None:
    async def story(scripted: Scripted) -> None:
        slow, quick = submit(scripted), submit(scripted)
        await settle()
        scripted.tell(ChildState("preprocess", 0, up=False, reason="signal SIGALRM"))
        with pytest.raises(ClientError, match="too long") as caught:
            await slow
        assert caught.value.code == "image_timeout"
        scripted.tell(ChildState("preprocess", 0, up=True))
        assert scripted.jobs()[1].request_id
        scripted.tell(Refused(scripted.jobs()[1].request_id, "no", 400, "bad"))
        with pytest.raises(ClientError):
            await quick

    run(story, num_workers=1)


@pytest.mark.parametrize("role", ["engine", "detokenizer"])
def test_death_behind_a_stream_ends_it_with_an_error_and_service_returns(role: Any) -> None:
    async def story(scripted: Scripted) -> None:
        generation = await started(scripted)
        scripted.sent.clear()
        scripted.tell(ChildState(role, 0, up=False, reason="signal SIGKILL"))
        with pytest.raises(ServiceError, match=f"The {role} stopped"):
            async for _ in generation:
                pass
        assert not scripted.dispatcher.ready
        with pytest.raises(ServiceError, match="Not ready"):
            await scripted.dispatcher.submit(picture(), GenerationOptions())
        scripted.tell(ChildState(role, 0, up=True))
        assert not scripted.dispatcher.ready
        scripted.answer_reset()
        assert scripted.dispatcher.ready

    run(story)


def test_pixels_of_failed_requests_stay_leased_until_a_living_engine_has_reset() -> None:
    async def story(scripted: Scripted) -> None:
        await started(scripted)
        scripted.tell(ChildState("detokenizer", 0, up=False, reason="signal SIGKILL"))
        assert scripted.dispatcher.num_open == 0
        assert scripted.dispatcher.arena_bytes_used == 512
        scripted.tell(ChildState("detokenizer", 0, up=True))
        scripted.answer_reset()

    run(story)


def test_a_job_learns_how_long_a_context_the_engine_takes() -> None:
    async def story(scripted: Scripted) -> None:
        scripted.tell(ResetDone(scripted.dispatcher.epoch, max_context=777))
        task = submit(scripted)
        await settle()
        assert scripted.jobs()[-1].max_context == 777
        scripted.tell(Refused(scripted.jobs()[-1].request_id, "no", 400, "bad"))
        with pytest.raises(ClientError):
            await task

    run(story)


def test_no_job_leases_more_than_its_workers_share() -> None:
    """Bounds are far above what most pictures take; what does not fit travels inline."""

    async def story(scripted: Scripted) -> None:
        messages = [Message("user", [ImagePart(data=b"x")] * 60)]
        tasks = [asyncio.ensure_future(scripted.dispatcher.submit(messages, GenerationOptions())) for _ in range(2)]
        await settle()
        assert [job.lease.size for job in scripted.jobs()] == [ARENA // 2] * 2
        for job in scripted.jobs():
            scripted.tell(Refused(job.request_id, "no", 400, "bad"))
        for task in tasks:
            with pytest.raises(ClientError):
                await task

    run(story)


def test_a_full_arena_sends_jobs_without_a_lease() -> None:
    async def story(scripted: Scripted) -> None:
        blocker = scripted.dispatcher.leases.lease(ARENA)
        task = submit(scripted)
        await settle()
        assert scripted.jobs()[0].lease.size == 0
        scripted.tell(Refused(scripted.jobs()[0].request_id, "no", 400, "bad"))
        with pytest.raises(ClientError):
            await task
        scripted.dispatcher.leases.release(blocker)

    run(story)


def test_draining_refuses_new_requests_and_lets_running_ones_finish() -> None:
    async def story(scripted: Scripted) -> None:
        graces: list[float] = []
        scripted.dispatcher.on_drain = graces.append
        task = submit(scripted)
        await settle()
        scripted.tell(Drain(3.0))
        assert graces == [3.0]
        with pytest.raises(ServiceError, match="shutting down"):
            await scripted.dispatcher.submit(picture(), GenerationOptions())
        scripted.prepare(scripted.jobs()[0])
        await settle()
        scripted.admit_all()
        generation = await task
        scripted.tell(done(scripted.requests()[0].request_id, "a cat"))
        assert [delta.text async for _, delta in generation] == ["a cat"]

    run(story)


def test_messages_of_an_earlier_server_process_are_ignored() -> None:
    async def story(scripted: Scripted) -> None:
        stale = Job("stale-1", [], GenerationOptions(), scripted.dispatcher.leases.lease(0), 0.0)
        scripted.tell(prepared(stale), Admitted("stale-1.0"), done("stale-1.0"))
        scripted.tell(Rejected("stale-1.0", "full", 429, "queue_full"), Refused("stale-1", "no", 400, "bad"))

    run(story)


def test_an_answer_to_an_earlier_attempt_at_a_job_is_not_taken_for_the_present_one() -> None:
    """A worker may answer and die; its death may be heard first. Its pixels lie in a lease that has ended."""

    async def story(scripted: Scripted) -> None:
        task = submit(scripted)
        await settle()
        scripted.tell(ChildState("preprocess", 0, up=False, reason="signal SIGKILL"))
        first, second = scripted.jobs()
        scripted.prepare(first)
        await settle()
        assert not scripted.requests()
        scripted.prepare(second)
        await settle()
        scripted.admit_all()
        await task
        scripted.tell(done(scripted.requests()[0].request_id))

    run(story)


def test_jobs_and_resets_name_the_process_that_they_are_for() -> None:
    """What was sent to a process that died may reach the next one in its place, which must know."""

    async def story(scripted: Scripted) -> None:
        scripted.tell(ChildState("preprocess", 0, up=False), ChildState("preprocess", 0, up=True, generation=3))
        task = submit(scripted)
        await settle()
        (job,) = scripted.jobs()
        assert job.generation == 3
        scripted.tell(ChildState("engine", 0, up=False), ChildState("engine", 0, up=True, generation=5))
        reset = scripted.sent[-1][1]
        assert isinstance(reset, Reset)
        assert reset.generation == 5
        scripted.answer_reset()
        scripted.tell(Refused(job.request_id, "no", 400, "bad"))
        with pytest.raises(ClientError):
            await task

    run(story)


def test_encoded_pictures_are_let_go_once_they_are_prepared() -> None:
    async def story(scripted: Scripted) -> None:
        await started(scripted)
        kept = [call.job.messages for call in scripted.dispatcher._calls.values()]
        assert kept == [[]]
        scripted.tell(done(scripted.requests()[0].request_id))

    run(story)


def test_a_text_that_kills_its_worker_is_not_called_a_picture() -> None:
    async def story(scripted: Scripted) -> None:
        task = asyncio.ensure_future(
            scripted.dispatcher.submit([Message("user", [TextPart("x")])], GenerationOptions())
        )
        await settle()
        scripted.tell(ChildState("preprocess", 0, up=False, reason="signal SIGALRM"))
        with pytest.raises(ClientError, match="The text of this request") as caught:
            await task
        assert caught.value.status == 422

    run(story)


def test_an_answer_that_overtakes_its_admission_admits_the_request() -> None:
    """They come on different sockets: a short answer may be whole before the engine's `Admitted` is read."""

    async def story(scripted: Scripted) -> None:
        task = submit(scripted, n=2)
        await settle()
        scripted.prepare(scripted.jobs()[0])
        await settle()
        first, second = scripted.requests()
        scripted.tell(done(first.request_id, "a"), done(second.request_id, "b"))
        scripted.tell(Admitted(first.request_id), Admitted(second.request_id))
        generation = await asyncio.wait_for(task, 1)
        assert [(index, delta.text) async for index, delta in generation] == [(0, "a"), (1, "b")]

    run(story)


def test_a_look_goes_to_a_worker_and_nowhere_else() -> None:
    async def story(scripted: Scripted) -> None:
        asked = asyncio.ensure_future(scripted.dispatcher.look(b"frame", b"before"))
        await settle()
        ((name, look),) = scripted.sent
        assert name == "worker-0"
        assert isinstance(look, Look)
        assert (look.data, look.reference) == (b"frame", b"before")
        assert scripted.dispatcher.leases.used == 0
        scripted.tell(Looked(look.request_id, b"seen", 12.5))
        assert (await asked).change == 12.5

    run(story)


def test_a_look_that_nobody_waits_for_frees_its_worker() -> None:
    async def story(scripted: Scripted) -> None:
        def looks() -> list[Look]:
            return [message for _, message in scripted.sent if isinstance(message, Look)]

        first = asyncio.ensure_future(scripted.dispatcher.look(b"frame"))
        second = asyncio.ensure_future(scripted.dispatcher.look(b"frame"))
        await settle()
        first.cancel()
        await settle()
        scripted.tell(Looked(looks()[0].request_id, b"seen", None))
        assert len(looks()) == 2
        scripted.tell(Refused(looks()[1].request_id, "damaged", 400, "image_undecodable"))
        with pytest.raises(ClientError, match="damaged"):
            await second

    run(story, num_workers=1)


# ---- clips ----------------------------------------------------------------------------------------------------------

CLIP = [Message("user", [VideoPart(data=b"x" * 100), TextPart("what happens?")])]


def test_the_parts_of_a_clip_are_choices_with_requests_of_their_own() -> None:
    async def story(scripted: Scripted) -> None:
        task = asyncio.ensure_future(scripted.dispatcher.submit(CLIP, GenerationOptions(), segmenting=Segmenting(4.0)))
        await settle()
        [job] = scripted.jobs()
        assert job.segmenting == Segmenting(4.0)
        assert job.lease.size == CLIP_BYTES
        first = prepared(job)
        others = [msgspec.structs.replace(first.request, prompt_ids=bytes(8 * n)) for n in (6, 7)]
        scripted.tell(msgspec.structs.replace(first, further=others, segments=[(0, 4), (4, 8), (8, 9)]))
        await settle()
        assert [request.num_prompt_tokens for request in scripted.requests()] == [5, 6, 7]
        assert len({request.request_id for request in scripted.requests()}) == 3
        scripted.admit_all()
        generation = await task
        assert generation.segments == [(0, 4), (4, 8), (8, 9)]
        for request in scripted.requests():
            scripted.tell(done(request.request_id))
        assert [choice async for choice, _ in generation] == [0, 1, 2]

    run(story)


@pytest.mark.parametrize(
    ("reason", "code", "says"),
    [
        ("signal SIGALRM", "video_timeout", "A clip of this request took too long to decode; send it shorter"),
        ("signal SIGSEGV", "video_undecodable", "A clip of this request could not be decoded safely"),
    ],
)
def test_a_clip_that_kills_its_worker_is_called_a_clip(reason: str, code: str, says: str) -> None:
    async def story(scripted: Scripted) -> None:
        task = asyncio.ensure_future(scripted.dispatcher.submit(CLIP, GenerationOptions()))
        for index in range(2 if code == "video_undecodable" else 1):
            await settle()
            scripted.tell(ChildState("preprocess", index, up=False, reason=reason))
        with pytest.raises(ClientError) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (422, code)
        assert caught.value.message.startswith(says)

    run(story)


# ---- deltas that are taken where they come ---------------------------------------------------------------------------


class Taker:
    """What was taken of one generation, and by whom: `at_once` or by iterating."""

    def __init__(self, generation: Generation) -> None:
        self.at_once: list[str] = []
        self.all: list[str] = []
        self.is_willing = True
        self.pause = asyncio.Event()
        self.pause.set()
        generation.give_to(self._take)
        self.task = asyncio.ensure_future(self._iterate(generation))

    def _take(self, choice: int, delta: Delta) -> bool:
        if not self.is_willing:
            return False
        if delta.text == "broken":
            raise ValueError(delta.text)
        self.at_once.append(delta.text)
        self.all.append(delta.text)
        return True

    async def _iterate(self, generation: Generation) -> None:
        async for _, delta in generation:
            self.all.append(delta.text)
            await self.pause.wait()


async def several(scripted: Scripted, count: int) -> tuple[list[Taker], list[str]]:
    takers = []
    for _ in range(count):
        takers.append(Taker(await started(scripted)))
        await settle()
    return takers, [request.request_id for request in scripted.requests()]


def test_the_deltas_of_a_step_are_all_taken_before_the_message_is_done_with() -> None:
    async def story(scripted: Scripted) -> None:
        takers, ids = await several(scripted, 2)
        scripted.tell(Deltas([Delta(request_id, "a ", [5]) for request_id in ids]))
        assert [taker.at_once for taker in takers] == [["a "], ["a "]]
        for taker in takers:
            taker.is_willing = False
        scripted.tell(*map(done, ids))
        await asyncio.gather(*(taker.task for taker in takers))
        assert [taker.all for taker in takers] == [["a ", ""], ["a ", ""]]

    run(story)


def test_what_is_not_taken_is_overtaken_by_nothing() -> None:
    async def story(scripted: Scripted) -> None:
        (taker,), (request_id,) = await several(scripted, 1)

        def tell(text: str) -> None:
            scripted.tell(Deltas([Delta(request_id, text, [5])]))

        tell("at once ")
        taker.is_willing = False
        taker.pause.clear()
        tell("late ")
        taker.is_willing = True
        tell("behind it ")  # in the queue is one already
        await settle()
        tell("while that is under way ")
        await settle()
        taker.pause.set()
        await settle()
        tell("at once again")
        assert taker.all == ["at once ", "late ", "behind it ", "while that is under way ", "at once again"]
        assert taker.at_once == ["at once ", "at once again"]
        taker.is_willing = False
        scripted.tell(done(request_id))
        await taker.task

    run(story)


def test_a_delta_that_cannot_be_taken_ends_its_own_generation_alone() -> None:
    async def story(scripted: Scripted) -> None:
        (broken, other), ids = await several(scripted, 2)
        scripted.tell(Deltas([Delta(ids[0], "broken", [5]), Delta(ids[1], "a cat", [5])]))
        assert other.at_once == ["a cat"]
        with pytest.raises(ValueError, match="broken"):
            await broken.task
        other.is_willing = False
        scripted.tell(*map(done, ids))
        await other.task

    run(story)


# ---- what a request leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_leaves_no_garbage(leaves: bool) -> None:
    async def heard(generation: Generation) -> None:
        async for _ in generation:
            pass

    async def story(scripted: Scripted) -> None:
        generation = await started(scripted)
        left = weakref.ref(generation)
        hearing = asyncio.ensure_future(heard(generation))
        await settle()
        if leaves:
            hearing.cancel()
            generation.cancel()
        del generation
        scripted.tell(done(scripted.requests()[-1].request_id))
        await asyncio.wait([hearing])
        del hearing
        await settle()
        assert left() is None

    gc.disable()
    try:
        run(story)
    finally:
        gc.enable()
