"""`turnmill external`: a run of a foreign trainer is begun, changed and ended by commands."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aws.emulator import Emulator
from turnmill import check_all_queues
from turnmill.backends.aws.backend import AwsBackend
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.backends.aws.lambdas.boot import NoWeights
from turnmill.backends.aws.settings import AwsSettings
from turnmill.records import Run, RunKind, RunStatus, decode, run_key
from turnmill.wiring.event_loop import run_loop

RUN, CONFIG = "commanded", "parameters.toml"


@pytest.fixture(scope="module")
def settings(emulator: Emulator) -> AwsSettings:
    settings = emulator.settings("commands")
    clients = AwsClients(settings)
    run_loop(deploy_deployment(clients, settings, lambda _: None))
    clients.close()
    return settings


def turnmill(folder: Path, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "turnmill", "external", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def begin(folder: Path, *arguments: str) -> dict[str, Any]:
    common = ("begin", RUN, "--deployment", "commands", "--no-dependencies", "--json")
    told: dict[str, Any] = json.loads(turnmill(folder, *common, *arguments).stdout)
    return told


def recorded(settings: AwsSettings) -> Run:
    backend = AwsBackend(settings, account="000000000000", weights_of=lambda _: NoWeights())
    (stored,) = backend.look_at_records(run_key(RUN))
    return decode(stored.value, Run)


@pytest.mark.slow
def test_a_run_is_begun_once_changed_and_ended_without_a_rest(settings: AwsSettings, tmp_path: Path) -> None:
    first = begin(tmp_path, "--max-attempts", "2")
    assert first["trainer"]["rollout_request_arn"].endswith(f":function:{RUN}-SageMaker-rollout")
    run = recorded(settings)
    assert (run.kind, run.status, run.config["max_attempts"]) == (RunKind.EXTERNAL, RunStatus.ACTIVE, 2)
    file = tmp_path / first["worker_env"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = subprocess.run(
        [
            "sh",
            "-c",
            f'. ./{file.name}; echo "$TURNMILL_PROXY_URL $TURNMILL_PROXY_AUTH"; echo "$TURNMILL_WORKER_CONFIG"',
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == f"{first['outputs']['ProxyFunctionUrl'].rstrip('/')} sigv4"
    assert json.loads(shown[1])["max_attempts"] == 2

    told = turnmill(
        tmp_path, "begin", RUN, "--deployment", "commands", "--no-dependencies", "--max-attempts", "2"
    ).stdout
    assert first["trainer"]["generate_request_sqs_url"] in told and "--new-token makes another" in told

    (tmp_path / "turnmill.toml").write_text('[backend]\ntype = "aws"\nname = "commands"\n')
    asked = {"QueueUrl": first["trainer"]["generate_request_sqs_url"], "MessageBody": "{}"}
    sender = AwsClients(settings)
    sender.call_now("sqs", "send_message", **asked, MessageGroupId="g", MessageDeduplicationId="d")
    sender.close()
    counts = check_all_queues(RUN, root=tmp_path)
    assert {name: queue.available for name, queue in counts.items()} == {
        "rollout_request": 0,
        "rollout_response": 0,
        "generate_request": 1,
        "generate_response": 0,
    }

    # The same again changes nothing but what was said otherwise.
    second = begin(tmp_path, "--max-attempts", "4")
    assert (second["outputs"], second["worker_env"]) == (first["outputs"], None)
    assert recorded(settings).config["max_attempts"] == 4
    assert recorded(settings).worker_token_hash == run.worker_token_hash
    assert begin(tmp_path, "--new-token")["worker_env"] == file.name
    assert recorded(settings).worker_token_hash != run.worker_token_hash

    refused = turnmill(tmp_path, "end", RUN, "--deployment", "commands", code=2)
    assert "--yes" in refused.stderr
    for _ in range(2):
        turnmill(tmp_path, "end", RUN, "--deployment", "commands", "--yes")
    assert recorded(settings).status is RunStatus.SUCCEEDED
    clients = AwsClients(settings)
    assert clients.call_now("sqs", "list_queues", QueueNamePrefix=RUN).get("QueueUrls", []) == []
    clients.close()
    assert "has ended" in turnmill(tmp_path, "begin", RUN, "--deployment", "commands", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("begin", "x" * 33, "--deployment", "commands"), "33 characters"),
        (("begin", "of-nobody", "--deployment", "nowhere"), "turnmill deploy --name nowhere"),
        (("begin", "fine", "--deployment", "commands", "--max-attempts", "0"), "max-attempts"),
        (
            ("begin", "fine", "--deployment", "commands", "--config", CONFIG),
            "lr = 0.1 (parameters.toml:1) would",
        ),
        (("end", "of-nobody", "--deployment", "nowhere", "--yes"), "turnmill deploy --name nowhere"),
    ],
)
def test_what_can_not_be_is_told_before_anything_is_made(
    settings: AwsSettings, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / CONFIG).write_text("lr = 0.1\n")
    assert said in turnmill(tmp_path, *arguments, code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG]
    assert os.environ["AWS_ENDPOINT_URL"] == settings.endpoint_url


@pytest.mark.slow
def test_the_functions_of_a_deployment_with_a_key_of_its_own_may_use_it(emulator: Emulator, tmp_path: Path) -> None:
    settings = emulator.settings("keyed")
    clients = AwsClients(settings)
    key = clients.call_now("kms", "create_key")["KeyMetadata"]["Arn"]
    run_loop(deploy_deployment(clients, replace(settings, kms_key=key), lambda _: None))
    turnmill(tmp_path, "begin", "keyed-run", "--deployment", "keyed", "--no-dependencies")
    stored = json.dumps(clients.call_now("cloudformation", "get_template", StackName="keyed-run")["TemplateBody"])
    assert "kms:Decrypt" in stored and key in stored
    clients.close()
