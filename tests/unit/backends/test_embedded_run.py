"""The ports of one run in one folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_root_records, open_run
from turnmill.errors import BackendUnavailable, InvalidInput
from turnmill.ports import Message, Write
from turnmill.records import Metric, run_key

ORPHANING_LAUNCHER = """
import asyncio, sys
from pathlib import Path
from turnmill.backends.embedded import ProcessLauncher
from turnmill.ports import RoleSpec
async def main():
    child = "import sys; print('ready', flush=True); sys.stdin.read(); print('parent is gone', flush=True)"
    launcher = ProcessLauncher(Path(sys.argv[1]), command=[sys.executable, "-c", child])
    await launcher.start(RoleSpec(role="worker", name="first", run_id="run"))
    await launcher.start(RoleSpec(role="worker", name="second", run_id="run"))
    while not all("ready" in status.log_tail for status in await launcher.statuses()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    print(*[status.state for status in await launcher.statuses()], flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


async def test_looking_at_a_run_that_never_was_creates_nothing(tmp_path: Path) -> None:
    ports = open_run(tmp_path / "root", "run", num_replicas=1)
    assert await ports.runs.get([run_key("run")]) == [None]
    assert await ports.records.scan("samples/run/") == []
    assert await ports.blobs.list() == []
    assert await ports.weights.current() is None
    assert await ports.metrics.read("run") == []
    assert (await ports.rollout_request.counts()).available == 0
    assert await ports.rollout_request.dead_letters() == []
    assert await ports.rollout_request.purge() == await ports.rollout_request.redrive() == 0
    ports.close()
    assert os.listdir(tmp_path) == []


async def test_every_port_has_its_own_place(tmp_path: Path) -> None:
    ports = open_run(tmp_path, "run", num_replicas=2)
    queues = [ports.rollout_request, ports.rollout_response, ports.generate_response, *ports.generate_request]
    for queue in queues:
        await queue.send([Message(body=b"", group="g", dedup_id="d")])
    await ports.records.write([Write(key="samples/run/a", value=b"", expected=0)])
    await ports.runs.write([Write(key=run_key("run"), value=b"", expected=0)])
    await ports.blobs.put("a", b"")
    await ports.metrics.write(Metric(run_id="run", step=1, time=0.0, values={}))
    ports.close()
    ports.close()
    assert names(tmp_path) == [
        "records/runs.db",
        "runs/run/blobs/a.blob",
        "runs/run/metrics.jsonl",
        "runs/run/queues/generate_request-0.db",
        "runs/run/queues/generate_request-1.db",
        "runs/run/queues/rollout_request.db",
        "runs/run/queues/rollout_response.db",
        "runs/run/records/calls.db",
        "runs/run/records/samples.db",
    ]
    with pytest.raises(BackendUnavailable, match="closed"):
        await ports.rollout_request.send([Message(body=b"", group="g", dedup_id="e")])
    root = open_root_records(tmp_path)
    assert [stored.key for stored in await root.scan("runs/all/")] == [run_key("run")]
    root.close()


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../a", "a\0", "é", "x" * 200])
def test_a_run_id_that_names_no_folder_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InvalidInput, match="run id"):
        open_run(tmp_path, run_id, num_replicas=1)


def test_a_role_can_tell_that_its_launcher_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANING_LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running running\n"
        process.send_signal(signal.SIGKILL)
    for name in ("first", "second"):
        log = tmp_path / "runs" / "run" / "logs" / f"{name}.log"
        while "parent is gone" not in log.read_text():
            time.sleep(0.01)
