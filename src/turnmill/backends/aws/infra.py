"""What one run stands on: a stack of its own, and a prefix in the deployment's bucket.

deploy -> (code of the functions ->) stack -> a first object below the prefix
retire -> each queue drained
delete -> stack, then everything below the prefix
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.deployment import bucket_of
from turnmill.backends.aws.emptying import delete_objects
from turnmill.backends.aws.package import pack, store
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.resources import queues_of_run
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.backends.aws.templates import run_tags, run_template
from turnmill.errors import BackendUnavailable, InvalidInput


@dataclass(frozen=True, kw_only=True)
class RunResources:
    """What a run's stack holds besides its records and its queues."""

    num_replicas: int
    # Trainer and generator are somebody else's, who call and are called by Lambda functions.
    is_external: bool = False
    # Of the functions the proxy alone.
    has_proxy: bool = False
    # ARNs of roles or users, or accounts, that may call the proxy's URL.
    callers: Sequence[str] = ()
    # The functions' code is packed with what it imports; else that is there already, as in an emulator.
    packs_dependencies: bool = True


class StackRunInfra:
    """Implements `ports.RunInfra`; `queues` are those of the run, by name."""

    # CloudFormation makes a stack within a minute or two, its roles and functions being what takes longest.
    expected_s = 300.0

    def __init__(
        self,
        clients: AwsClients,
        settings: AwsSettings,
        run_id: str,
        queues: Mapping[str, SqsQueue],
        resources: RunResources,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._run_id = run_id
        self._queues = queues
        self._resources = resources
        self._tell = tell
        self._stack = settings.run_stack(run_id)
        self._tags = run_tags(settings, run_id)

    @property
    def prefix(self) -> str:
        """Of the run's keys in the deployment's bucket."""
        return f"runs/{self._run_id}/"

    async def deploy(self) -> list[str]:
        """See `ports.RunInfra.deploy`. Raises `InvalidInput`, too, where there is no deployment, and for a bad name."""
        resources = self._resources
        bucket = await bucket_of(self._clients, self._settings)
        code = None
        if resources.is_external or resources.has_proxy:
            package = await self._clients.run(lambda: pack(with_dependencies=resources.packs_dependencies))
            code = await store(self._clients, bucket, package)
        template = run_template(
            self._settings,
            self._stack,
            self._run_id,
            resources.num_replicas,
            resources.is_external,
            with_proxy=resources.has_proxy,
            callers=resources.callers,
            code=code,
        )
        outputs = await stacks.deploy(
            self._clients,
            self._stack,
            template,
            self._tags,
            put_template=partial(self._put_template, bucket),
            tell=self._tell,
        )
        await self._write_first_object(bucket)
        names = StackNames(stack=self._stack)
        found = [f"stack {self._stack}", f"table {names.table}", f"bucket {bucket}/{self.prefix}"]
        for queue in queues_of_run(resources.num_replicas, external=resources.is_external):
            found += [f"queue {names.queue(queue)}", f"queue {names.dead_letter_queue(queue)}"]
        found += [f"function {outputs[name]}" for name in outputs if name.endswith("FunctionName")]
        return found

    async def _put_template(self, bucket: str, body: str) -> str:
        """A run of many replicas has a template that is too large for a request."""
        key = f"{self.prefix}template.json"

        def put(client: Any) -> str:
            client.put_object(Bucket=bucket, Key=key, Body=body.encode())
            return f"{client.meta.endpoint_url}/{bucket}/{key}"

        try:
            return await self._clients.run(partial(self._clients.work_with, "s3", "put_object", put))
        except Refused as refused:
            raise InvalidInput(f"the template of the run can't be stored in {bucket}: {refused}") from refused

    async def _write_first_object(self, bucket: str) -> None:
        """What is written later below the prefix meets the same rights."""
        key = f"{self.prefix}stack"
        try:
            await self._clients.call(
                "s3", "put_object", Bucket=bucket, Key=key, Body=self._stack.encode(), IfNoneMatch="*"
            )
        except Refused as refused:
            if refused.code != "PreconditionFailed":
                raise BackendUnavailable(f"nothing can be written to {bucket}/{self.prefix}: {refused}") from refused

    async def free_bytes(self) -> None:
        """Nothing limits it."""
        return None

    async def retire(self) -> int:
        """See `ports.RunInfra.retire`. Without purges: the messages of a run that is resumed would go with them."""
        if await stacks.find(self._clients, self._stack) is None:
            return 0
        return sum(await asyncio.gather(*(queue.drain() for queue in self._queues.values())))

    async def delete(self) -> None:
        """See `ports.RunInfra.delete`."""
        await stacks.delete(self._clients, self._stack, self._tags, tell=self._tell)
        deployment = await stacks.find(self._clients, self._settings.name)
        bucket = deployment.outputs.get("BucketName") if deployment is not None else None
        if bucket is not None:
            await delete_objects(self._clients, bucket, self.prefix)
