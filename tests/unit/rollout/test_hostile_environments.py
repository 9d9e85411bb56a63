"""Environments that do harm, each beside others in a worker's box: the others are played, and it has its reason."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.rollout.boxes import Run, boxed_worker, hostile_settings, marked
from tests.unit.rollout.small_proxy import small_proxy
from turnmill.control_api.server import serve_api
from turnmill.rollout.box.order import Isolation, Limits

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


# Those that a machine has: root has no need of the third.
CLOSED = [Isolation.NAMESPACES, Isolation.UID, Isolation.BWRAP]


@pytest.fixture(params=CLOSED)
async def run(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Run]:
    async with boxed_worker(hostile_settings(tmp_path / "root", request.param)) as running:
        yield running


async def with_others(run: Run, does: str, *, limit_s: float = 60.0, **data: Any) -> dict[str, Any]:
    """The report of a rollout that does that, between others that must all have their reward."""
    run.proxy.add("good_0")
    run.proxy.add("bad_0", do=does, limit_s=limit_s, **data)
    for number in range(1, 4):
        run.proxy.add(f"good_{number}")
    reports = await run.reports(5)
    rewards = [reports[f"good_{number}"]["aggregate_reward_score"] for number in range(4)]
    assert rewards == [0.5] * 4
    return reports["bad_0"]


def is_invalid(report: dict[str, Any], reason: str, detail: str = "") -> bool:
    assert detail in report.get("detail", ""), report
    assert report.get("reason") == reason, report
    return report["aggregate_reward_score"] is None


async def test_one_that_hangs_is_an_env_error_at_its_deadline(run: Run) -> None:
    assert is_invalid(await with_others(run, "hang", limit_s=1.0), "env_error", "not done after")


@pytest.mark.parametrize("does", ["block", "spin"])
async def test_one_that_blocks_the_event_loop_is_found_and_ended(run: Run, does: str) -> None:
    assert is_invalid(await with_others(run, does), "env_error", "did not give the event loop back")


async def test_one_that_does_not_let_itself_be_ended_keeps_nothing_from_ending(run: Run) -> None:
    assert is_invalid(await with_others(run, "refuse_to_end", limit_s=1.0), "env_error", "not done after")


async def test_one_that_stops_its_process_is_ended(run: Run) -> None:
    assert is_invalid(await with_others(run, "stop_itself"), "env_error", "did not answer")


@pytest.mark.parametrize(
    ("does", "reason", "detail"),
    [
        ("fail", "env_error", "KeyError: 'play'"),
        ("score", "reward_error", "LookupError: score"),
        ("cancel_itself", "env_error", "cancelled its own task"),
        ("exit_politely", "env_error", "SystemExit"),
        ("return_odd_stop_reason", "env_error", "stop_reason"),
    ],
)
async def test_errors_are_reported_with_their_reason(run: Run, does: str, reason: str, detail: str) -> None:
    assert is_invalid(await with_others(run, does), reason, detail)


@pytest.mark.parametrize("does", ["exit_at_once", "crash"])
async def test_one_that_ends_its_process_is_played_with_fewer_others_until_it_is_known(run: Run, does: str) -> None:
    assert is_invalid(await with_others(run, does), "env_error", "its process ended")
    assert run.proxy.attempts["bad_0"] <= 3


@pytest.mark.parametrize("reward", ["nan", "inf", "half", None, [1.0], 7.5, -0.1])
async def test_rewards_that_are_none_are_reward_errors(run: Run, reward: Any) -> None:
    report = await with_others(run, "return_reward", reward=reward)
    assert is_invalid(report, "reward_error")


@pytest.mark.parametrize(
    ("reward", "metrics"),
    [("nan", {}), (7.5, {}), (None, {}), (0.5, {"a\nb": 1.0}), (0.5, {str(n): 1.0 for n in range(1001)})],
)
async def test_what_a_player_claims_is_checked_again(run: Run, reward: Any, metrics: dict[str, float]) -> None:
    report = await run.report_of("claim_reward", reward=reward, metrics=metrics)
    assert is_invalid(report, "reward_error")


@pytest.mark.parametrize(
    ("data", "times"),
    [
        (b"\xff" * 64, 1),
        (b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1", 1),
        (b"\x00\x00\x00\x0a" + msgspec.msgpack.encode({"type": "Loaded"})[:10].ljust(10, b"\0"), 1),
        (b"\xff" * 4096, 1024),
    ],
)
async def test_a_player_that_sends_nonsense_is_ended(run: Run, data: bytes, times: int) -> None:
    report = await with_others(run, "write_to_worker", hex=data.hex(), times=times)
    assert is_invalid(report, "env_error", "nonsense")


async def test_one_that_leaks_memory_is_refused_more_of_it(run: Run) -> None:
    assert is_invalid(await with_others(run, "leak"), "env_error", "MemoryError")


async def test_memory_that_is_shared_is_counted(run: Run) -> None:
    report = await with_others(run, "leak_shared")
    assert is_invalid(report, "env_error")
    assert "MiB of memory" in report["detail"] or "exit code" in report["detail"]


async def test_ten_thousand_open_files_are_an_error_of_who_opens_them(run: Run) -> None:
    assert is_invalid(await with_others(run, "open_files"), "env_error", "Too many open files")


async def test_a_full_temporary_folder_is_an_error_of_who_fills_it(run: Run) -> None:
    report = await with_others(run, "fill_disk")
    assert is_invalid(report, "env_error")


async def test_a_flood_of_output_is_cut(run: Run) -> None:
    report = await with_others(run, "flood_output", mib=12)
    assert report["aggregate_reward_score"] == 0.5
    await run.stop()
    kept = run.settings.log.read_text()
    assert "bytes of output are not kept" in kept
    assert len(kept) < 4 << 20


async def test_more_output_than_a_box_may_write_ends_it(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.NONE, limits=Limits(output_mb=8))
    async with boxed_worker(settings) as run:
        assert is_invalid(await run.report_of("flood_output", mib=64), "env_error", "MiB of output")


async def test_one_that_floods_its_way_to_the_model_is_ended(run: Run) -> None:
    if not run.settings.isolation.has_view:
        pytest.skip("there the network is the machine's, and the relay is one of many")
    assert is_invalid(await with_others(run, "flood_relay"), "env_error", "asks for nothing")


async def test_files_that_it_leaves_anywhere_are_gone_with_it(run: Run) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    report = await run.report_of("leave_files", mark=mark)
    assert report["aggregate_reward_score"] == 0.5
    await run.stop()
    assert left_behind(mark) == []


def left_behind(mark: str) -> list[str]:
    """Folders where every user may write that have such a file."""
    return [folder for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock") if os.path.lexists(f"{folder}/{mark}")]


async def test_connections_that_it_holds_open_end_it(run: Run) -> None:
    if not run.settings.isolation.has_view:
        pytest.skip("there the network is the machine's, and the relay is one of many")
    assert is_invalid(await with_others(run, "hold_connections"), "env_error", "connections to the relay")


async def test_empty_files_in_memory_are_limited(run: Run) -> None:
    if not run.settings.isolation.has_view:
        pytest.skip("there these folders are the machine's")
    report = await with_others(run, "fill_with_empty_files")
    (found,) = report["metrics_list"]
    assert found["value"] < 32 * 64


async def test_nothing_gives_it_more_than_it_was_given(run: Run) -> None:
    report = await with_others(run, "dig")
    found = {metric["name"]: metric["value"] for metric in report["metrics_list"]}
    assert found == dict.fromkeys(found, 0.0)
    assert len(found) == 8


async def test_a_failure_of_the_model_that_nobody_saw_is_the_environment_s(run: Run) -> None:
    assert is_invalid(await run.report_of("claim_infra"), "env_error", "not my fault")


async def test_one_that_closes_its_way_to_the_worker_is_ended(run: Run) -> None:
    assert is_invalid(await with_others(run, "close_control"), "env_error", "did not answer")


async def test_loops_threads_and_processes_of_an_environment_s_own_do_no_harm(run: Run) -> None:
    report = await with_others(run, "use_loops_of_its_own")
    assert [metric["value"] for metric in report["metrics_list"]] == [1.0]


async def test_two_ends_of_one_rollout_are_nonsense(run: Run) -> None:
    run.proxy.add("bad_0", do="claim_twice", play=1)
    run.proxy.add("good_0")
    reports = await run.reports(2)
    # The first of them counts, and what shared its box is played again.
    assert [reports[name]["aggregate_reward_score"] for name in ("bad_0", "good_0")] == [0.5, 0.5]


async def test_a_package_that_is_larger_than_its_temporary_folder_may_be_is_played(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.UID)
    assert settings.found.folder is not None
    (settings.found.folder / "data.bin").write_bytes(bytes(64 << 20))
    async with boxed_worker(settings) as run:
        # Looked at once a second.
        report = await run.report_of("hang", limit_s=3.0)
    assert is_invalid(report, "env_error", "not done after")


@pytest.mark.parametrize("isolation", [*CLOSED, Isolation.NONE])
async def test_signals_that_its_constructor_took_are_not_kept(tmp_path: Path, isolation: Isolation) -> None:
    settings = hostile_settings(tmp_path / "root", isolation, env_args={"fault": "take_signals"})
    async with boxed_worker(settings) as run:
        run.proxy.add("child_0", do="end_a_child")
        reports = await run.reports(1)
        assert reports["child_0"]["metrics_list"][0]["value"] == -15.0
        assert is_invalid(await run.report_of("be_told_to_end"), "env_error", "exit code 143")


async def test_processes_that_get_away_from_their_parent_end_with_the_box(tmp_path: Path, run: Run) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    report = await run.report_of("fork", mark=mark)
    assert report["aggregate_reward_score"] == 0.5
    assert len(marked(mark)) == 3
    await run.stop()
    assert marked(mark) == []


async def test_a_fork_bomb_ends_with_its_box(run: Run) -> None:
    assert is_invalid(await with_others(run, "fork_bomb"), "env_error")


async def test_nothing_outside_can_be_killed(run: Run) -> None:
    report = await with_others(run, "kill_others", worker=os.getpid())
    assert report["aggregate_reward_score"] == 0.5


async def test_no_secret_can_be_read(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    report = await with_others(
        run,
        "spy",
        secret=foreign_variable(),
        worker=os.getpid(),
        folders=[str(root), str(tmp_path)],
        files=[str(root / "control.token"), "/etc/shadow", f"/proc/{os.getpid()}/maps", str(run.settings.log)],
    )
    assert report["aggregate_reward_score"] == 0.5
    found = {metric["name"]: metric["value"] for metric in report["metrics_list"]}
    assert len(found) == 8
    assert {name for name, value in found.items() if value} == set()


def foreign_variable() -> str:
    """A variable that this process was started with, and that no box has."""
    known = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    variables = Path("/proc/self/environ").read_text().split("\0")
    return next(each for each in variables if len(each) > 8 and each.partition("=")[0] not in known)


async def test_no_door_but_the_model_opens(tmp_path: Path, run: Run) -> None:
    report_body = '{"id": "bad_0", "aggregate_reward_score": 1.0, "metrics_list": []}'
    async with serve_api(tmp_path / "root") as control_url:
        doors = {
            "report": door(run.proxy.url, "POST /v1/rollouts/report", report_body),
            "control": door(control_url, "GET /api/v1/runs"),
        }
        if run.settings.isolation.has_view:
            # Without a network of its own a box reaches what the machine reaches, and secrets are what keeps it out.
            doors["health"] = door(control_url, "GET /healthz")
            doors["chat"] = door(run.proxy.url, "POST /a/chat-good_0/v1/chat/completions", "{}")
        assert await asyncio.to_thread(opens, *door(control_url, "GET /healthz"))
        report = await with_others(run, "call_out", doors=doors)

    assert report["aggregate_reward_score"] == 0.5
    assert {metric["name"]: metric["value"] for metric in report["metrics_list"]} == dict.fromkeys(doors, 0.0)


def door(url: str, request: str, body: str = "") -> tuple[str, int, str]:
    """Host, port, and what to say there."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port), f"{request} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n{body}"


def opens(host: str, port: int, request: str) -> bool:
    """From here it does."""
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(request.encode())
        return b" 200 " in connection.recv(1024)


@pytest.mark.parametrize("isolation", [*CLOSED, Isolation.NONE])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_of_a_box_outlives_a_worker_that_is_killed(
    tmp_path: Path, isolation: Isolation, by: signal.Signals
) -> None:
    root, mark = tmp_path / "root", f"mark-{secrets.token_hex(8)}"
    hostile_settings(root, isolation)
    # Boxes of another user have their folders there, so they must be able to pass.
    temp = Path(tempfile.mkdtemp(prefix=f"{mark}-"))
    os.chmod(temp, 0o755)
    try:
        async with small_proxy() as proxy:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.unit.rollout.worker_with_box", str(root), isolation, proxy.url),
                env={**os.environ, "TMPDIR": str(temp)},
            )
            proxy.add("bad_0", do="fork", mark=mark)
            await proxy.until(lambda: proxy.reports)
            assert len(marked(mark)) == 3
            assert bool(os.listdir(temp)) != isolation.has_view
            worker.send_signal(by)
            await worker.wait()
            async with asyncio.timeout(20):
                while marked(mark) or os.listdir(temp):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert str(root) not in Path("/proc/mounts").read_text()  # noqa: ASYNC240
    finally:
        shutil.rmtree(temp)
