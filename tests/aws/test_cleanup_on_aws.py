"""`turnmill cleanup` of runs whose queues, records and blobs are on AWS services."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.aws.emulator import Emulator
from turnmill.backends.aws.backend import clients_of
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.backends.aws.objects import Objects
from turnmill.backends.aws.settings import AwsSettings
from turnmill.cli.commands import turnmill
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import Message, Write
from turnmill.records import Run, RunClock, RunStatus, encode
from turnmill.wiring.backend import backend_of, choose


@pytest.fixture
def settings(emulator: Emulator) -> AwsSettings:
    """Of a deployment that is there."""
    settings = emulator.settings(f"t-{os.urandom(4).hex()}")
    asyncio.run(deploy_deployment(clients_of(settings), settings, lambda _: None))
    return settings


@pytest.fixture
def root(settings: AwsSettings, tmp_path: Path) -> Path:
    (tmp_path / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{settings.name}"\n')
    choose(tmp_path, flag=None, is_local=True, environ={})
    return tmp_path


async def make_run(root: Path, run_id: str) -> None:
    """One that has ended, with something of everything."""
    ports = backend_of(root).open_run(run_id, num_replicas=1)
    run = Run(
        run_id=run_id,
        cause=f"test/{run_id}",
        status=RunStatus.SUCCEEDED,
        created_at=time.time(),
        config={},
        sources={},
        data_path=None,
    )
    await RunRecord.create(ports.runs, run)
    await ports.infra.deploy()
    clock = RunClock(run_id=run_id, attempt=1, began_at=1.0, seconds=2.0)
    large = Write(key=f"samples/{run_id}/train/large", value=os.urandom(100_000), expected=0)
    await ports.records.write([Write(key=clock.key, value=encode(clock), expected=0), large])
    await ports.blobs.put("preflight/x.json", b"{}")
    await ports.rollout_request.send([Message(body=b"x", group="g", dedup_id=None)])
    ports.close()


def everything(settings: AwsSettings) -> tuple[list[str], list[str]]:
    """The stacks and the objects of a deployment."""
    clients = clients_of(settings)
    stacks = clients.call_now("cloudformation", "describe_stacks")["Stacks"]
    objects = Objects(clients, settings.bucket("000000000000", "us-east-1"), "").listed()
    names = [stack["StackName"] for stack in stacks if stack["StackName"].startswith(settings.name)]
    return [name for name in names if name != settings.name], [item.key for item in objects]


def clean_up(root: Path, *arguments: str) -> Any:
    done = CliRunner().invoke(turnmill, ["cleanup", *arguments, "--yes", "--json", "--root", str(root)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["remains"]


def test_nothing_of_a_run_is_left_but_its_model_where_data_is_retained(root: Path, settings: AwsSettings) -> None:
    run_id, other = "20260101-000000-aaaa", "20260101-000000-bbbb"
    for one in (run_id, other):
        asyncio.run(make_run(root, one))
        bucket = settings.bucket("000000000000", "us-east-1")
        Objects(clients_of(settings), bucket, f"models/{one}/1.1/").put("manifest.json", b"{}")
    planned = CliRunner().invoke(turnmill, ["cleanup", run_id, "--dry-run", "--json", "--root", str(root)])
    assert json.loads(planned.stdout)["elsewhere"] == "AWS (account 000000000000, us-east-1)"
    of_other = [key for key in everything(settings)[1] if other in key]

    assert not any(clean_up(root, run_id, "--retain-data").values())
    stacks, objects = everything(settings)
    assert stacks == [settings.run_stack(other)]
    assert sorted(objects) == sorted([*of_other, f"models/{run_id}/1.1/manifest.json"])
    assert not (root / "runs" / run_id).exists() and (root / "runs" / other).exists()
    assert [item.key for item in backend_of(root).look_at_records("runs/all/")] == [f"runs/all/{other}"]
    assert backend_of(root).look_at_records(f"clocks/{run_id}/") == []

    assert not any(clean_up(root, other).values())
    assert everything(settings) == ([], [f"models/{run_id}/1.1/manifest.json"])


def test_a_whole_deployment_is_emptied_and_its_folder_with_it(root: Path, settings: AwsSettings) -> None:
    for run_id in ("20260101-000000-aaaa", "20260101-000000-bbbb"):
        asyncio.run(make_run(root, run_id))
    backend = backend_of(root)
    assert not any(clean_up(root, "--all").values())
    assert everything(settings) == ([], [])
    assert backend.look_at_records("runs/all/") == []
    assert [path.name for path in root.iterdir()] == ["turnmill.toml"]


def test_a_run_whose_stack_was_deleted_by_hand_can_be_looked_at_and_removed(root: Path, settings: AwsSettings) -> None:
    run_id = "20260101-000000-eeee"
    asyncio.run(make_run(root, run_id))
    clients_of(settings).call_now("cloudformation", "delete_stack", StackName=settings.run_stack(run_id))
    for command in (["status", run_id], ["runs"], ["doctor", run_id], ["queues", run_id]):
        done = CliRunner().invoke(turnmill, [*command, "--root", str(root)], standalone_mode=False)
        assert done.exit_code == 0 and run_id in done.output, done.output
    assert not any(clean_up(root, run_id).values())
    assert everything(settings) == ([], [])
