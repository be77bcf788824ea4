"""Process: the detokenizer. Turns the engine's token ids into text deltas for the server, and finds stop strings."""

from __future__ import annotations

import msgspec

from preprocess.child import Child
from preprocess.config import PreprocessConfig
from preprocess.detokenise import Detokenizer
from preprocess.errors import BeholderError
from preprocess.wire import Deltas, DetokenizerInput, DetokenizerReset, OutputStart, ResetDone


def main() -> None:
    """Serve token events until the launcher ends this process."""
    child = Child.from_stdin()
    try:
        detokenizer = Detokenizer(child.config(PreprocessConfig).model)
    except BeholderError as error:
        child.fail(error.message)
    except Exception as error:
        child.fail_unforeseen(error)
    inbox = child.bind("detokenizer")
    to_server = child.connect("server")
    to_engine = child.connect("engine")
    decoder: msgspec.msgpack.Decoder[DetokenizerInput] = msgspec.msgpack.Decoder(DetokenizerInput)
    encoder = msgspec.msgpack.Encoder()
    child.ready()
    while True:
        message = decoder.decode(child.receive(inbox))
        if isinstance(message, OutputStart):
            detokenizer.start(message)
        elif isinstance(message, ResetDone):
            detokenizer.reset()
            to_server.send(encoder.encode(DetokenizerReset(message.epoch)))
        else:
            deltas, stops = detokenizer.feed(message)
            for stop in stops:
                to_engine.send(encoder.encode(stop))
            if deltas:
                to_server.send(encoder.encode(Deltas(deltas)))


if __name__ == "__main__":
    main()
