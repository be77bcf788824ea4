"""The engine over a runner that hashes: the same tokens as alone and uncached, and nothing left behind."""

from engine.config import EngineConfig
from engine.core import Engine
from preprocess.wire import Admitted, TokenEvents
from tests.engine.fake_runner import FakeRunner, load, picture, reference, request


def test_a_batch_with_shared_prefix_and_pictures_says_what_each_says_alone() -> None:
    engine = Engine(EngineConfig(model="", check=True, max_batched_tokens=7), FakeRunner())
    requests = [request(f"r{i}", [1, 2, 3, 4, *[0] * 5, i], [picture(4, 5, i % 2)], max_tokens=9) for i in range(5)]
    for wanted in requests:
        assert isinstance(engine.submit(wanted, load), Admitted)
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, TokenEvents):
                for event in message.events:
                    outputs.setdefault(event.request_id, []).extend(event.token_ids)
    assert outputs == {wanted.request_id: reference(wanted)[0] for wanted in requests}
