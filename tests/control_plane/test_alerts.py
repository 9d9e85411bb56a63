"""What goes wrong in real runs, as a receiver hears of it that checks the signature."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import start_up
from tests.e2e.processes import PATIENCE_S, Running, start_resume, start_run, wait_for
from tests.e2e.webhooks import webhook
from turnmill.backends.embedded import open_run
from turnmill.ports import Message

Told = list[dict[str, Any]]
# No trainer agrees with a sampler so closely: the first step is refused.
NO_TOLERANCE = "1e-15"


def of_kind(told: Told, kind: str, event: str = "trigger") -> Told:
    return [item["alert"] for item in told if (item["alert"]["kind"], item["event"]) == (kind, event)]


def _is_another(running: Running, name: str, gone: int) -> bool:
    return running.role_pid(name) not in (None, gone)


def check_once(told: Told) -> None:
    """Nothing came twice."""
    counts = Counter((item["event"], item["alert"]["alert_id"]) for item in told)
    assert set(counts.values()) <= {1}, counts


def check_command(alert: dict[str, Any]) -> None:
    """What to run next can be pasted into a shell, and works."""
    program, *arguments = shlex.split(alert["command"])
    assert program == "turnmill"
    done = subprocess.run([sys.executable, "-m", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{alert['command']}: {done.stderr}"


def poison(running: Running) -> None:
    """A message that no replica can read."""
    assert running.folder is not None
    ports = open_run(running.root, running.folder.name, num_replicas=1)

    async def send() -> None:
        await ports.generate_request[0].send([Message(body=b"\xff", group="poison", dedup_id=None)])

    try:
        asyncio.run(send())
    finally:
        ports.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_crash_loop_and_dead_letters_are_told_of_while_the_run_goes_on_and_over_when_it_is(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Defect 25: the death of a worker and dead letters raise no alarm."""
    root = tmp_path / "a root"
    with webhook(root) as told:
        with start_run(root, max_steps="500") as running:
            wait_for("first step", running.num_steps, running.process)
            poison(running)
            for _ in range(3):
                killed = running.kill("worker-0")
                wait_for("another", partial(_is_another, running, "worker-0", killed), running.process)
            looping_at = time.monotonic()
            wait_for("the crash loop", lambda: of_kind(told, "crash_loop"), running.process)
            record_property("figure", f"crash loop received after {time.monotonic() - looping_at:.1f} s")
            wait_for("dead letters", lambda: of_kind(told, "dead_letters_growing"), running.process)
            assert [item for item in told if item["event"] == "resolve"] == []
            running.process.send_signal(signal.SIGINT)
            running.process.communicate(timeout=PATIENCE_S)
        (loop,), (letters,) = of_kind(told, "crash_loop"), of_kind(told, "dead_letters_growing")
        assert loop["stage"] == "worker-0" and "3 restarts" in loop["summary"] and "exit code -9" in loop["error"]
        assert loop["log_lines"] and "worker-0 died with exit code -9" in "".join(loop["log_lines"])
        assert "1 in queue generate_request-0" in letters["summary"] and "'poison'" in letters["error"]
        for alert in (loop, letters):
            check_command(alert)
        resolved = {item["alert"]["alert_id"] for item in told if item["event"] == "resolve"}
        assert resolved == {loop["alert_id"], letters["alert_id"]}
        assert of_kind(told, "run_failed") == [], "it was cancelled"
        check_once(told)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_stage_is_told_of_and_over_when_it_ends(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with webhook(root) as told:
        with start_run(root, max_steps="1") as running:
            worker = wait_for("the worker", lambda: running.role_pid("worker-0"), running.process)
            os.kill(worker, signal.SIGSTOP)
            try:
                (slow,) = wait_for("the alert", lambda: of_kind(told, "stage_slow"), running.process)
            finally:
                os.kill(worker, signal.SIGCONT)
            figures = running.finish()
        assert figures["status"] == "succeeded"
        assert slow["stage"] == "StartRewardWorkers" and "10 s are expected" in slow["summary"]
        check_command(slow)
        assert [alert["alert_id"] for alert in of_kind(told, "stage_slow", "resolve")] == [slow["alert_id"]]
        check_once(told)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_failed_in_the_foreground_is_told_of_by_whoever_delivers(tmp_path: Path) -> None:
    """Defect 24: alerts that can not be delivered."""
    root = tmp_path / "root"
    with webhook(root) as told:
        with start_up(root) as up:
            wait_for("the folder", (root / "bucket" / "training-data").is_dir, up.process)
            with start_run(root, audit_mean_tolerance=NO_TOLERANCE, audit_max_tolerance=NO_TOLERANCE) as running:
                _, err = running.process.communicate(timeout=PATIENCE_S)
                assert running.process.returncode == 1, err
            (failed,) = wait_for("the alert", lambda: of_kind(told, "run_failed"), up.process)
            assert "alert run_failed" in (root / "logs" / "control.log").read_text(), "delivered by the deployment"
            up.process.send_signal(signal.SIGINT)
            up.process.communicate(timeout=PATIENCE_S)
        assert failed["stage"] == "SubmitTraining" and failed["error"]
        assert failed["conversation"].startswith(f"samples/{failed['run_id']}/train/")
        roles = {line.partition(":")[0] for line in failed["log_lines"]}
        assert {"control", "trainer", "worker-0"} <= roles
        check_command(failed)
        # Nobody else delivers now; and that it goes on resolves the first.
        with start_resume(root, failed["run_id"]) as again:
            again.process.communicate(timeout=PATIENCE_S)
        both = of_kind(told, "run_failed")
        assert [alert["alert_id"] for alert in of_kind(told, "run_failed", "resolve")] == [failed["alert_id"]]
        assert len(both) == 2 and both[1]["run_id"] == failed["run_id"]
        check_once(told)
