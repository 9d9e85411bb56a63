"""The clients: errors get their names, and expired credentials are read anew."""

import os
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.errors import BackendUnavailable, InvalidInput


async def test_a_call_answers_and_a_refusal_keeps_its_code(emulator: Emulator) -> None:
    clients = AwsClients(emulator.settings("clients"))
    made = await clients.call("sqs", "create_queue", QueueName="clients-plain")
    assert made["QueueUrl"].endswith("clients-plain")
    with pytest.raises(Refused) as refused:
        await clients.call("sqs", "get_queue_url", QueueName="clients-absent")
    assert "NonExistentQueue" in refused.value.code or "QueueDoesNotExist" in refused.value.code
    clients.close()


async def test_a_service_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    clients = AwsClients(AwsSettings(region="us-east-1", endpoint_url="http://127.0.0.1:9"), max_tries=1)
    with pytest.raises(BackendUnavailable, match="AWS sqs list_queues failed"):
        await clients.call("sqs", "list_queues")


def test_names_that_break_a_limit_are_refused_with_the_limit() -> None:
    with pytest.raises(InvalidInput, match="at most 32"):
        StackNames(stack="x" * 33)
    with pytest.raises(InvalidInput, match="begin with a letter"):
        StackNames(stack="1x")
    with pytest.raises(InvalidInput, match="at most 21"):
        AwsSettings(name="x" * 22)
    with pytest.raises(InvalidInput, match="lower-case"):
        AwsSettings(name="Turnmill")


def test_what_belongs_to_a_run_is_named_within_the_limits() -> None:
    settings = AwsSettings(name="a" * 21)
    assert settings.run_stack("my-trainer") == "my-trainer"
    names = StackNames(stack=settings.run_stack("a run of any name whatsoever, however long it may be " * 3))
    assert len(names.stack) == 32
    assert names.queue("rollout_request").endswith("-SageMaker-RolloutRequestQueue.fifo")
    assert names.queue("generate_request-3").endswith("-SageMaker-GenerateRequestQueue-3.fifo")
    assert names.dead_letter_queue("generate_response").endswith("-SageMaker-GenerateResponseDeadLetters.fifo")
    assert len(names.function("responses")) <= 64
    assert len(names.dead_letter_queue("generate_response-123")) <= 80


def test_configuration_that_cannot_be_used_is_the_users_to_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InvalidInput, match=r"profile \(nobody\) could not be found: AWS_PROFILE names it"):
        AwsClients(AwsSettings(region="us-east-1"))
    monkeypatch.delenv("AWS_PROFILE")
    broken = tmp_path / "config"
    broken.write_text("no section")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(broken))
    with pytest.raises(InvalidInput, match="Unable to parse config file"):
        AwsClients(AwsSettings(region="us-east-1"))


def test_without_credentials_it_says_how_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    clients = AwsClients(AwsSettings(region="us-east-1"))
    with pytest.raises(InvalidInput, match="Unable to locate credentials: set AWS_PROFILE"):
        clients.call_now("sts", "get_caller_identity")


async def test_who_waits_for_a_service_that_does_not_answer_is_told_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    clients = AwsClients(AwsSettings(region="us-east-1", endpoint_url="http://127.0.0.1:9"), max_tries=4)
    with caplog.at_level("WARNING"), pytest.raises(BackendUnavailable):
        await clients.call("sqs", "list_queues")
    assert "AWS ListQueues is tried again and again" in caplog.text
