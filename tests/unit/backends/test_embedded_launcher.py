"""What only the launcher of child processes can meet."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from turnmill.backends.embedded import ProcessLauncher
from turnmill.errors import BackendUnavailable
from turnmill.ports import RoleSpec


async def test_a_role_that_can_not_be_started_again_is_failed(tmp_path: Path) -> None:
    """As where the installation is replaced under a run: nobody may think that the role still runs."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    launcher = ProcessLauncher(tmp_path, command=[str(program)], restart_pause_s=0.01)
    await launcher.start(RoleSpec(role="worker", name="a", run_id="run-1", max_restarts=5))
    [first] = await launcher.statuses()
    assert first.pid is not None
    program.unlink()
    os.kill(first.pid, signal.SIGKILL)
    while True:
        [status] = await launcher.statuses()
        if status.state != "running":
            break
        await asyncio.sleep(0.01)
    assert (status.state, status.num_restarts, status.pid) == ("failed", 0, None)
    with pytest.raises(BackendUnavailable, match="the process b can't be made"):
        await launcher.start(RoleSpec(role="worker", name="b", run_id="run-1"))
    await launcher.close()
