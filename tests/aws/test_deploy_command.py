"""`turnmill deploy` against the emulator."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

import turnmill
from tests.aws.emulator import Emulator
from turnmill.backends.aws.clients import AwsClients
from turnmill.cli.commands import turnmill as group
from turnmill.cli.errors import run_cli

Captured = pytest.CaptureFixture[str]


def test_it_is_made_once_told_of_and_removed(emulator: Emulator, capsys: Captured) -> None:
    assert run_cli(group, ["deploy", "--name", "deploycli"]) == 0
    made = capsys.readouterr().out
    assert "deployment deploycli in us-east-1" in made
    assert "bucket: deploycli-000000000000-us-east-1" in made
    assert "costs nothing while no run goes on" in made
    assert run_cli(group, ["deploy", "--name", "deploycli", "--json"]) == 0
    again = capsys.readouterr()
    assert "is as it should be" in again.err
    assert json.loads(again.out)["outputs"]["RecordsTableName"] == "deploycli-records"
    remove = ["deploy", "--name", "deploycli", "--delete", "--yes", "--json"]
    assert run_cli(group, remove) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "deploycli", "deleted": True, "outputs": {}}
    clients = AwsClients(emulator.settings("deploycli"))
    assert "deploycli-records" not in clients.call_now("dynamodb", "list_tables")["TableNames"]
    clients.close()
    assert run_cli(group, remove) == 0


def test_nothing_is_removed_without_a_terminal_to_ask_at(emulator: Emulator, capsys: Captured) -> None:
    assert run_cli(group, ["deploy", "--name", "deploycli", "--delete"]) == 2
    assert "give --yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"), [("Upper", "must be lower-case"), ("x" * 22, "at most 21"), ("xn--a", "S3 keeps for itself")]
)
def test_a_name_that_breaks_a_limit_is_refused(emulator: Emulator, capsys: Captured, name: str, message: str) -> None:
    assert run_cli(group, ["deploy", "--name", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("key", ["nonsense", "", "arn:aws:kms:eu-west-1:123456789012:alias/mine"])
def test_a_key_that_is_no_arn_of_one_is_refused(emulator: Emulator, capsys: Captured, key: str) -> None:
    assert run_cli(group, ["deploy", "--name", "keycli", "--kms-key", key]) == 2
    assert "must be an ARN, arn:aws:kms:" in capsys.readouterr().err


def test_a_stack_of_somebody_else_is_named(emulator: Emulator, capsys: Captured) -> None:
    clients = AwsClients(emulator.settings("foreigncli"))
    body = '{"Resources":{"Q":{"Type":"AWS::SQS::Queue"}}}'
    clients.call_now("cloudformation", "create_stack", StackName="foreigncli", TemplateBody=body)
    assert run_cli(group, ["deploy", "--name", "foreigncli"]) == 1
    assert "belongs to somebody else" in capsys.readouterr().err
    clients.call_now("cloudformation", "delete_stack", StackName="foreigncli")
    clients.close()


def test_without_a_region_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    assert run_cli(group, ["deploy"]) == 2
    assert "no AWS region is configured" in capsys.readouterr().err


def test_without_the_sdk_the_extra_is_named(tmp_path: Path) -> None:
    # What is installed, but for the SDK; `-S` leaves the rest of the environment out.
    for installed in distributions():
        for path in installed.files or ():
            top = path.parts[0]
            if not top.startswith(("boto", "..", "turnmill", "_", "/")) and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(installed.locate_file(top))))
    environ = {**os.environ, "PYTHONPATH": f"{Path(turnmill.__file__).parent.parent}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-S", "-m", "turnmill", "deploy"]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "pip install 'turnmill[aws]'" in done.stderr and "Traceback" not in done.stderr
