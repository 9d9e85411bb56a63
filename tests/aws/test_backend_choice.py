"""Which backend a deployment is on: chosen once, found by every command afterwards, and never another one."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.aws.emulator import Emulator
from turnmill import assets
from turnmill.alerts import new_alert
from turnmill.backends.aws.backend import AwsBackend, clients_of
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.backends.embedded import EmbeddedBackend
from turnmill.cli.commands import turnmill
from turnmill.errors import ConfigError, InvalidInput
from turnmill.ports import Write
from turnmill.records import AlertKind
from turnmill.wiring.backend import alert_channels, backend_of, choose, remote_of

DATA = ["--data", str(assets.wordle_data("train"))]


@pytest.fixture
def name(emulator: Emulator) -> str:
    """Of a deployment that is there."""
    settings = emulator.settings(f"t-{os.urandom(4).hex()}")
    asyncio.run(deploy_deployment(clients_of(settings), settings, lambda _: None))
    return settings.name


def configure(root: Path, name: str, extra: str = "") -> None:
    (root / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{name}"\n{extra}')


def choose_here(root: Path, flag: str | None = None, *, is_local: bool = True, **environ: str) -> None:
    choose(root, flag=flag, is_local=is_local, environ=environ)


def failing(root: Path, *arguments: str) -> str:
    """What a command says that can't do what it is told."""
    done = CliRunner().invoke(turnmill, [*arguments, "--root", str(root)], standalone_mode=False)
    assert isinstance(done.exception, InvalidInput), done.output
    return str(done.exception)


def test_a_folder_is_embedded_unless_something_else_is_said(tmp_path: Path) -> None:
    choose_here(tmp_path, is_local=False)
    choose_here(tmp_path, "embedded", is_local=False)
    assert isinstance(backend_of(tmp_path), EmbeddedBackend) and list(tmp_path.iterdir()) == []


def test_a_stack_that_is_no_deployment_is_not_taken_for_one(tmp_path: Path, emulator: Emulator) -> None:
    other = f"t-{os.urandom(4).hex()}"
    body = '{"Resources":{"Q":{"Type":"AWS::SQS::Queue"}}}'
    clients_of(emulator.settings(other)).call_now("cloudformation", "create_stack", StackName=other, TemplateBody=body)
    configure(tmp_path, other)
    with pytest.raises(InvalidInput, match=f"the stack '{other}' in account 0+, region us-east-1 is no deployment"):
        choose_here(tmp_path)
    assert not (tmp_path / "backend.json").exists()


async def test_a_second_machine_finds_the_runs_by_the_table_alone(tmp_path: Path, name: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        root.mkdir()
        configure(root, name)
    choose_here(first)
    records = backend_of(first).open_records()
    await records.write([Write(key="runs/all/r", value=b"{}", expected=0)])
    records.close()
    assert [item.key for item in backend_of(second).look_at_records("runs/all/")] == ["runs/all/r"]
    assert remote_of(second) is not None
    assert [path.name for path in second.iterdir()] == ["turnmill.toml"]


def test_what_was_chosen_first_is_found_without_a_flag(tmp_path: Path, name: str, emulator: Emulator) -> None:
    configure(tmp_path, name)
    choose_here(tmp_path)
    record = json.loads((tmp_path / "backend.json").read_text())
    assert record == {"type": "aws", "name": name, "region": "us-east-1", "account": "000000000000"}
    assert not backend_of(tmp_path).hosts_proxy and isinstance(remote_of(tmp_path), AwsBackend)
    # Even without the table that said it, and from another region.
    (tmp_path / "turnmill.toml").unlink()
    choose_here(tmp_path, is_local=False)
    choose_here(tmp_path, TURNMILL_BACKEND="aws", is_local=False)
    records = backend_of(tmp_path).open_records()
    assert asyncio.run(records.write([Write(key="runs/all/x", value=b"1", expected=0)])) == [True]
    assert [item.key for item in backend_of(tmp_path).look_at_records("runs/all/")] == ["runs/all/x"]
    records.close()


def test_a_different_choice_later_is_refused(tmp_path: Path, name: str) -> None:
    configure(tmp_path, name)
    choose_here(tmp_path)
    with pytest.raises(ConfigError, match="and not on embedded"):
        choose_here(tmp_path, "embedded", is_local=False)
    configure(tmp_path, "other")
    with pytest.raises(ConfigError, match="and not on aws \\(name other\\)"):
        choose_here(tmp_path)
    configure(tmp_path, name, 'region = "eu-west-1"\n')
    with pytest.raises(ConfigError, match=r"and not on aws .*region eu-west-1"):
        choose_here(tmp_path)


def test_embedded_runs_stay_embedded(tmp_path: Path, name: str) -> None:
    (tmp_path / "records").mkdir()
    configure(tmp_path, name)
    with pytest.raises(ConfigError, match="is on embedded, where its runs are"):
        choose_here(tmp_path)


def test_where_the_processes_are_has_to_be_said(tmp_path: Path, name: str) -> None:
    configure(tmp_path, name)
    with pytest.raises(ConfigError, match="--backend aws needs --local-compute for now"):
        choose_here(tmp_path, is_local=False)
    (tmp_path / "turnmill.toml").unlink()
    with pytest.raises(ConfigError, match="--local-compute is for --backend aws"):
        choose_here(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_deployment_that_is_not_there_is_named_with_the_command_that_makes_it(
    tmp_path: Path, emulator: Emulator
) -> None:
    configure(tmp_path, "nowhere")
    with pytest.raises(InvalidInput, match=r"no deployment 'nowhere' .*`turnmill deploy --name nowhere` makes it"):
        choose_here(tmp_path)
    assert "turnmill deploy --name nowhere" in failing(tmp_path, "run", *DATA, "--local-compute")
    assert not (tmp_path / "backend.json").exists()


def test_credentials_of_another_account_are_told_apart(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, name)
    choose_here(tmp_path)
    record = tmp_path / "backend.json"
    record.write_text(record.read_text().replace('"000000000000"', '"111111111111"'))
    with pytest.raises(InvalidInput, match="are those of account 000000000000; the deployment is in 111111111111"):
        choose_here(tmp_path)


def test_the_same_names_in_another_account_are_neither_read_nor_removed(tmp_path: Path, name: str) -> None:
    configure(tmp_path, name)
    choose_here(tmp_path)
    there = {**os.environ, "AWS_ACCESS_KEY_ID": "222222222222"}

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "turnmill", *arguments]
        done = subprocess.run(command, env=there, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert run("deploy", "--name", name)[0] == 0
    for command in (["runs"], ["cleanup", "--all", "--yes"], ["resume", "r1"], ["serve", "r1"]):
        code, error = run(*command, "--root", str(tmp_path))
        assert code == 2 and "are those of account 222222222222; the deployment is in 000000000000" in error


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--backend = azure: must be one of embedded, aws"):
        choose_here(tmp_path, "azure")
    with pytest.raises(ConfigError, match="TURNMILL_BACKEND = AWS: must be one of"):
        choose_here(tmp_path, TURNMILL_BACKEND="AWS")
    assert "must be one of embedded, aws" in failing(tmp_path, "demo", "--backend", "azure")


def test_uploads_into_a_folder_are_for_embedded_deployments(tmp_path: Path, name: str) -> None:
    configure(tmp_path, name)
    assert "begin its runs with `turnmill run`" in failing(tmp_path, "up")
    assert "begin its runs with `turnmill run`" in failing(tmp_path, "upload", str(assets.wordle_data("train")))


async def test_the_topic_of_the_deployment_is_told_of_its_alerts(emulator: Emulator, tmp_path: Path) -> None:
    settings = emulator.settings(f"t-{os.urandom(4).hex()}")
    clients = clients_of(settings)
    outputs = await deploy_deployment(clients, settings, lambda _: None)
    configure(tmp_path, settings.name)
    await asyncio.to_thread(choose_here, tmp_path)
    queue = (await clients.call("sqs", "create_queue", QueueName=f"{settings.name}-inbox"))["QueueUrl"]
    arn = f"arn:aws:sqs:us-east-1:000000000000:{settings.name}-inbox"
    await clients.call("sns", "subscribe", TopicArn=outputs["AlertTopicArn"], Protocol="sqs", Endpoint=arn)
    assert [channel.notifier.name for channel in alert_channels(tmp_path, ())] == ["log", "sns"]
    for channel in alert_channels(tmp_path, ()):
        await channel.notifier.send(new_alert(AlertKind.RUN_FAILED, "run r1 failed", command="turnmill status r1"))
    received = await clients.call("sqs", "receive_message", QueueUrl=queue, WaitTimeSeconds=5)
    (message,) = received["Messages"]
    assert "run r1 failed" in message["Body"]
