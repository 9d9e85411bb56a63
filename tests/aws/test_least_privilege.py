"""What the roles of the functions may do and may not, asked of an emulator that enforces the policies of IAM.

The functions are there under their own names and roles; their code sends the requests that a test asks for.
"""

import asyncio
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.aws.emulator import Emulator, running_emulator
from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.package import CodePackage, store
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.backends.aws.templates import deployment_tags, deployment_template, run_tags, run_template

STACK, OTHER = "trainer", "another"
HANDLER = """
import boto3
from botocore.exceptions import ClientError

def handler(event, context):
    codes = []
    for service, operation, parameters in event:
        try:
            getattr(boto3.client(service), operation)(**parameters)
            codes.append("done")
        except ClientError as error:
            code = error.response["Error"]["Code"]
            codes.append("denied" if "AccessDenied" in code or "Authorization" in code or code == "403" else code)
    return codes
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running_emulator(tmp_path_factory.mktemp("strict"), {"AUTH": "true"}) as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """Two external runs of one deployment."""

    clients: AwsClients
    settings: AwsSettings
    bucket: str

    def ask(self, function: str, *requests: tuple[str, str, dict[str, Any]]) -> list[str]:
        """What became of each request that a function of the first run sends: done, denied, or its error code."""
        name = StackNames(stack=STACK).function(function)
        answer = self.clients.call_now("lambda", "invoke", FunctionName=name, Payload=json.dumps(requests).encode())
        found: list[str] = json.loads(answer["Payload"].read())
        return found

    def url(self, queue: str, *, stack: str = STACK) -> str:
        name = StackNames(stack=stack).queue(queue)
        return str(self.clients.call_now("sqs", "get_queue_url", QueueName=name)["QueueUrl"])


@pytest.fixture(scope="module")
def deployed(strict: Emulator) -> Iterator[Deployed]:
    settings = strict.settings("strict")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in strict.environ.items():
            patch.setenv(name, value)
        clients = AwsClients(settings)
        bucket = asyncio.run(_deploy(clients, settings))
        yield Deployed(clients=clients, settings=settings, bucket=bucket)
        clients.close()


async def _deploy(clients: AwsClients, settings: AwsSettings) -> str:
    template = deployment_template(settings)
    for policy in ("BucketPolicy", "AlertsPolicy"):
        # Requests to the emulator don't come by TLS.
        document = template["Resources"][policy]["Properties"]["PolicyDocument"]
        document["Statement"] = [each for each in document["Statement"] if each["Sid"] != "TlsOnly"]
    bucket = (await stacks.deploy(clients, settings.name, template, deployment_tags(settings)))["BucketName"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for folder in ("turnmill", "turnmill/backends", "turnmill/backends/aws", "turnmill/backends/aws/lambdas"):
            opened.writestr(f"{folder}/__init__.py", "")
        for name in ("proxy", "rollout", "responses"):
            opened.writestr(f"turnmill/backends/aws/lambdas/{name}.py", HANDLER)
    code = await store(clients, bucket, CodePackage(digest="asks", content=buffer.getvalue(), num_unpacked_bytes=1))
    for stack in (STACK, OTHER):
        run = run_template(settings, stack, stack, 1, external=True, code=code)
        # The queue of answers is for the test to read.
        del run["Resources"]["ResponsesSource"]
        # Requests to the emulator don't come by TLS.
        del run["Resources"]["QueuesPolicy"]
        await stacks.deploy(clients, stack, run, run_tags(settings, stack))
    return bucket


async def test_a_queue_takes_no_request_that_does_not_come_by_tls(deployed: Deployed) -> None:
    template = run_template(deployed.settings, "by-tls", "by-tls", 1)
    tags = run_tags(deployed.settings, "by-tls")
    await stacks.deploy(deployed.clients, "by-tls", template, tags)
    for name in (StackNames(stack="by-tls").queue(queue) for queue in ("rollout_request", "generate_request-0")):
        with pytest.raises(Refused, match="AccessDenied"):
            deployed.clients.call_now("sqs", "get_queue_url", QueueName=name)
    del template["Resources"]["QueuesPolicy"]
    await stacks.deploy(deployed.clients, "by-tls", template, tags)
    deployed.clients.call_now("sqs", "get_queue_url", QueueName=StackNames(stack="by-tls").queue("rollout_request"))
    await stacks.delete(deployed.clients, "by-tls", tags)


def message(url: str) -> dict[str, str]:
    return {"QueueUrl": url, "MessageBody": "m", "MessageGroupId": "g", "MessageDeduplicationId": "d"}


def item(table: str, partition: str) -> dict[str, Any]:
    return {"TableName": table, "Key": {"pk": {"S": partition}, "sk": {"S": "x"}}}


def put(table: str, partition: str) -> dict[str, Any]:
    return {"TableName": table, "Item": {"pk": {"S": partition}, "sk": {"S": "x"}}}


def query(table: str, partition: str) -> dict[str, Any]:
    return {
        "TableName": table,
        "KeyConditionExpression": "pk = :pk",
        "ExpressionAttributeValues": {":pk": {"S": partition}},
    }


def test_a_function_sends_to_and_receives_from_its_own_queues_alone(deployed: Deployed) -> None:
    requests, responses = deployed.url("rollout_request"), deployed.url("rollout_response")
    generate, answers = deployed.url("generate_request"), deployed.url("generate_response")
    others = deployed.url("rollout_request", stack=OTHER)

    def sends_and_receives(function: str, url: str) -> list[str]:
        return deployed.ask(
            function, ("sqs", "send_message", message(url)), ("sqs", "receive_message", {"QueueUrl": url})
        )

    assert sends_and_receives("proxy", requests) == ["denied", "done"]
    assert sends_and_receives("proxy", responses) == ["done", "denied"]
    assert sends_and_receives("proxy", generate) == ["done", "denied"]
    assert sends_and_receives("rollout", requests) == ["done", "denied"]
    assert sends_and_receives("responses", answers) == ["denied", "done"]
    for function in ("proxy", "rollout", "responses"):
        assert sends_and_receives(function, others) == ["denied", "denied"]
        assert deployed.ask(function, ("sqs", "purge_queue", {"QueueUrl": requests})) == ["denied"]
        assert deployed.ask(function, ("sqs", "delete_queue", {"QueueUrl": requests})) == ["denied"]


@pytest.mark.parametrize("function", ["proxy", "rollout", "responses"])
def test_a_function_writes_to_the_records_of_its_run_and_to_no_others(deployed: Deployed, function: str) -> None:
    own, others = StackNames(stack=STACK).table, StackNames(stack=OTHER).table
    root = deployed.settings.table
    assert deployed.ask(
        function,
        ("dynamodb", "put_item", put(own, "samples/run")),
        ("dynamodb", "get_item", item(own, "samples/run")),
        ("dynamodb", "scan", {"TableName": own}),
        ("dynamodb", "delete_table", {"TableName": own}),
        ("dynamodb", "put_item", put(others, "samples/run")),
        ("dynamodb", "get_item", item(others, "samples/run")),
    ) == ["done", "done", "denied", "denied", "denied", "denied"]
    # Of the deployment's records it reads that of the run. In which partitions, the emulator does not look at: it knows
    # no dynamodb:LeadingKeys (test_templates has the condition).
    tells = "done" if function == "proxy" else "denied"
    assert deployed.ask(
        function,
        ("dynamodb", "get_item", item(root, "runs/all")),
        ("dynamodb", "query", query(root, "runs/all")),
        ("dynamodb", "delete_item", item(root, "runs/all")),
        ("dynamodb", "put_item", put(root, "alerts/all")),
    ) == ["done", "denied", "denied", tells]


@pytest.mark.parametrize("function", ["proxy", "rollout", "responses"])
def test_a_function_reads_and_writes_below_the_prefix_of_its_run(deployed: Deployed, function: str) -> None:
    def put_object(key: str) -> tuple[str, str, dict[str, str]]:
        return ("s3", "put_object", {"Bucket": deployed.bucket, "Key": key, "Body": "x"})

    assert deployed.ask(
        function,
        put_object(f"runs/{STACK}/blobs/x"),
        put_object(f"runs/{STACK}-2/blobs/x"),
        put_object(f"runs/{OTHER}/blobs/x"),
        put_object("lambda/x.zip"),
        put_object("records/runs/x"),
        ("s3", "get_object", {"Bucket": deployed.bucket, "Key": f"runs/{STACK}/absent"}),
        ("s3", "get_object", {"Bucket": deployed.bucket, "Key": f"runs/{OTHER}/stack"}),
        ("s3", "list_object_versions", {"Bucket": deployed.bucket}),
        ("s3", "delete_bucket", {"Bucket": deployed.bucket}),
    ) == ["done", "denied", "denied", "denied", "denied", "NoSuchKey", "denied", "denied", "denied"]


def test_the_proxy_tells_people_and_the_others_do_not(deployed: Deployed) -> None:
    topic = {"TopicArn": f"arn:aws:sns:us-east-1:000000000000:{deployed.settings.topic}", "Message": "m"}
    assert deployed.ask("proxy", ("sns", "publish", topic)) == ["done"]
    assert deployed.ask("rollout", ("sns", "publish", topic)) == ["denied"]
    assert deployed.ask("responses", ("sns", "publish", topic)) == ["denied"]


@pytest.mark.parametrize("function", ["proxy", "rollout", "responses"])
def test_a_function_has_no_other_rights(deployed: Deployed, function: str) -> None:
    assert (
        deployed.ask(
            function,
            ("iam", "list_roles", {}),
            ("cloudformation", "delete_stack", {"StackName": STACK}),
            ("lambda", "delete_function", {"FunctionName": StackNames(stack=STACK).function("proxy")}),
            ("logs", "create_log_group", {"logGroupName": f"/aws/lambda/{STACK}-more"}),
        )
        == ["denied"] * 4
    )
