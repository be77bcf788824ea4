"""What the launcher announces is true at that instant: the server knows of every process and gives it work."""

from __future__ import annotations

import re
from pathlib import Path

from serving import READY, Served


def test_ready_and_up_again_are_said_only_when_the_server_gives_work_to_all(tiny_model: Path) -> None:
    with Served(tiny_model, wait=False, held=True, hold="news", workers=2, threads=1) as served:
        withheld = served.hold("news")  # as it is
        served.wait_for(lambda: len(withheld.read_text().split()) == 4)  # the launcher has heard all of them
        served.connect(served.listening_url())
        assert served.client.get("/ready").status_code == 503
        assert not READY.search(served.text())
        served.release("news")
        served.wait_for(lambda: READY.search(served.text()))
        everything = dict.fromkeys(["engine", "detokenizer", "preprocess-0", "preprocess-1"], "up")
        assert served.client.get("/ready").json() == {"status": "ready", "children": everything}

        for role in ("engine", "detokenizer", "preprocess"):
            served.hold("news")
            served.kill(role)
            served.wait_for(lambda: withheld.read_text().split())  # the new one is ready, as the launcher knows
            assert served.client.get("/health").status_code == 200
            (name,) = re.findall(rf"the ({role}.*) process died", served.text())
            assert f"the {name} process is up again" not in served.text()
            served.release("news")
            served.wait_until_back(role)
            assert served.client.get("/ready").json() == {"status": "ready", "children": everything}
