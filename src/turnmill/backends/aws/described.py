"""Stacks as CloudFormation describes them: status, tags and outputs, their resources, and why something failed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import InvalidInput, NotFound

GONE = "DELETE_COMPLETE"
# Made, and as a template says: it can be used, and updated.
_MADE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "IMPORT_COMPLETE")
LOOK = "the console of CloudFormation says more"
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack as CloudFormation describes it."""

    name: str
    # Names this one, and no later one of the same name.
    stack_id: str
    status: str
    tags: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """An operation is under way. A stack in review waits for a person instead."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def is_made(self) -> bool:
        """It is as some template says."""
        return self.status in _MADE


async def outputs(clients: AwsClients, name: str) -> dict[str, str]:
    """The outputs of a stack by their names; raises `NotFound` for one that isn't there."""
    stack = await find(clients, name)
    if stack is None:
        raise NotFound(f"there is no stack {name!r} in {clients.region}")
    return dict(stack.outputs)


async def find(clients: AwsClients, name: str) -> Stack | None:
    """The stack of this name or id; None where there is none."""
    return await clients.run(partial(find_now, clients, name))


def find_now(clients: AwsClients, name: str) -> Stack | None:
    """`find` for a thread of the caller's own."""
    try:
        answer = clients.call_now("cloudformation", "describe_stacks", StackName=name)
    except Refused as refused:
        if refused.code == "ValidationError" and "does not exist" in str(refused):
            return None
        raise not_allowed(refused) from refused
    return _stack(answer["Stacks"][0])


async def find_tagged(clients: AwsClients, tags: Mapping[str, str]) -> list[Stack]:
    """All stacks with these tags, by name."""

    def read(client: Any) -> list[Stack]:
        pages = client.get_paginator("describe_stacks").paginate()
        return [_stack(found) for page in pages for found in page["Stacks"]]

    try:
        stacks = await clients.run(lambda: clients.work_with("cloudformation", "describe_stacks", read))
    except Refused as refused:
        raise not_allowed(refused) from refused
    return sorted((stack for stack in stacks if tags.items() <= stack.tags.items()), key=lambda stack: stack.name)


async def resources_of(clients: AwsClients, stack: Stack) -> list[dict[str, Any]]:
    """Summaries of all that it has, or had."""

    def read(client: Any) -> list[dict[str, Any]]:
        pages = client.get_paginator("list_stack_resources").paginate(StackName=stack.stack_id)
        return [resource for page in pages for resource in page["StackResourceSummaries"]]

    try:
        return await clients.run(lambda: clients.work_with("cloudformation", "list_stack_resources", read))
    except Refused as refused:
        raise not_allowed(refused) from refused


async def reasons_of(clients: AwsClients, stack: Stack, token: str) -> str:
    """Why the operation that `token` began has failed: the first reasons, oldest first."""

    def read(client: Any) -> Iterator[dict[str, Any]]:
        for page in client.get_paginator("describe_stack_events").paginate(StackName=stack.stack_id):
            for event in page["StackEvents"]:
                if event.get("ClientRequestToken") != token:
                    return
                # Cancelled is what was under way when something else failed.
                if event["ResourceStatus"].endswith("_FAILED") and "cancelled" not in _reason(event):
                    yield event

    try:
        failed = await clients.run(
            lambda: clients.work_with("cloudformation", "describe_stack_events", lambda client: list(read(client)))
        )
    except Refused as refused:
        return f"{LOOK} ({refused})"
    # The stack's own says no more than which resources failed, where some have.
    of_resources = [event for event in failed if event.get("PhysicalResourceId") != stack.stack_id]
    reasons = [f"{event['LogicalResourceId']}: {_reason(event)}" for event in reversed(of_resources or failed)]
    return "; ".join(reasons[:_MOST_REASONS]) or LOOK


def _reason(event: Mapping[str, Any]) -> str:
    return str(event.get("ResourceStatusReason") or event["ResourceStatus"])


def _stack(described: Mapping[str, Any]) -> Stack:
    return Stack(
        name=described["StackName"],
        stack_id=described["StackId"],
        status=described["StackStatus"],
        tags={tag["Key"]: tag["Value"] for tag in described.get("Tags", [])},
        outputs={output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", [])},
    )


def not_allowed(refused: Refused) -> InvalidInput:
    """What CloudFormation refuses for a reason of its own is about rights or names."""
    return InvalidInput(f"{refused}; see the rights of the credentials in use, and the names given")
