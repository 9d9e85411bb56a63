"""Whole runs whose queues, records, blobs, metrics and alerts are on AWS services, with their processes here."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.aws.emulator import Emulator
from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import PATIENCE_S, Running, start_turnmill, wait_for
from turnmill import assets, check_all_queues
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.cli.commands import turnmill as cli
from turnmill.records import RunStatus
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import look_at_run, look_at_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PARAMETERS = {
    "max-steps": "3",
    "global-batch-size": "8",
    "number-generation": "4",
    "max-refill-rounds": "50",
    "baseline-rollouts": "0",
    "eval-rollouts": "10",
    "worker-lease-s": "6",
    "max-concurrent-rollouts": "32",
}


@pytest.fixture
def root(emulator: Emulator, tmp_path: Path) -> Path:
    """The folder of a deployment that is there."""
    name = f"t-{os.urandom(4).hex()}"
    settings = emulator.settings(name)
    clients = AwsClients(settings)
    asyncio.run(deploy_deployment(clients, settings, lambda _: None))
    clients.close()
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{name}"\n')
    return folder


@contextmanager
def started(root: Path, command: str, **changes: str) -> Iterator[Running]:
    parameters = {**PARAMETERS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    options = [part for name, value in parameters.items() for part in (f"--{name}", value)]
    data = ["--data", str(assets.wordle_data("train"))] if command == "run" else []
    where = ["--json", "--root", str(root), "--backend", "aws", "--local-compute"]
    with start_turnmill(root, [command, *where, *data, *options]) as running:
        yield running


def turnmill(root: Path, *arguments: str) -> Any:
    """What a command prints with --json."""
    done = CliRunner().invoke(cli, [*arguments, "--json", "--root", str(root)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def num_steps(root: Path) -> int:
    runs = look_at_runs(root)
    return len(backend_of(root).reader(runs[0].run_id).metrics()) if runs else 0


def test_a_demo_trains_through_aws_services_and_every_command_finds_it_there(root: Path) -> None:
    with started(root, "demo", baseline_rollouts="16") as running:
        figures = running.finish()
    run_id = figures["run_id"]
    assert figures["steps"] == 3 and figures["eval_before"] is not None
    assert figures["published"].startswith("s3://")
    check_accounting(root, figures)
    # All of it is there, and what is here is what processes share.
    folder = root / "runs" / run_id
    here = {path.name for path in folder.iterdir()}
    assert here == {"blobs", "checkpoints", "locks", "logs", "weights"} and not any((folder / "blobs").iterdir())
    assert json.loads((root / "backend.json").read_text())["type"] == "aws"

    assert turnmill(root, "status", run_id)["status"] == "succeeded"
    assert [run["run_id"] for run in turnmill(root, "runs")] == [run_id]
    queues = turnmill(root, "queues", run_id)["queues"]
    assert {name: queue["available"] for name, queue in queues.items()} == dict.fromkeys(
        ("rollout_request", "rollout_response", "generate_request", "generate_response"), 0
    )
    assert check_all_queues(run_id, root=root)["rollout_request"].num_held == 0
    cost = turnmill(root, "cost", run_id)
    assert cost["num_tokens"] > 0 and cost["hours"] > 0
    assert turnmill(root, "doctor", run_id)["healthy"]
    assert turnmill(root, "dlq", "list") == []
    assert turnmill(root, "alerts") == []

    removed = turnmill(root, "cleanup", run_id, "--yes")
    assert not any(removed["remains"].values()), removed["remains"]
    assert look_at_runs(root) == []


def test_a_control_process_that_is_killed_leaves_a_run_that_resume_ends_exactly(root: Path) -> None:
    with started(root, "run", max_steps="4") as running:
        wait_for("two steps", lambda: num_steps(root) >= 2, running.process)
        run_id = look_at_runs(root)[0].run_id
        orphans = [pid for name in ("proxy", "worker-0", "replica-0", "trainer") if (pid := running.role_pid(name))]
        assert len(orphans) == 4
        running.process.send_signal(signal.SIGKILL)
        running.process.communicate()
    assert look_at_run(root, run_id).status is RunStatus.INTERRUPTED
    with start_turnmill(root, ["resume", run_id, "--json", "--root", str(root)]) as resumed:
        figures = resumed.finish()
    assert figures["steps"] == 4 and look_at_run(root, run_id).attempt == 2
    check_accounting(root, figures)
    check_steps(root, figures)


def test_a_proxy_that_is_killed_comes_back_where_its_workers_look_for_it(root: Path) -> None:
    with started(root, "run") as running:
        wait_for("a step", lambda: num_steps(root) >= 1, running.process)
        running.kill("proxy")
        figures = running.finish()
        served = [line.split()[-1] for line in running.log("proxy").splitlines() if "serving at http" in line]
    assert len(served) == 2 and len(set(served)) == 1
    assert figures["steps"] == 3
    check_accounting(root, figures)


def test_a_run_is_examined_and_cancelled_from_another_process(root: Path) -> None:
    with started(root, "run", max_steps="50") as running:
        wait_for("a step", lambda: num_steps(root) >= 1, running.process)
        run_id = look_at_runs(root)[0].run_id
        seen = turnmill(root, "doctor", run_id)
        assert seen["verdict"] == "progressing", seen
        alive = {process["name"] for process in seen["processes"] if process["state"] == "alive"}
        assert alive == {"control", "proxy", "worker-0", "replica-0", "trainer"}
        assert turnmill(root, "cancel", run_id)["status"] == "cancelled"
        running.process.communicate(timeout=PATIENCE_S)
    assert look_at_run(root, run_id).status is RunStatus.CANCELLED
    assert not any(queue.num_held for queue in check_all_queues(run_id, root=root).values())
