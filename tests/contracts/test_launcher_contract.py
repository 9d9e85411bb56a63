"""What every launcher keeps."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from turnmill.errors import BackendUnavailable
from turnmill.ports import Launcher, RoleSpec, RoleStatus


def spec(name: str, behave: str, *, max_restarts: int = 0, final: tuple[int, ...] = (0,)) -> RoleSpec:
    return RoleSpec(
        role="worker",
        name=name,
        run_id="run-1",
        env={"BEHAVE": behave},
        max_restarts=max_restarts,
        final_exit_codes=final,
    )


async def status_when(launcher: Launcher, name: str, ready: Callable[[RoleStatus], bool]) -> RoleStatus:
    """The status of `name` as soon as it is `ready`."""
    while True:
        for status in await launcher.statuses():
            if status.name == name and ready(status):
                return status
        await asyncio.sleep(0.01)


def is_ready(status: RoleStatus) -> bool:
    return "ready" in status.log_tail


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent, gone as well, has left it to init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_role_gets_its_arguments_and_environment(
    open_launcher: Callable[..., Launcher], tmp_path: Path
) -> None:
    launcher = open_launcher()
    await launcher.start(spec("worker-0", "wait"))
    status = await status_when(launcher, "worker-0", is_ready)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert status.log_tail[0] == (
        f"started role worker --root {tmp_path} --run run-1 --name worker-0 threads={threads}"
    )
    assert (status.state, status.num_restarts, status.exit_code) == ("running", 0, None)
    await launcher.close()


async def test_starting_a_running_name_does_nothing(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "wait"))
    [before] = await launcher.statuses()
    await launcher.start(spec("a", "wait"))
    [after] = await launcher.statuses()
    assert before.pid == after.pid
    await launcher.close()


async def test_a_crashing_role_is_restarted_so_often_and_then_failed(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "crash", max_restarts=2))
    status = await status_when(launcher, "a", lambda status: status.state != "running")
    assert (status.state, status.num_restarts, status.exit_code, status.pid) == ("failed", 2, 3, None)
    assert status.log_tail.count("about to crash") == 3
    await launcher.close()


async def test_a_role_that_lives_long_enough_before_it_dies_is_in_no_crash_loop(
    open_launcher: Callable[..., Launcher],
) -> None:
    launcher = open_launcher(steady_s=0.0)
    await launcher.start(spec("a", "crash", max_restarts=1))
    await status_when(launcher, "a", lambda status: status.num_restarts == 3)
    await launcher.close()


async def test_a_final_exit_code_is_the_end_without_a_restart(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "crash", max_restarts=5, final=(0, 1, 3)))
    status = await status_when(launcher, "a", lambda status: status.state != "running")
    assert (status.state, status.num_restarts, status.exit_code) == ("failed", 0, 3)
    await launcher.start(spec("b", "wait", max_restarts=1, final=(0, 1, 3)))
    first = await status_when(launcher, "b", is_ready)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    await status_when(launcher, "b", lambda status: status.num_restarts == 1 and status.pid is not None)
    await launcher.close()


async def test_a_killed_role_is_started_again(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "wait", max_restarts=1))
    first = await status_when(launcher, "a", is_ready)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second = await status_when(launcher, "a", lambda status: status.num_restarts == 1 and status.pid is not None)
    assert second.pid != first.pid
    await launcher.close()
    assert second.pid is not None and not is_alive(second.pid)


async def test_a_role_that_ends_well_is_not_started_again(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "end", max_restarts=5))
    status = await status_when(launcher, "a", lambda status: status.state != "running")
    assert (status.state, status.num_restarts, status.exit_code) == ("exited", 0, 0)
    await launcher.start(spec("a", "wait"))
    assert [status.state for status in await launcher.statuses()] == ["running"]
    await launcher.close()


async def test_a_stopped_role_is_not_started_again(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "wait", max_restarts=5))
    await status_when(launcher, "a", is_ready)
    await launcher.stop("a")
    await launcher.stop("a")
    await launcher.stop("never started")
    [status] = await launcher.statuses()
    assert (status.state, status.num_restarts, status.exit_code) == ("exited", 0, -signal.SIGTERM)
    await launcher.close()


async def test_a_role_that_ignores_the_request_is_killed(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher(stop_s=0.1)
    await launcher.start(spec("a", "stubborn", max_restarts=5))
    await status_when(launcher, "a", is_ready)
    await launcher.stop("a")
    [status] = await launcher.statuses()
    assert (status.state, status.exit_code, status.pid) == ("exited", -signal.SIGKILL, None)
    await launcher.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_a_role_leaves_running_ends_with_it(
    open_launcher: Callable[..., Launcher], number: signal.Signals
) -> None:
    launcher = open_launcher()
    await launcher.start(spec("a", "parent"))
    status = await status_when(launcher, "a", is_ready)
    [line] = [line for line in status.log_tail if line.startswith("grandchild")]
    grandchild = int(line.split()[1])
    assert is_alive(grandchild)
    assert status.pid is not None
    os.kill(status.pid, number)
    await status_when(launcher, "a", lambda status: status.state == "failed")
    await status_when(launcher, "a", lambda _: not is_alive(grandchild))
    await launcher.close()


async def test_closing_ends_everything_even_while_restarts_are_pending(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    for name, behave in (("a", "wait"), ("b", "crash"), ("c", "wait"), ("d", "crash")):
        await launcher.start(spec(name, behave, max_restarts=1000))
    await status_when(launcher, "a", is_ready)
    await status_when(launcher, "b", lambda status: status.num_restarts > 0)
    pids = [status.pid for status in await launcher.statuses() if status.pid is not None]
    await asyncio.gather(launcher.close(), launcher.close())
    assert {status.state for status in await launcher.statuses()} == {"exited"}
    assert [pid for pid in pids if is_alive(pid)] == []
    before = [status.num_restarts for status in await launcher.statuses()]
    await asyncio.sleep(0.1)
    assert [status.num_restarts for status in await launcher.statuses()] == before
    await launcher.close()


@pytest.mark.parametrize("way", ["stop", "close"])
async def test_a_role_that_waits_for_its_restart_can_be_ended(open_launcher: Callable[..., Launcher], way: str) -> None:
    launcher = open_launcher(restart_pause_s=1000.0)
    await launcher.start(spec("a", "crash", max_restarts=5))
    await status_when(launcher, "a", lambda status: status.exit_code == 3)
    if way == "stop":
        await launcher.stop("a")
    else:
        await launcher.close()
    [status] = await launcher.statuses()
    assert (status.state, status.num_restarts, status.pid) == ("exited", 0, None)
    assert status.log_tail.count("about to crash") == 1
    await launcher.close()


async def test_a_closed_launcher_starts_nothing(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher()
    await launcher.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        await launcher.start(spec("a", "wait"))
    assert await launcher.statuses() == []


async def test_a_cancelled_close_goes_on_to_its_end(open_launcher: Callable[..., Launcher]) -> None:
    launcher = open_launcher(stop_s=0.1)
    await launcher.start(spec("a", "stubborn"))
    await status_when(launcher, "a", is_ready)
    closing = asyncio.create_task(launcher.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await status_when(launcher, "a", lambda status: status.state == "exited" and status.pid is None)
    await launcher.close()
