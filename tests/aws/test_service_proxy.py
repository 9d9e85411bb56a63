"""The proxy that makes faults: each one looks to the SDK like that of the service, and is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from tests.aws.service_proxy import Faults, RunningProxy, running_proxy
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.settings import AwsSettings
from turnmill.errors import BackendUnavailable


@contextmanager
def through(
    emulator: Emulator, folder: Path, faults: Faults, *, max_tries: int
) -> Iterator[tuple[RunningProxy, AwsClients]]:
    with running_proxy(emulator.url, folder / "proxy", faults) as proxy:
        clients = AwsClients(AwsSettings(region="us-east-1", endpoint_url=proxy.url), max_tries=max_tries)
        yield proxy, clients
        clients.close()


def test_requests_pass_and_are_counted_by_operation(emulator: Emulator, tmp_path: Path) -> None:
    with through(emulator, tmp_path, Faults(), max_tries=1) as (proxy, clients):
        url = clients.call_now("sqs", "create_queue", QueueName="proxied")["QueueUrl"]
        clients.call_now("sqs", "send_message", QueueUrl=url, MessageBody="a")
        clients.call_now("s3", "create_bucket", Bucket="proxied-bucket")
        clients.call_now("s3", "put_object", Bucket="proxied-bucket", Key="a/b c", Body=b"\x00" * 100_000)
        assert (
            clients.call_now("s3", "get_object", Bucket="proxied-bucket", Key="a/b c")["Body"].read()
            == b"\x00" * 100_000
        )
        clients.call_now("dynamodb", "list_tables")
    counts = proxy.counts()
    assert counts.requests["sqs.SendMessage"] == counts.requests["dynamodb.ListTables"] == 1
    assert counts.requests["s3.PUT"] == 2
    assert not counts.faults


@pytest.mark.parametrize("faults", [Faults(throttle=1), Faults(throughput=1), Faults(refuse=1), Faults(lose=1)])
def test_a_fault_that_does_not_pass_is_unavailability(emulator: Emulator, tmp_path: Path, faults: Faults) -> None:
    with (
        through(emulator, tmp_path, faults, max_tries=1) as (proxy, clients),
        pytest.raises(BackendUnavailable, match="AWS dynamodb list_tables failed"),
    ):
        clients.call_now("dynamodb", "list_tables")
    assert proxy.counts().faults.total() == 1


@pytest.mark.slow
def test_faults_that_pass_are_not_seen(emulator: Emulator, tmp_path: Path) -> None:
    faults = Faults(throttle=0.1, throughput=0.05, refuse=0.05, lose=0.05, expire=0.05, seed=1)
    with through(emulator, tmp_path, faults, max_tries=10) as (proxy, clients):
        for _ in range(8):
            clients.call_now("dynamodb", "list_tables")
            clients.call_now("sqs", "list_queues")
            clients.call_now("s3", "list_buckets")
            clients.call_now("sns", "list_topics")
    assert {"throttle", "expire"} <= proxy.counts().faults.keys()


def test_a_message_that_is_said_to_be_deleted_comes_again(emulator: Emulator, tmp_path: Path) -> None:
    with through(emulator, tmp_path, Faults(undelete=1.0, end_lease=1.0), max_tries=1) as (proxy, clients):
        url = clients.call_now("sqs", "create_queue", QueueName="undeleted")["QueueUrl"]
        clients.call_now("sqs", "send_message", QueueUrl=url, MessageBody="a")
        [message] = clients.call_now("sqs", "receive_message", QueueUrl=url, VisibilityTimeout=300)["Messages"]
        entry = {"Id": "0", "ReceiptHandle": message["ReceiptHandle"]}
        told = clients.call_now("sqs", "delete_message_batch", QueueUrl=url, Entries=[entry])
        assert [item["Id"] for item in told["Successful"]] == ["0"]
        renewed = {**entry, "VisibilityTimeout": 300}
        clients.call_now("sqs", "change_message_visibility_batch", QueueUrl=url, Entries=[renewed])
        [again] = clients.call_now("sqs", "receive_message", QueueUrl=url)["Messages"]
        assert again["Body"] == "a"
    assert proxy.counts().faults == {"undelete": 1, "end_lease": 1}
