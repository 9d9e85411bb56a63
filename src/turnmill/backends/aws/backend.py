"""A deployment on AWS, opened: which service holds what of it, and of each of its runs.

    deployment's stack   bucket: blobs, models, large records and messages of all runs
                         table: the deployment's records, and the clocks of its runs; topic; log group: metrics
    a run's stack        its queues, its table

Opening asks no service anything. All that is opened in a process shares the clients of its deployment.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from turnmill.backends.aws import stacks
from turnmill.backends.aws.blobs import S3BlobStore
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.described import find_now
from turnmill.backends.aws.emptying import delete_objects
from turnmill.backends.aws.folders import S3FolderStore
from turnmill.backends.aws.infra import RunResources, StackRunInfra
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.leftovers import what_is_left
from turnmill.backends.aws.metrics import EmfMetricSink
from turnmill.backends.aws.models import S3ModelStore
from turnmill.backends.aws.notifier import SnsNotifier
from turnmill.backends.aws.objects import Objects
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.queue_bodies import Overflow
from turnmill.backends.aws.reading import AwsRunActivity, AwsRunReader
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.run_records import RunRecords
from turnmill.backends.aws.settings import AwsSettings, StackNames, check_run_id
from turnmill.backends.aws.templates import run_tags
from turnmill.errors import ConfigError, InvalidInput
from turnmill.ports import GENERATE_REQUEST, RunPorts, Stored, WeightStore, Write, queue_names
from turnmill.records import clock_prefix

_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a deployment is."""

    settings: AwsSettings
    region: str
    account: str


def find_account(settings: AwsSettings) -> Found:
    """Where the deployment is that the credentials see; raises `InvalidInput` where there is none of this name."""
    clients = clients_of(settings)
    region, account = clients.region, clients.account_now()
    stack = find_now(clients, settings.name)
    if stack is None:
        raise InvalidInput(
            f"there is no deployment {settings.name!r} in account {account}, region {region}: "
            f"`turnmill deploy --name {settings.name}` makes it"
        )
    if stack.tags.get("turnmill:deployment") != settings.name or "turnmill:run" in stack.tags:
        raise InvalidInput(
            f"the stack {settings.name!r} in account {account}, region {region} is no deployment of Turnmill: name "
            "another one, or make one under another name (`turnmill deploy --name NAME`)"
        )
    if not stack.is_made:
        raise InvalidInput(
            f"the deployment {settings.name!r} in account {account}, region {region} is in {stack.status}: "
            f"`turnmill deploy --name {settings.name}` brings it in order"
        )
    return Found(settings=settings, region=region, account=account)


def clients_of(settings: AwsSettings) -> AwsClients:
    """The clients of this deployment in this process."""
    # Whoever sets another endpoint in the environment means another one.
    return _shared_clients(settings, os.environ.get("AWS_ENDPOINT_URL"))


@lru_cache(maxsize=8)
def _shared_clients(settings: AwsSettings, _: str | None) -> AwsClients:
    return AwsClients(settings)


def notifier(topic: str, name: str) -> SnsNotifier:
    """A channel to a topic anywhere, by its ARN, which names its region."""
    parts = topic.split(":")
    if len(parts) != 6 or parts[2] != "sns":
        raise ConfigError(f"alert channel {name}: topic {topic!r} must be an ARN, arn:aws:sns:REGION:ACCOUNT:NAME")
    return SnsNotifier(clients_of(AwsSettings(region=parts[3])), topic, name=name)


class AwsBackend:
    """Implements `ports.Backend` for the deployment `settings` of `account`."""

    # The run's queues come with a stage, so that whoever listens to them starts after it.
    hosts_proxy = False

    def __init__(self, settings: AwsSettings, *, account: str, weights_of: Callable[[str], WeightStore]) -> None:
        """`weights_of` opens the weights of a run, which are where its trainer and replicas are."""
        self._settings = settings
        self._clients = clients_of(settings)
        self._account = account
        self._weights_of = weights_of

    @property
    def place(self) -> str:
        """For people."""
        return f"AWS (account {self._account}, {self._clients.region})"

    @property
    def topic(self) -> str:
        """Of the deployment's alerts."""
        return self._settings.topic

    def check(self) -> None:
        """Raises `InvalidInput` unless the deployment is there, for the credentials in use."""
        find_account(self._settings)

    def notifier(self, topic: str, name: str) -> SnsNotifier:
        """A channel to a topic of the deployment's account, by name or ARN, or to one elsewhere by ARN."""
        return notifier(topic, name) if topic.startswith("arn:") else SnsNotifier(self._clients, topic, name=name)

    # ------------------------------------------------------------ ports

    def open_records(self) -> DynamoRecordStore:
        """See `ports.Backend.open_records`."""
        return DynamoRecordStore(
            self._clients, self._settings.table, overflow=LargeValues(self._clients, self._bucket, "records/")
        )

    def open_run(self, run_id: str, *, num_replicas: int) -> RunPorts:
        """See `ports.Backend.open_run`."""
        own, records = self._run_records(run_id)
        queues = {name: self._queue(run_id, name) for name in queue_names(num_replicas)}
        return RunPorts(
            runs=self.open_records(),
            records=records,
            blobs=S3BlobStore(self._clients, self._bucket, f"{_prefix(run_id)}blobs/"),
            weights=self._weights_of(run_id),
            models=self._models(),
            metrics=EmfMetricSink(self._clients, records, log_group=self._settings.log_group),
            rollout_request=queues["rollout_request"],
            rollout_response=queues["rollout_response"],
            generate_request=[queues[f"generate_request-{index}"] for index in range(num_replicas)],
            generate_response=queues["generate_response"],
            answers=DynamoOutbox(own, queues["generate_response"]),
            infra=self._infra(run_id, queues),
            # All borrow the clients of the process.
            close=lambda: None,
            checkpoints=S3FolderStore(self._clients, self._bucket, f"{_prefix(run_id)}checkpoints/"),
        )

    def open_external_run(self, run_id: str) -> RunPorts:
        """The ports of a run whose trainer and generator are somebody else's, who have one generate_request.

        What these two read is in the messages themselves: they know nothing of the bucket.
        """
        return replace(
            self.open_run(run_id, num_replicas=0),
            generate_request=[self._queue(run_id, GENERATE_REQUEST, is_read_by_others=True)],
            rollout_response=self._queue(run_id, "rollout_response", is_read_by_others=True),
        )

    # ------------------------------------------------------------ readers

    def look_at_records(self, prefix: str) -> list[Stored]:
        """See `ports.Backend.look_at_records`."""
        records = self.open_records()
        found: list[Stored] = []
        while page := records.scan_now(prefix, after=found[-1].key if found else "", limit=_PAGE):
            found += page
            if len(page) < _PAGE:
                break
        return found

    def reader(self, run_id: str) -> AwsRunReader:
        """See `ports.Backend.reader`."""
        _, records = self._run_records(run_id)
        return AwsRunReader(records, lambda name: self._queue(run_id, name), run_id)

    def activity(self, run_id: str) -> AwsRunActivity:
        """See `ports.Backend.activity`."""
        return AwsRunActivity(self.reader(run_id), run_id)

    def fetch_model(self, run_id: str, folder: Path) -> Path | None:
        """See `S3ModelStore.fetch_latest`."""
        return self._models().fetch_latest(run_id, folder)

    def model_document(self, location: str, name: str) -> bytes | None:
        """See `S3ModelStore.document`."""
        return self._models().document(location, name)

    # ------------------------------------------------------------ the end of a run

    async def remove_run(self, run_id: str, *, models: bool) -> None:
        """Remove all of a run but its record, with `models` what it published too. Idempotent.

        No process may use the run.
        """
        await self._infra(run_id, {}).delete()
        if models:
            await delete_objects(self._clients, self._bucket, _models_of(run_id))
        clocks = await self._clients.run(partial(self.look_at_records, clock_prefix(run_id)))
        await self.open_records().write([Write(key=item.key, value=None, expected=None) for item in clocks])

    async def what_is_left(self, run_id: str, *, models: bool) -> list[str]:
        """What is still there of all that `remove_run` removes, looked for anew."""
        stack = self._settings.run_stack(run_id)
        found = await what_is_left(self._clients, stack, run_tags(self._settings, run_id))
        if await stacks.find(self._clients, stack) is not None:
            found.append(f"stack {stack}")
        for prefix in (_prefix(run_id), *([_models_of(run_id)] if models else [])):
            below = Objects(self._clients, self._bucket, prefix)
            found += [below.uri(each.key) for each in await self._clients.run(below.listed)]
        clocks = await self._clients.run(partial(self.look_at_records, clock_prefix(run_id)))
        return found + [f"record {item.key}" for item in clocks]

    # ------------------------------------------------------------ parts

    @property
    def _bucket(self) -> str:
        return self._settings.bucket(self._account, self._clients.region)

    def _models(self) -> S3ModelStore:
        return S3ModelStore(self._clients, self._bucket, "models/")

    def _run_records(self, run_id: str) -> tuple[DynamoRecordStore, RunRecords]:
        """The run's table, and that with what is elsewhere of its records."""
        names = StackNames(stack=self._settings.run_stack(check_run_id(run_id)))
        large = LargeValues(self._clients, self._bucket, f"{_prefix(run_id)}records/")
        own = DynamoRecordStore(self._clients, names.table, overflow=large)
        return own, RunRecords(own, self.open_records())

    def _queue(self, run_id: str, name: str, *, is_read_by_others: bool = False) -> SqsQueue:
        names = StackNames(stack=self._settings.run_stack(check_run_id(run_id)))
        overflow = None if is_read_by_others else Overflow(self._clients, self._bucket, f"{_prefix(run_id)}messages/")
        return SqsQueue(self._clients, names.queue(name), names.dead_letter_queue(name), overflow=overflow)

    def _infra(self, run_id: str, queues: Mapping[str, SqsQueue]) -> StackRunInfra:
        num_replicas = sum(name.startswith(GENERATE_REQUEST) for name in queues)
        resources = RunResources(num_replicas=num_replicas)
        return StackRunInfra(self._clients, self._settings, run_id, queues, resources)


def _prefix(run_id: str) -> str:
    """Of a run's keys in the bucket."""
    return f"runs/{run_id}/"


def _models_of(run_id: str) -> str:
    return f"models/{run_id}/"
