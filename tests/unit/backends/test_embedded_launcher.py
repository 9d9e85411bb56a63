"""What only the launcher of child processes can meet."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from turnmill.backends.embedded import ProcessLauncher, look_at_restarts, wait_until_gone
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


@pytest.mark.parametrize("way", ["ends", "stays"])
async def test_no_second_process_of_a_name_is_started_beside_the_one_of_a_dead_launcher(
    tmp_path: Path, way: str
) -> None:
    """The first launcher is left alone, as if its process had died: what it started still runs."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    first, second = (ProcessLauncher(tmp_path, command=[str(program)], patience_s=patience) for patience in (1.0, 0.2))
    spec = RoleSpec(role="worker", name="a", run_id="run-1")
    await first.start(spec)
    [orphan] = await first.statuses()
    with pytest.raises(BackendUnavailable, match="process a that an earlier control process started"):
        await second.start(spec)
    with pytest.raises(BackendUnavailable, match="process a that an earlier"):
        await wait_until_gone(tmp_path, "run-1", 0.1)
    # Another name, another run: nothing to do with it.
    await second.start(RoleSpec(role="worker", name="b", run_id="run-1"))
    await second.start(RoleSpec(role="worker", name="a", run_id="run-2"))
    assert orphan.pid is not None
    if way == "ends":
        third = ProcessLauncher(tmp_path, command=[str(program)])
        starting = asyncio.create_task(third.start(spec))
        await asyncio.sleep(0)
        os.kill(orphan.pid, signal.SIGKILL)
        await starting
        [status] = await third.statuses()
        assert status.state == "running" and status.pid not in (None, orphan.pid)
        await third.close()
    await second.close()
    await first.close()
    await wait_until_gone(tmp_path, "run-1", 10.0)
    await wait_until_gone(tmp_path, "run-of-nobody", 0.0)


async def test_restarts_are_counted_for_those_who_come_later(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    launcher = ProcessLauncher(tmp_path, command=[str(program)], restart_pause_s=0.01)
    for name in ("a", "b"):
        await launcher.start(RoleSpec(role="worker", name=name, run_id="run-1", max_restarts=5))
    for number in (1, 2):
        status = (await launcher.statuses())[0]
        assert status.pid is not None
        os.kill(status.pid, signal.SIGKILL)
        for _ in range(2000):
            if look_at_restarts(tmp_path, "run-1") == {"a": number}:
                break
            await asyncio.sleep(0.01)
    await launcher.close()
    file = tmp_path / "runs" / "run-1" / "restarts.jsonl"
    file.write_bytes(file.read_bytes() + b'{"role": "a"')
    assert look_at_restarts(tmp_path, "run-1") == {"a": 2}, "without the line that is torn"
    assert look_at_restarts(tmp_path, "run-2") == {}


async def test_a_process_that_ends_in_the_moment_in_which_it_is_stopped_is_no_reason_to_hang(tmp_path: Path) -> None:
    """Whoever signals must not take the end of the child away from the thread that waits for it."""
    async with asyncio.timeout(60):
        for index in range(150):
            launcher = ProcessLauncher(tmp_path, command=["/bin/sh", "-c", f"sleep 0.00{index % 5}"], stop_s=5.0)
            await launcher.start(RoleSpec(role="any", name=f"any-{index}", run_id="r1"))
            await asyncio.sleep(0.0005 * (index % 20))
            await launcher.stop(f"any-{index}")
            (status,) = await launcher.statuses()
            assert status.state == "exited"


async def test_where_sigchld_is_ignored_the_end_of_a_role_is_seen_all_the_same(tmp_path: Path) -> None:
    """As under some supervisors: processes inherit that."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launcher = ProcessLauncher(tmp_path, command=["/bin/sh", "-c", "exit 3"])
        await launcher.start(RoleSpec(role="any", name="a", run_id="r1"))
        async with asyncio.timeout(20):
            while (await launcher.statuses())[0].state == "running":  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
            await launcher.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
