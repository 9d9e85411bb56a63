"""The clients: errors get their names, and expired credentials are read anew."""

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
