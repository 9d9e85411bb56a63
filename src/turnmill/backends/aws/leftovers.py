"""What is left of a stack that was deleted, as the services themselves list it: by names, then by tags.

    names that begin like the stack's -> those with its tags -> "queue NAME", "log group NAME" ...

A stack that is gone lists nothing, so that what CloudFormation forgot is found only so. Buckets and roles are known in
all regions; those of a stack of the same name in another region are not what is left of this one.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import InvalidInput

# What a service says of a thing that went between listing it and asking for its tags, or that has no tags.
_ABSENT = (
    "AWS.SimpleQueueService.NonExistentQueue",
    "NoSuchBucket",
    "NoSuchEntity",
    "NoSuchTagSet",
    "NotFound",
    "NotFoundException",
    "QueueDoesNotExist",
    "ResourceNotFoundException",
)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of resource."""

    # As people call it.
    what: str
    service: str
    # Name and handle, by which the service knows it, of those in a region that begin like the stack.
    listed: Callable[[Any, str, str], Iterator[tuple[str, str]]]
    # The tags of a handle.
    tags: Callable[[Any, str], Mapping[str, str]]


async def what_is_left(clients: AwsClients, name: str, tags: Mapping[str, str]) -> list[str]:
    """Everything named after the stack `name` that has `tags`; raises `InvalidInput` for missing rights."""
    found = await asyncio.gather(*(clients.run(partial(_left_of, clients, kind, name, tags)) for kind in _KINDS))
    return [each for of_kind in found for each in of_kind]


def _left_of(clients: AwsClients, kind: _Kind, name: str, tags: Mapping[str, str]) -> list[str]:
    def work(client: Any) -> list[tuple[str, str]]:
        return list(kind.listed(client, name, clients.region))

    try:
        listed = clients.work_with(kind.service, f"list {kind.what}s", work)
    except Refused as refused:
        raise InvalidInput(f"what is left of {name} can't be looked for: {refused}") from refused
    return [f"{kind.what} {each}" for each, handle in listed if tags.items() <= _tags(clients, kind, handle).items()]


def _tags(clients: AwsClients, kind: _Kind, handle: str) -> Mapping[str, str]:
    try:
        return clients.work_with(kind.service, f"tags of a {kind.what}", lambda client: kind.tags(client, handle))
    except Refused as refused:
        if refused.code in _ABSENT:
            return {}
        raise InvalidInput(f"the tags of the {kind.what} {handle} can't be read: {refused}") from refused


def _pages(client: Any, operation: str, **parameters: Any) -> Iterator[Any]:
    yield from client.get_paginator(operation).paginate(**parameters)


def _queues(client: Any, name: str, _: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_queues", QueueNamePrefix=f"{name}-", PaginationConfig={"PageSize": 1000}):
        for url in page.get("QueueUrls", []):
            yield url.rpartition("/")[2], url


def _tables(client: Any, name: str, _: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_tables"):
        for table in page["TableNames"]:
            if table.startswith(f"{name}-"):
                try:
                    yield table, client.describe_table(TableName=table)["Table"]["TableArn"]
                except client.exceptions.ResourceNotFoundException:
                    continue


def _functions(client: Any, name: str, _: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_functions"):
        for function in page["Functions"]:
            if function["FunctionName"].startswith(f"{name}-"):
                yield function["FunctionName"], function["FunctionArn"]


def _log_groups(client: Any, name: str, _: str) -> Iterator[tuple[str, str]]:
    for prefix in (f"/aws/lambda/{name}-", f"/turnmill/{name}/"):
        for page in _pages(client, "describe_log_groups", logGroupNamePrefix=prefix):
            for group in page["logGroups"]:
                yield group["logGroupName"], group["arn"].removesuffix(":*")


def _roles(client: Any, name: str, region: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_roles", PathPrefix=f"/turnmill/{name}/{region}/"):
        for role in page["Roles"]:
            yield role["RoleName"], role["RoleName"]


def _topics(client: Any, name: str, _: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_topics"):
        for topic in page["Topics"]:
            if topic["TopicArn"].rpartition(":")[2].startswith(f"{name}-"):
                yield topic["TopicArn"].rpartition(":")[2], topic["TopicArn"]


def _buckets(client: Any, name: str, region: str) -> Iterator[tuple[str, str]]:
    for page in _pages(client, "list_buckets", Prefix=f"{name}-", BucketRegion=region):
        for bucket in page["Buckets"]:
            yield bucket["Name"], bucket["Name"]


def _as_mapping(tags: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


_KINDS = (
    _Kind(
        what="queue",
        service="sqs",
        listed=_queues,
        tags=lambda client, url: client.list_queue_tags(QueueUrl=url).get("Tags", {}),
    ),
    _Kind(
        what="table",
        service="dynamodb",
        listed=_tables,
        tags=lambda client, arn: _as_mapping(client.list_tags_of_resource(ResourceArn=arn).get("Tags", [])),
    ),
    _Kind(
        what="function",
        service="lambda",
        listed=_functions,
        tags=lambda client, arn: client.list_tags(Resource=arn).get("Tags", {}),
    ),
    _Kind(
        what="log group",
        service="logs",
        listed=_log_groups,
        tags=lambda client, arn: client.list_tags_for_resource(resourceArn=arn).get("tags", {}),
    ),
    _Kind(
        what="role",
        service="iam",
        listed=_roles,
        tags=lambda client, role: _as_mapping(client.list_role_tags(RoleName=role).get("Tags", [])),
    ),
    _Kind(
        what="topic",
        service="sns",
        listed=_topics,
        tags=lambda client, arn: _as_mapping(client.list_tags_for_resource(ResourceArn=arn).get("Tags", [])),
    ),
    _Kind(
        what="bucket",
        service="s3",
        listed=_buckets,
        tags=lambda client, bucket: _as_mapping(client.get_bucket_tagging(Bucket=bucket)["TagSet"]),
    ),
)
