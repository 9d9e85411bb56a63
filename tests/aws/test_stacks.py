"""Stacks on the emulator: deploying twice is once, deleting leaves nothing, and a stack of somebody else is let be."""

import asyncio
import io
import itertools
import json
import os
import signal
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aws.emulator import Emulator
from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import bucket_of, delete_deployment, deploy_deployment, key_of, runs_of
from turnmill.backends.aws.functions import CodeLocation
from turnmill.backends.aws.infra import RunResources, StackRunInfra
from turnmill.backends.aws.leftovers import what_is_left
from turnmill.backends.aws.package import CodePackage, pack, store
from turnmill.backends.aws.resources import Json
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.backends.aws.templates import deployment_tags, run_tags, run_template
from turnmill.errors import BackendUnavailable, Conflict, InvalidInput, NotFound

_numbers = itertools.count()
# Who may call the proxy.
CALLER = "arn:aws:iam::000000000000:role/agents"


@pytest.fixture
def settings(emulator: Emulator) -> AwsSettings:
    """Of a deployment that no other test has."""
    return emulator.settings(f"cfn{next(_numbers)}")


@pytest.fixture
def clients(settings: AwsSettings) -> Iterator[AwsClients]:
    clients = AwsClients(settings)
    yield clients
    clients.close()


def resources_of(clients: AwsClients, stack: str) -> list[tuple[str, str, str]]:
    answer = clients.call_now("cloudformation", "describe_stack_resources", StackName=stack)
    return sorted(
        (found["LogicalResourceId"], found["PhysicalResourceId"], str(found["Timestamp"]))
        for found in answer["StackResources"]
    )


def listed(clients: AwsClients, name: str) -> list[str]:
    """What the services list under names that begin with `name`, whatever its tags."""
    found: list[str] = clients.call_now("sqs", "list_queues", QueueNamePrefix=name).get("QueueUrls", [])
    tables = clients.call_now("dynamodb", "list_tables")["TableNames"]
    functions = [each["FunctionName"] for each in clients.call_now("lambda", "list_functions")["Functions"]]
    groups = [each["logGroupName"] for each in clients.call_now("logs", "describe_log_groups")["logGroups"]]
    roles = [each["Path"] + each["RoleName"] for each in clients.call_now("iam", "list_roles")["Roles"]]
    buckets = [each["Name"] for each in clients.call_now("s3", "list_buckets")["Buckets"]]
    topics = [each["TopicArn"] for each in clients.call_now("sns", "list_topics")["Topics"]]
    mappings = [each["EventSourceArn"] for each in sources(clients)]
    others = [*tables, *functions, *groups, *roles, *buckets, *topics, *mappings]
    return found + [each for each in others if name in each]


def as_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def num_messages(clients: AwsClients, url: str) -> int:
    """Available or in flight."""
    answer = clients.call_now("sqs", "get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
    names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    return sum(int(answer["Attributes"][name]) for name in names)


def sources(clients: AwsClients) -> list[Json]:
    found: list[Json] = clients.call_now("lambda", "list_event_source_mappings")["EventSourceMappings"]
    return found


async def deployed(clients: AwsClients, settings: AwsSettings) -> dict[str, str]:
    return await deploy_deployment(clients, settings, lambda _: None)


def stack_of(settings: AwsSettings, *, run_id: str = "run", num_replicas: int = 1) -> tuple[str, Json, dict[str, str]]:
    """Name, template and tags of a run's stack."""
    name = f"{settings.name}-{run_id}"
    return name, run_template(settings, name, run_id, num_replicas), run_tags(settings, run_id)


async def test_deploying_a_deployment_twice_is_deploying_it_once(clients: AwsClients, settings: AwsSettings) -> None:
    told: list[str] = []
    first = await deploy_deployment(clients, settings, told.append)
    before = resources_of(clients, settings.name)
    assert len(before) == 6
    second = await deploy_deployment(clients, settings, told.append)
    assert second == first
    assert set(first) == {"BucketName", "RecordsTableName", "AlertTopicArn", "MetricsLogGroupName"}
    assert resources_of(clients, settings.name) == before
    assert told[-1] == f"the stack {settings.name} is as it should be"
    found = await stacks.find(clients, settings.name)
    assert found is not None and found.status == "CREATE_COMPLETE"
    assert await bucket_of(clients, settings) == first["BucketName"]


async def test_a_key_of_ones_own_is_kept_where_none_is_named(clients: AwsClients, settings: AwsSettings) -> None:
    key = clients.call_now("kms", "create_key")["KeyMetadata"]["Arn"]
    await deployed(clients, replace(settings, kms_key=key))
    told: list[str] = []
    await deploy_deployment(clients, settings, told.append)
    assert told == [f"the bucket goes on encrypting with {key}", f"the stack {settings.name} is as it should be"]
    assert await key_of(clients, settings) == key
    await delete_deployment(clients, settings, lambda _: None)
    assert await key_of(clients, settings) is None


async def test_a_deployment_is_removed_with_what_is_stored_there_and_nothing_is_left(
    clients: AwsClients, settings: AwsSettings
) -> None:
    bucket = (await deployed(clients, settings))["BucketName"]
    for body in (b"old", b"new"):
        clients.call_now("s3", "put_object", Bucket=bucket, Key="models/a", Body=body)
    clients.call_now("s3", "delete_object", Bucket=bucket, Key="models/a")
    clients.call_now("s3", "create_multipart_upload", Bucket=bucket, Key="models/b")
    told: list[str] = []
    await delete_deployment(clients, settings, told.append)
    # Two versions and the marker of the deletion.
    assert f"3 object versions of the bucket {bucket} are deleted" in told
    assert listed(clients, settings.name) == []
    await delete_deployment(clients, settings, told.append)


async def test_a_deployment_that_still_has_runs_is_not_removed(clients: AwsClients, settings: AwsSettings) -> None:
    await deployed(clients, settings)
    name, template, tags = stack_of(settings)
    await stacks.deploy(clients, name, template, tags)
    assert await runs_of(clients, settings) == ["run"]
    with pytest.raises(Conflict, match="these runs stand on: run"):
        await delete_deployment(clients, settings, lambda _: None)
    await stacks.delete(clients, name, tags)
    await delete_deployment(clients, settings, lambda _: None)


async def test_what_is_deployed_for_a_run_is_there_once_and_gone_after_its_deletion(
    clients: AwsClients, settings: AwsSettings
) -> None:
    name, template, tags = stack_of(settings, num_replicas=2)
    outputs = await stacks.deploy(clients, name, template, tags)
    before = resources_of(clients, name)
    # Five queues, each with the queue of its dead letters, and a table.
    assert len(before) == 12
    assert await stacks.deploy(clients, name, template, tags) == outputs
    assert resources_of(clients, name) == before
    assert len(listed(clients, name)) == 11
    for queue in ("rollout_request", "generate_request-0", "generate_request-1"):
        clients.call_now("sqs", "get_queue_url", QueueName=StackNames(stack=name).queue(queue))
    assert outputs["TasksTableName"] == StackNames(stack=name).table
    url = outputs["RequestResponseQueueUrl"]
    attributes = clients.call_now("sqs", "get_queue_attributes", QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert attributes["DeduplicationScope"] == "messageGroup"
    assert attributes["FifoThroughputLimit"] == "perMessageGroupId"
    assert clients.call_now("sqs", "list_queue_tags", QueueUrl=url)["Tags"].items() >= tags.items()
    await stacks.delete(clients, name, tags)
    assert listed(clients, name) == []
    with pytest.raises(NotFound):
        await stacks.outputs(clients, name)
    await stacks.delete(clients, name, tags)


async def test_a_replica_more_is_one_queue_more_and_the_others_stay(clients: AwsClients, settings: AwsSettings) -> None:
    name, template, tags = stack_of(settings, num_replicas=1)
    outputs = await stacks.deploy(clients, name, template, tags)
    clients.call_now(
        "sqs", "send_message", QueueUrl=outputs["RolloutQueueUrl"], MessageBody="m",
        MessageGroupId="g", MessageDeduplicationId="d",
    )  # fmt: skip
    _, larger, _ = stack_of(settings, num_replicas=2)
    await stacks.deploy(clients, name, larger, tags)
    assert len(resources_of(clients, name)) == 12
    received = clients.call_now("sqs", "receive_message", QueueUrl=outputs["RolloutQueueUrl"])
    assert [message["Body"] for message in received["Messages"]] == ["m"]


async def test_two_that_deploy_at_once_come_to_the_same_end(clients: AwsClients, settings: AwsSettings) -> None:
    name, template, tags = stack_of(settings)
    ends = await asyncio.gather(*(stacks.deploy(clients, name, template, tags) for _ in range(4)))
    assert all(end == ends[0] for end in ends)
    found = await stacks.find_tagged(clients, tags)
    assert [stack.name for stack in found] == [name]
    _, larger, _ = stack_of(settings, num_replicas=9)
    await asyncio.gather(*(stacks.deploy(clients, name, larger, tags) for _ in range(4)))
    assert len(resources_of(clients, name)) == 26
    await asyncio.gather(*(stacks.delete(clients, name, tags) for _ in range(3)))
    assert listed(clients, name) == []


async def test_a_stack_of_somebody_else_is_neither_changed_nor_deleted(
    clients: AwsClients, settings: AwsSettings
) -> None:
    name, template, tags = stack_of(settings)
    clients.call_now(
        "cloudformation", "create_stack", StackName=name, TemplateBody='{"Resources":{"Q":{"Type":"AWS::SQS::Queue"}}}'
    )
    for attempt in (stacks.deploy(clients, name, template, tags), stacks.delete(clients, name, tags)):
        with pytest.raises(Conflict, match="belongs to somebody else: it has no turnmill:deployment"):
            await attempt
    assert len(resources_of(clients, name)) == 1
    clients.call_now("cloudformation", "delete_stack", StackName=name)


async def test_a_run_of_the_name_of_the_deployment_does_not_get_its_stack(
    clients: AwsClients, settings: AwsSettings
) -> None:
    await deployed(clients, settings)
    infra = StackRunInfra(clients, settings, settings.name, {}, RunResources(num_replicas=1))
    with pytest.raises(Conflict, match="belongs to somebody else"):
        await infra.deploy()
    with pytest.raises(Conflict, match="belongs to somebody else"):
        await stacks.delete(clients, settings.name, run_tags(settings, settings.name))
    with pytest.raises(Conflict, match="turnmill:run=run"):
        name, template, tags = stack_of(settings)
        await stacks.deploy(clients, name, template, tags)
        await stacks.deploy(clients, name, template, deployment_tags(settings))


async def test_what_can_not_be_made_is_named_and_made_when_it_can_be(
    clients: AwsClients, settings: AwsSettings
) -> None:
    name, good, tags = stack_of(settings)
    # An attribute that a queue does not have.
    bad = good | {"Outputs": {"Url": {"Value": {"Fn::GetAtt": ["RolloutRequestQueue", "Colour"]}}}}
    with pytest.raises((BackendUnavailable, InvalidInput), match="Colour"):
        await stacks.deploy(clients, name, bad, tags)
    found = await stacks.find(clients, name)
    told: list[str] = []
    await stacks.deploy(clients, name, good, tags, tell=told.append)
    if found is not None:
        assert found.status == "ROLLBACK_COMPLETE"
        assert "it is removed and made anew" in told[0]
    await stacks.delete(clients, name, tags)


async def test_a_deployment_that_was_killed_in_the_middle_is_completed_by_the_next(
    clients: AwsClients, settings: AwsSettings, emulator: Emulator, tmp_path: Path
) -> None:
    name, template, tags = stack_of(settings, num_replicas=3)
    (tmp_path / "stack-creating").touch()
    code = f"""
import asyncio
from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.settings import AwsSettings
clients = AwsClients(AwsSettings(name={settings.name!r}))
asyncio.run(stacks.deploy(clients, {name!r}, {template!r}, {tags!r}))
"""
    environ = {**os.environ, **emulator.environ, "TURNMILL_FAILPOINTS": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environ)
    assert await process.wait() == -signal.SIGKILL
    outputs = await stacks.deploy(clients, name, template, tags)
    assert outputs["TasksTableName"] == StackNames(stack=name).table
    assert len(resources_of(clients, name)) == 14
    await stacks.delete(clients, name, tags)
    assert listed(clients, name) == []


async def test_names_are_refused_with_the_limit_before_anything_is_made(
    clients: AwsClients, settings: AwsSettings
) -> None:
    name, template, tags = stack_of(settings)
    with pytest.raises(InvalidInput, match="at most 32"):
        await stacks.deploy(clients, "x" * 33, template, tags)
    with pytest.raises(InvalidInput, match="begin with a letter"):
        await stacks.deploy(clients, "1x", template, tags)
    with pytest.raises(InvalidInput, match="51200"):
        await stacks.deploy(clients, name, run_template(settings, name, "run", 99), tags)
    with pytest.raises(InvalidInput, match="at most 500"):
        await stacks.deploy(clients, name, run_template(settings, name, "run", 300), tags)
    with pytest.raises(InvalidInput, match=r"run id 'run\*' can't be used"):
        StackRunInfra(clients, settings, "run*", {}, RunResources(num_replicas=1))
    assert await stacks.find_tagged(clients, deployment_tags(settings)) == []


async def test_what_is_left_is_found_by_name_and_tags(clients: AwsClients, settings: AwsSettings) -> None:
    _, _, tags = stack_of(settings)
    name = f"{settings.name}-run"
    others: dict[str, Any] = {"turnmill:deployment": settings.name, "turnmill:run": "another"}
    for queue, its_tags in ((f"{name}-left", tags), (f"{name}-other", others), (f"{name}-plain", {})):
        clients.call_now("sqs", "create_queue", QueueName=queue, tags=its_tags)
    clients.call_now("logs", "create_log_group", logGroupName=f"/aws/lambda/{name}-left", tags=tags)
    assert await what_is_left(clients, name, tags) == [f"queue {name}-left", f"log group /aws/lambda/{name}-left"]
    clients.call_now("logs", "delete_log_group", logGroupName=f"/aws/lambda/{name}-left")


async def test_an_external_trainer_gets_its_functions_and_nothing_is_left_of_them(
    clients: AwsClients, settings: AwsSettings
) -> None:
    bucket = (await deployed(clients, settings))["BucketName"]
    code = await store(clients, bucket, pack(with_dependencies=False))
    assert await store(clients, bucket, pack(with_dependencies=False)) == code
    name, template, tags = external_stack(settings, code)
    outputs = await stacks.deploy(clients, name, template, tags)
    before = resources_of(clients, name)
    assert await stacks.deploy(clients, name, template, tags) == outputs
    assert resources_of(clients, name) == before
    function = clients.call_now("lambda", "get_function", FunctionName=outputs["RolloutFunctionName"])
    assert function["Configuration"]["Handler"] == "turnmill.backends.aws.lambdas.rollout.handler"
    assert function["Configuration"]["Environment"]["Variables"] == {
        "TURNMILL_BUCKET": bucket,
        "TURNMILL_DEPLOYMENT": settings.name,
        "TURNMILL_RUN": name,
        "TURNMILL_STACK": name,
    }
    policy = clients.call_now("lambda", "get_policy", FunctionName=outputs["ProxyFunctionName"])["Policy"]
    assert "lambda:InvokeFunctionUrl" in policy and '"lambda:InvokeFunction"' in policy and CALLER in policy
    assert len([each for each in sources(clients) if name in each["EventSourceArn"]]) == 1
    await stacks.delete(clients, name, tags)
    assert listed(clients, name) == []


async def test_the_functions_are_called_by_name_by_url_and_by_their_queue(
    clients: AwsClients, settings: AwsSettings
) -> None:
    bucket = (await deployed(clients, settings))["BucketName"]
    code = await store(clients, bucket, tiny_package())
    name, template, tags = external_stack(settings, code)
    outputs = await stacks.deploy(clients, name, template, tags)
    answer = clients.call_now("lambda", "invoke", FunctionName=outputs["RolloutFunctionArn"], Payload=b'{"a": 1}')
    assert json.loads(answer["Payload"].read()) == {"event": {"a": 1}, "run": name}
    config = clients.call_now("lambda", "get_function_url_config", FunctionName=outputs["ProxyFunctionName"])
    assert (config["FunctionUrl"], config["AuthType"]) == (outputs["ProxyFunctionUrl"], "AWS_IAM")
    url = outputs["RequestResponseQueueUrl"]
    message = {"MessageBody": "m", "MessageGroupId": "g", "MessageDeduplicationId": "d"}
    clients.call_now("sqs", "send_message", QueueUrl=url, **message)
    async with asyncio.timeout(30):
        for pause_s in itertools.repeat(0.1):
            if num_messages(clients, url) == 0:
                break
            await asyncio.sleep(pause_s)
    await stacks.delete(clients, name, tags)
    assert listed(clients, name) == []


def external_stack(settings: AwsSettings, code: CodeLocation) -> tuple[str, Json, dict[str, str]]:
    """As `stack_of`, for an external trainer; the run has the name of its stack."""
    name = f"{settings.name}-ext"
    template = run_template(settings, name, name, 2, external=True, callers=[CALLER], code=code)
    return name, template, run_tags(settings, name)


def tiny_package() -> CodePackage:
    """Handlers that answer with what they got, where the real ones are."""
    handler = (
        "import os\ndef handler(event, context):\n    return {'event': event, 'run': os.environ['TURNMILL_RUN']}\n"
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for folder in ("turnmill", "turnmill/backends", "turnmill/backends/aws", "turnmill/backends/aws/lambdas"):
            opened.writestr(f"{folder}/__init__.py", "")
        for name in ("proxy", "rollout", "responses"):
            opened.writestr(f"turnmill/backends/aws/lambdas/{name}.py", handler)
    return CodePackage(digest="tiny", content=buffer.getvalue(), num_unpacked_bytes=1)


async def test_deployments_and_runs_of_one_name_in_two_regions_know_nothing_of_each_other(
    clients: AwsClients, settings: AwsSettings
) -> None:
    elsewhere = replace(settings, region="eu-west-1")
    there = AwsClients(elsewhere)
    for place, of_place in ((clients, settings), (there, elsewhere)):
        await deployed(place, of_place)
    bucket, tags = f"{settings.name}-000000000000-eu-west-1", deployment_tags(elsewhere)
    # CloudFormation gives the tags of a stack to its buckets and roles, too; the emulator does not.
    there.call_now("s3", "put_bucket_tagging", Bucket=bucket, Tagging={"TagSet": as_list(tags)})
    assert f"bucket {bucket}" in await what_is_left(there, settings.name, tags)
    await delete_deployment(clients, settings, lambda _: None)

    # Made here, as the emulator gives the roles of both stacks one name.
    name, _, tags = external_stack(elsewhere, CodeLocation(bucket="b", key="k"))
    there.call_now(
        "iam",
        "create_role",
        RoleName=f"{name}-ProxyRole-1A2B",
        Path=f"{StackNames(stack=name).role_path}eu-west-1/",
        AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": []}),
        Tags=as_list(tags),
    )
    assert await what_is_left(there, name, tags) == [f"role {name}-ProxyRole-1A2B"]
    assert await what_is_left(clients, name, tags) == []

    there.call_now("iam", "delete_role", RoleName=f"{name}-ProxyRole-1A2B")
    await delete_deployment(there, elsewhere, lambda _: None)
    there.close()


async def test_a_run_is_deployed_into_its_deployment_and_deleted_with_its_objects(
    clients: AwsClients, settings: AwsSettings
) -> None:
    infra = StackRunInfra(clients, settings, "a.run", {}, RunResources(num_replicas=1))
    with pytest.raises(InvalidInput, match=f"turnmill deploy --name {settings.name}"):
        await infra.deploy()
    assert await infra.retire() == 0
    bucket = (await deployed(clients, settings))["BucketName"]
    names = await infra.deploy()
    assert len(set(names)) == len(names) == 11
    assert await infra.deploy() == names
    for key in ("runs/a.run/blobs/x", "runs/a.run-2/blobs/x"):
        clients.call_now("s3", "put_object", Bucket=bucket, Key=key, Body=b"x")
    await infra.delete()
    await infra.delete()
    left = clients.call_now("s3", "list_object_versions", Bucket=bucket)["Versions"]
    assert [version["Key"] for version in left] == ["runs/a.run-2/blobs/x"]
    assert listed(clients, settings.run_stack("a.run")) == []


async def test_a_run_of_many_replicas_is_deployed_from_a_template_in_the_bucket(
    clients: AwsClients, settings: AwsSettings
) -> None:
    await deployed(clients, settings)
    infra = StackRunInfra(clients, settings, "many.replicas", {}, RunResources(num_replicas=99))
    names = await infra.deploy()
    # 102 queues with their dead letters, table, stack, and a place in the bucket.
    assert len(names) == 207
    assert await infra.deploy() == names
    await infra.delete()
    assert listed(clients, settings.run_stack("many.replicas")) == []


async def test_the_functions_of_a_run_need_their_code(clients: AwsClients, settings: AwsSettings) -> None:
    with pytest.raises(InvalidInput, match="need their code"):
        run_template(settings, "a-stack", "run", 1, external=True)
    code = CodeLocation(bucket="b", key="k")
    assert "ProxyUrl" in run_template(settings, "a-stack", "run", 1, with_proxy=True, code=code)["Resources"]
