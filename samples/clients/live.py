"""Captions of a camera or a clip as they come: python live.py SOURCE [question]     (pip install av pillow websockets)

SOURCE is a file, an RTSP or HTTP address, or a camera such as /dev/video0.
"""

import asyncio
import io
import json
import os
import struct
import sys

import av
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

URL = os.environ.get("BEHOLDER_URL", "http://127.0.0.1:8000").replace("http", "ws", 1) + "/v1/stream"
KEY = os.environ.get("BEHOLDER_KEY")
FPS = 5


def frames(source):
    """(seconds, JPEG) of every frame worth sending."""
    with av.open(source, format="v4l2" if source.startswith("/dev/") else None) as container:
        due = 0.0
        for frame in container.decode(video=0):
            if frame.time is None or frame.time >= due:
                due = (frame.time or due) + 1 / FPS
                picture, jpeg = frame.to_image(), io.BytesIO()
                picture.thumbnail((640, 640))
                picture.save(jpeg, "JPEG", quality=70)
                yield frame.time or due, jpeg.getvalue()


async def send(socket, source, question, told):
    """Send the source at its own pace, then say that it is over, when the server has nothing left to look at."""
    session = {"trigger": {"mode": "on_change"}, "max_tokens": 64}
    if question:
        session["prompt"] = question
    await socket.send(json.dumps({"type": "session.update", "session": session}))
    loop, pictures, first, sent = asyncio.get_running_loop(), frames(source), None, 0
    while (item := await asyncio.to_thread(next, pictures, None)) is not None:
        seconds, jpeg = item
        first = loop.time() - seconds if first is None else first
        await asyncio.sleep(first + seconds - loop.time())
        header = json.dumps({"k": "frame", "ts": seconds * 1000, "mime": "image/jpeg"}).encode()
        await socket.send(struct.pack(">H", len(header)) + header + jpeg)
        sent += 1
    while told.get("received", 0) < sent or told["pending"]:
        await asyncio.sleep(1 / FPS)
    await socket.send(json.dumps({"type": "session.close"}))


async def hear(socket, told):
    """Print what is said until the connection ends, and note what became of the frames."""
    async for message in socket:
        event = json.loads(message)
        if event["type"] == "response.output_text.delta":
            print(event["delta"], end="", flush=True)
        elif event["type"] == "response.done":
            print(f"   [{event['status']}, frame age {event['frame_age_ms'] or 0:.0f} ms]")
        elif event["type"] == "frames.stats":
            told.update(event)
        if event.get("error"):
            print(event["error"]["message"], file=sys.stderr)


async def main(source, question=None):
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    async with connect(URL, subprotocols=["vlm.stream.v1"], additional_headers=headers) as socket:
        told = {}
        hearing = asyncio.create_task(hear(socket, told))
        sending = asyncio.create_task(send(socket, source, question, told))
        try:
            await asyncio.wait([hearing, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not isinstance(sending.exception(), ConnectionClosed):
                sending.result()  # raises what made it fail, such as a camera that is not there
            await hearing
        finally:
            hearing.cancel()
            sending.cancel()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except ConnectionClosed as closed:
        sys.exit(f"closed: {closed}")
    except (OSError, av.FFmpegError) as error:  # of the source, or of a server that is not there
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        pass
