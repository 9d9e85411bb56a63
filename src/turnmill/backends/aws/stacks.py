"""Stacks of CloudFormation: made or changed to what a template says, deleted, and looked at.

    template -> create | update | nothing to do -> wait for the end -> outputs
    name     -> empty what blocks -> delete -> wait for the end -> nothing may be left

Both may be begun again at any moment, in several processes at once: CloudFormation goes on without whoever asked, has
one operation of a stack at a time, and each caller waits for the end of whichever is under way, then looks again.

| what | who tries again, or gives up |
|---|---|
| a request that is throttled or without an answer | `AwsClients`; a token makes the second one the same operation |
| a resource that a service refuses to make | nobody: CloudFormation rolls back, the reasons are in the error |
| a stack that was never made (ROLLBACK_COMPLETE ...) | `deploy`: it is deleted, then made anew |
| a bucket that got objects while it was emptied | `delete`, `_DELETE_TRIES` in all |
| an operation that takes long | the caller, after `timeout_s`; CloudFormation goes on |
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from turnmill import failpoints
from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.described import (
    GONE,
    LOOK,
    Stack,
    find,
    find_tagged,
    not_allowed,
    outputs,
    reasons_of,
    resources_of,
)
from turnmill.backends.aws.emptying import delete_objects
from turnmill.backends.aws.leftovers import what_is_left
from turnmill.backends.aws.settings import check_stack_name
from turnmill.backends.aws.templates import body_of
from turnmill.errors import BackendUnavailable, Conflict, InvalidInput

__all__ = ["Stack", "delete", "deploy", "find", "find_tagged", "outputs"]

# Seconds that an operation of a stack may take, and between two looks at it, the first and the longest.
TIMEOUT_S = 1800.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_DELETE_TRIES = 3
# Seconds for which services still list what is deleted.
_LISTED_S = 90.0
# What the first deployment left when it failed: nothing that anybody has used.
_NEVER_MADE = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED")

# Bytes of a template that comes with the request.
MAX_BODY = 51_200

Tell = Callable[[str], None]
# Stores the text of a template, and returns its URL.
PutTemplate = Callable[[str], Awaitable[str]]


def _nobody(_: str) -> None:
    """Told to nobody."""


async def deploy(
    clients: AwsClients,
    name: str,
    template: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    put_template: PutTemplate | None = None,
    tell: Tell = _nobody,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, str]:
    """Make the stack `name` what `template` says, and its outputs; nothing is done where it is so already.

    `put_template` stores the text of a large one, and says where; without it, that is refused. `tags` say whose it is.
    Raises `Conflict` for a stack of that name with other tags, `InvalidInput` for a name or template that breaks a
    limit or for missing rights, `BackendUnavailable` with the reasons of what can't be made.
    """
    check_stack_name(name)
    source = await _source(body_of(template), put_template)
    watch = _Watch(clients, tell, time.monotonic() + timeout_s)
    while True:
        watch.check_time(f"deploying the stack {name}")
        stack = await find(clients, name)
        if stack is not None:
            _check_owner(stack, tags)
        if stack is not None and stack.is_busy:
            await watch.until_settled(stack)
            continue
        if stack is not None and stack.status in _NEVER_MADE:
            tell(f"the stack {name} could not be made before ({stack.status}): it is removed and made anew")
            await _delete_once(clients, stack, watch)
            continue
        token = secrets.token_hex(16)
        if stack is None:
            begun: Begun = await _create(clients, name, source, tags, token)
        elif stack.is_made:
            begun = await _update(clients, stack, source, tags, token)
        else:
            raise BackendUnavailable(f"the stack {name} is in {stack.status}: {_REMEDIES.get(stack.status, LOOK)}")
        if begun == "unchanged" and stack is not None:
            tell(f"the stack {name} is as it should be")
            return dict(stack.outputs)
        if begun == "begun":
            return await _deployed(clients, name, token, watch)


async def delete(
    clients: AwsClients,
    name: str,
    tags: Mapping[str, str],
    *,
    tell: Tell = _nobody,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Remove the stack `name` with all that is in it, the objects of its buckets too; none of it is no error.

    Raises `Conflict` for a stack of that name with other tags, `InvalidInput` for missing rights, `BackendUnavailable`
    with the reasons of what can't be removed, or with what is left.
    """
    watch = _Watch(clients, tell, time.monotonic() + timeout_s)
    num_failed = 0
    while (stack := await find(clients, name)) is not None:
        watch.check_time(f"deleting the stack {name}")
        _check_owner(stack, tags)
        if stack.is_busy:
            await watch.until_settled(stack)
            continue
        try:
            await _delete_once(clients, stack, watch)
        except BackendUnavailable:
            num_failed += 1
            if num_failed == _DELETE_TRIES:
                raise
    await _nothing_is_left(clients, name, tags, tell)


# What became of a request: under way | there is nothing to do | another one was faster, so look again.
Begun = Literal["begun", "unchanged", "overtaken"]

_REMEDIES = {
    "DELETE_FAILED": "its deletion did not end; delete it again, then deploy",
    "DELETE_COMPLETE": "it was deleted just now; deploy again",
    "REVIEW_IN_PROGRESS": "a change set waits there for a review; delete the stack, or review it",
    "UPDATE_ROLLBACK_FAILED": "an update could not be undone; `aws cloudformation continue-update-rollback` goes on",
}


async def _source(body: str, put_template: PutTemplate | None) -> dict[str, str]:
    """The template as a request has it: in itself, or for a large one where it is."""
    if len(body) <= MAX_BODY:
        return {"TemplateBody": body}
    if put_template is None:
        raise InvalidInput(
            f"the template has {len(body)} bytes, and a request takes {MAX_BODY}: it must lie in a bucket"
        )
    return {"TemplateURL": await put_template(body)}


async def _create(
    clients: AwsClients, name: str, source: Mapping[str, str], tags: Mapping[str, str], token: str
) -> Begun:
    try:
        await clients.call(
            "cloudformation",
            "create_stack",
            StackName=name,
            **source,
            Capabilities=["CAPABILITY_IAM"],
            Tags=_as_list(tags),
            # The same request sent again, since its answer was lost, is the same operation.
            ClientRequestToken=token,
        )
    except Refused as refused:
        if refused.code == "AlreadyExistsException":
            return "overtaken"
        if refused.code != "TokenAlreadyExistsException":
            raise not_allowed(refused) from refused
    failpoints.hit("stack-creating")
    return "begun"


async def _update(
    clients: AwsClients, stack: Stack, source: Mapping[str, str], tags: Mapping[str, str], token: str
) -> Begun:
    try:
        await clients.call(
            "cloudformation",
            "update_stack",
            StackName=stack.stack_id,
            **source,
            Capabilities=["CAPABILITY_IAM"],
            Tags=_as_list(tags),
            ClientRequestToken=token,
        )
    except Refused as refused:
        if refused.code == "TokenAlreadyExistsException":
            return "begun"
        if refused.code != "ValidationError":
            raise not_allowed(refused) from refused
        if "No updates are to be performed" in str(refused):
            return "unchanged"
        now = await find(clients, stack.name)
        was_busy = "_IN_PROGRESS" in str(refused)
        if not was_busy and now is not None and now.stack_id == stack.stack_id and not now.is_busy:
            raise not_allowed(refused) from refused
        return "overtaken"
    return "begun"


async def _deployed(clients: AwsClients, name: str, token: str, watch: "_Watch") -> dict[str, str]:
    """The outputs at the end of the operation that `token` began."""
    stack = await find(clients, name)
    if stack is not None and stack.is_busy:
        stack = await watch.until_settled(stack)
    if stack is None:
        raise BackendUnavailable(f"the stack {name} was deleted while it was deployed")
    if stack.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
        return dict(stack.outputs)
    reasons = await reasons_of(clients, stack, token)
    raise BackendUnavailable(f"the stack {name} can't be deployed ({stack.status}): {reasons}")


async def _delete_once(clients: AwsClients, stack: Stack, watch: "_Watch") -> None:
    """Raises `BackendUnavailable` with the reasons where something of it could not be deleted."""
    await _empty_buckets(clients, stack, watch)
    token = secrets.token_hex(16)
    try:
        await clients.call("cloudformation", "delete_stack", StackName=stack.stack_id, ClientRequestToken=token)
    except Refused as refused:
        if refused.code != "TokenAlreadyExistsException":
            raise not_allowed(refused) from refused
    ended = await watch.until_settled(stack)
    if ended is not None and ended.status != GONE:
        reasons = await reasons_of(clients, ended, token)
        raise BackendUnavailable(f"the stack {stack.name} can't be deleted ({ended.status}): {reasons}")


async def _empty_buckets(clients: AwsClients, stack: Stack, watch: "_Watch") -> None:
    """CloudFormation does not delete a bucket that holds anything."""
    for resource in await resources_of(clients, stack):
        bucket = resource.get("PhysicalResourceId")
        if resource["ResourceType"] == "AWS::S3::Bucket" and resource["ResourceStatus"] != GONE and bucket:
            num_deleted = await delete_objects(clients, bucket)
            watch.tell(f"{num_deleted} object versions of the bucket {bucket} are deleted")


async def _nothing_is_left(clients: AwsClients, name: str, tags: Mapping[str, str], tell: Tell) -> None:
    give_up, pause = time.monotonic() + _LISTED_S, 1.0
    while left := await what_is_left(clients, name, tags):
        tell(f"the stack {name} is deleted; its services still list {', '.join(left)}")
        if time.monotonic() + pause > give_up:
            raise BackendUnavailable(f"the stack {name} is deleted, but there is still: {', '.join(left)}")
        await asyncio.sleep(pause)
        pause *= 2


class _Watch:
    """Looks at a stack until its operation has ended, and tells what happens; `until` ends all of it."""

    def __init__(self, clients: AwsClients, tell: Tell, until: float) -> None:
        self._clients = clients
        self.tell = tell
        self._until = until
        self._told = ""

    def check_time(self, what: str) -> None:
        """Raises `BackendUnavailable` when the time is over."""
        if time.monotonic() > self._until:
            raise BackendUnavailable(f"{what} takes too long; CloudFormation goes on with it, so try again later")

    async def until_settled(self, stack: Stack) -> Stack | None:
        """The same stack when nothing of it is under way; None where it can't be seen any more."""
        pause = _FIRST_PAUSE_S
        while True:
            now = await find(self._clients, stack.stack_id)
            if now is None or not now.is_busy:
                return now
            await self._tell_of(now)
            self.check_time(f"the stack {stack.name} ({now.status})")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    async def _tell_of(self, stack: Stack) -> None:
        if self.tell is _nobody:
            return
        resources = await resources_of(self._clients, stack)
        num_ended = sum(resource["ResourceStatus"].endswith("_COMPLETE") for resource in resources)
        text = f"stack {stack.name}: {stack.status}, {num_ended} of {len(resources)} resources done"
        if text != self._told:
            self.tell(text)
            self._told = text


def _check_owner(stack: Stack, tags: Mapping[str, str]) -> None:
    differing = {key: stack.tags.get(key) for key, value in tags.items() if stack.tags.get(key) != value}
    # A deployment's stack has no run, a run's has: one must not be taken for the other.
    differing |= {key: value for key, value in stack.tags.items() if key.startswith("turnmill:") and key not in tags}
    if differing:
        has = ", ".join(f"{key}={value}" if value is not None else f"no {key}" for key, value in differing.items())
        raise Conflict(
            f"the stack {stack.name!r} belongs to somebody else: it has {has}, and not "
            f"{', '.join(f'{key}={value}' for key, value in tags.items())}; choose another name"
        )


def _as_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]
