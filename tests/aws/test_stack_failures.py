"""Stacks when things go wrong: answers that are lost, and a resource that can't be deleted for a while."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from tests.aws.service_proxy import Faults, running_proxy
from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.emptying import delete_objects
from turnmill.backends.aws.leftovers import what_is_left
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.aws.templates import run_tags, run_template
from turnmill.errors import BackendUnavailable

# Ends well, but for a deletion while the queue `guard` is there.
GUARDED = """
import json, urllib.request, boto3
def handler(event, context):
    status = "SUCCESS"
    if event["RequestType"] == "Delete" and boto3.client("sqs").list_queues(QueueNamePrefix="guard").get("QueueUrls"):
        status = "FAILED"
    answer = {name: event[name] for name in ("StackId", "RequestId", "LogicalResourceId")}
    answer |= {"Status": status, "Reason": "the guard is there", "PhysicalResourceId": "guarded"}
    body = json.dumps(answer).encode()
    urllib.request.urlopen(urllib.request.Request(event["ResponseURL"], data=body, method="PUT"))
"""


@pytest.fixture
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    clients = AwsClients(emulator.settings("failing"))
    yield clients
    clients.close()


@pytest.fixture
def guard(clients: AwsClients) -> str:
    """The ARN of the function behind resources that can't be deleted while they are guarded."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr("index.py", GUARDED)
    made = clients.call_now(
        "lambda",
        "create_function",
        FunctionName="guard",
        Code={"ZipFile": buffer.getvalue()},
        Handler="index.handler",
        Role="arn:aws:iam::000000000000:role/guard",
        Runtime="python3.12",
        Timeout=30,
    )
    return str(made["FunctionArn"])


async def test_a_bucket_is_emptied_of_what_somebody_else_removes_meanwhile(
    clients: AwsClients, emulator: Emulator, tmp_path: Path
) -> None:
    bucket = "emptied-by-two"
    clients.call_now("s3", "create_bucket", Bucket=bucket)
    for number in range(20):
        clients.call_now("s3", "create_multipart_upload", Bucket=bucket, Key=f"parts/{number}")
    # An upload that was aborted, whose answer was lost, is not there when that is asked for again.
    with running_proxy(emulator.url, tmp_path, Faults(lose=0.3, seed=5)) as proxy:
        behind = AwsClients(AwsSettings(name="failing", region="us-east-1", endpoint_url=proxy.url))
        await delete_objects(behind, bucket, "parts/")
        behind.close()
    assert proxy.counts().faults["lose"] > 0
    assert "Uploads" not in clients.call_now("s3", "list_multipart_uploads", Bucket=bucket)


async def test_what_can_not_be_deleted_is_named_and_deleted_when_it_can_be(
    clients: AwsClients, emulator: Emulator, guard: str
) -> None:
    settings, name = emulator.settings("failing"), "failing-guarded"
    template, tags = run_template(settings, name, name, 1), run_tags(settings, name)
    template["Resources"]["Guarded"] = {"Type": "Custom::Guarded", "Properties": {"ServiceToken": guard}}
    await stacks.deploy(clients, name, template, tags)
    url = clients.call_now("sqs", "create_queue", QueueName="guard")["QueueUrl"]
    with pytest.raises(BackendUnavailable, match=r"can't be deleted \(DELETE_FAILED\): Guarded: .*the guard is there"):
        await stacks.delete(clients, name, tags)
    with pytest.raises(BackendUnavailable, match="its deletion did not end; delete it again, then deploy"):
        await stacks.deploy(clients, name, template, tags)
    clients.call_now("sqs", "delete_queue", QueueUrl=url)
    await stacks.delete(clients, name, tags)
    assert await stacks.find(clients, name) is None
    assert await what_is_left(clients, name, tags) == []


@pytest.mark.slow
async def test_a_stack_is_made_and_deleted_once_although_answers_are_lost(
    clients: AwsClients, emulator: Emulator, tmp_path: Path
) -> None:
    settings, name = emulator.settings("failing"), "failing-lost"
    template, tags = run_template(settings, name, name, 1), run_tags(settings, name)
    faults = Faults(throttle=0.04, refuse=0.04, lose=0.2, expire=0.02, seed=3)
    with running_proxy(emulator.url, tmp_path / "proxy", faults) as proxy:
        disturbed = AwsClients(AwsSettings(name="failing", region="us-east-1", endpoint_url=proxy.url))
        outputs = await stacks.deploy(disturbed, name, template, tags)
        found = await stacks.find(clients, name)
        assert found is not None and found.status == "CREATE_COMPLETE" and found.outputs == outputs
        assert await stacks.deploy(disturbed, name, template, tags) == outputs
        await stacks.delete(disturbed, name, tags)
        disturbed.close()
    assert await stacks.find(clients, name) is None
    assert await what_is_left(clients, name, tags) == []
    assert proxy.counts().faults["lose"] > 0
