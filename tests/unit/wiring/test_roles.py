"""How role processes end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from turnmill.config import Config, to_dict
from turnmill.wiring import variables


def test_a_worker_that_somebody_tells_to_stop_does_not_look_as_if_it_were_done(tmp_path: Path) -> None:
    """With exit code 0 the launcher would not start it again, and the run would wait for it for ever."""
    environment = {
        **os.environ,
        variables.WORKER_TOKEN: "token",
        # Nobody listens there, so that the worker is about to lease when the signal comes.
        variables.PROXY_URL: "http://127.0.0.1:9",
        variables.WORKER_CONFIG: json.dumps(to_dict(Config())),
    }
    command = [sys.executable, "-m", "turnmill", "role", "worker", "--root", str(tmp_path), "--run", "r", "--name", "w"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert "no answer from the proxy" in worker.stderr.readline()
        worker.send_signal(signal.SIGTERM)
        log = worker.stderr.read()
    assert worker.returncode == 128 + signal.SIGTERM, log
    assert "worker stopped" in log and "Traceback" not in log
