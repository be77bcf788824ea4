"""What the launcher announces is true at that instant: the server knows of every process and gives it work."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from serving import READY, Served

LATE_SERVER = """
shift
export WITHHELD='{withheld}' PYTHONPATH='{folder}':"$PYTHONPATH"
exec '{python}' -c '
from server import child_process, cli
child_process.MODULES = {{**child_process.MODULES, "server": "late_server"}}
cli.main()
' "$@"
"""


def test_ready_and_up_again_are_said_only_when_the_server_gives_work_to_all(tiny_model: Path, tmp_path: Path) -> None:
    withheld = tmp_path / "withheld"
    withheld.touch()
    shell = LATE_SERVER.format(python=sys.executable, withheld=withheld, folder=Path(__file__).parent)
    with Served(tiny_model, wait=False, shell=shell, workers=2, threads=1) as served:
        served.wait_for(lambda: len(withheld.read_text().split()) == 4)  # the launcher has heard all of them
        served.connect(served.listening_url())
        assert served.client.get("/ready").status_code == 503
        assert not READY.search(served.text())
        withheld.unlink()
        served.wait_for(lambda: READY.search(served.text()))
        everything = dict.fromkeys(["engine", "detokenizer", "preprocess-0", "preprocess-1"], "up")
        assert served.client.get("/ready").json() == {"status": "ready", "children": everything}

        for role in ("engine", "detokenizer", "preprocess"):
            withheld.touch()
            os.kill(served.pids(role)[0], signal.SIGKILL)
            served.wait_for(lambda: withheld.read_text().split())  # the new one is ready, as the launcher knows
            assert served.client.get("/health").status_code == 200
            (name,) = re.findall(rf"the ({role}.*) process died", served.text())
            assert f"the {name} process is up again" not in served.text()
            withheld.unlink()
            served.wait_for_line(f"the {name} process is up again")
            assert served.client.get("/ready").json() == {"status": "ready", "children": everything}
