"""Process: one preprocess worker. Takes one job at a time from the server and answers it.

A picture that overruns the deadline or crashes a decoder ends this process, on purpose: nothing else of the service is
in it. The kernel's timer does that even while C code holds the interpreter; the launcher starts a new worker, and the
server refuses the picture and gives the other jobs to other workers.
"""

from __future__ import annotations

import io
import logging
import resource
import signal
import time
from pathlib import Path

import msgspec
from PIL import Image

from preprocess.arena import Arena
from preprocess.child import Child
from preprocess.config import PreprocessConfig
from preprocess.errors import BeholderError, ModelError
from preprocess.prepare import Preparer
from preprocess.video import load_decoders
from preprocess.wire import (
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    Look,
    Message,
    Refused,
    TextPart,
    WorkerInput,
    WorkerReply,
)
from preprocess.wire.framing import job_of


def main() -> None:
    """Serve jobs until the launcher ends this process."""
    child = Child.from_stdin()
    config = child.config(PreprocessConfig)
    arena = Arena.attach(child.boot.arena_fd, child.boot.arena_size)
    try:
        preparer = Preparer(config, arena)
        _warm_up(preparer)
    except BeholderError as error:
        child.fail(error.message)
    except Exception as error:
        child.fail_unforeseen(error)
    inbox = child.bind(f"worker-{child.boot.index}")
    outbox = child.connect("server")
    encoder = msgspec.msgpack.Encoder()
    limits = config.limits
    _limit_memory(limits.memory_bytes)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # its remarks on hostile files are not for our log
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    child.ready()
    while True:
        job = job_of(child.receive_frames(inbox))
        if job.generation != child.boot.generation:
            continue
        signal.setitimer(signal.ITIMER_REAL, limits.deadline_s)
        reply = _answer(preparer, job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        outbox.send(encoder.encode(reply))


def _answer(preparer: Preparer, job: WorkerInput) -> WorkerReply:
    if isinstance(job, Job):
        return preparer.prepare(job)
    return preparer.look(job) if isinstance(job, Look) else preparer.preview(job)


def _warm_up(preparer: Preparer) -> None:
    """Prepare nobody's picture, so that no request pays for the first use of a codec and the template.

    Raises `ModelError` when that fails, since every request would.
    """
    load_decoders()
    for format_name in ("JPEG", "PNG"):
        encoded = io.BytesIO()
        Image.new("RGB", (64, 48)).save(encoded, format_name)
        messages = [Message("user", [ImagePart(data=encoded.getvalue()), TextPart("?")])]
        reply = preparer.prepare(Job("warm-up", messages, GenerationOptions(max_tokens=1), Lease(), time.monotonic()))
        if isinstance(reply, Refused) and reply.status >= 500:
            raise ModelError(f"the model folder cannot be used: {reply.message}")


def _limit_memory(added_bytes: int) -> None:
    """Let this process map `added_bytes` more than it maps now (Linux; elsewhere there is no such limit)."""
    status = Path("/proc/self/statm")
    if added_bytes and status.exists():
        mapped = int(status.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + added_bytes, hard))


if __name__ == "__main__":
    main()
