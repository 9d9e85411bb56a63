"""Runs with an infrastructure of their own on the emulator, each in a deployment of its own, for the suites."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.aws.emulator import Emulator
from turnmill.backends.aws.blobs import S3BlobStore
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.backends.aws.infra import RunResources, StackRunInfra
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.metrics import EmfMetricSink
from turnmill.backends.aws.models import S3ModelStore
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.queue_bodies import Overflow
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.backends.embedded.weights import FolderWeightStore
from turnmill.ports import GENERATE_REQUEST, RunPorts, queue_names

# No stack can be called so: the run's is named after its deployment.
RUN_ID = "20260101-000000-abcd"
_PREFIX = f"runs/{RUN_ID}/"


@dataclass(frozen=True, kw_only=True)
class RunOnAws:
    """A run of a new deployment."""

    settings: AwsSettings
    clients: AwsClients
    bucket: str
    # Where its weights lie.
    folder: Path

    def open_ports(self) -> RunPorts:
        """The same ones each time, as another process would."""
        clients, names = self.clients, StackNames(stack=self.settings.run_stack(RUN_ID))
        records = DynamoRecordStore(
            clients, names.table, overflow=LargeValues(clients, self.bucket, f"{_PREFIX}records/")
        )
        overflow = Overflow(clients, self.bucket, f"{_PREFIX}messages/")
        queues = {
            name: SqsQueue(clients, names.queue(name), names.dead_letter_queue(name), overflow=overflow)
            for name in queue_names(1)
        }
        return RunPorts(
            runs=DynamoRecordStore(
                clients, self.settings.table, overflow=LargeValues(clients, self.bucket, "records/")
            ),
            records=records,
            blobs=S3BlobStore(clients, self.bucket, f"{_PREFIX}blobs/"),
            weights=FolderWeightStore(self.folder / "weights"),
            models=S3ModelStore(clients, self.bucket, "models/"),
            metrics=EmfMetricSink(clients, records, log_group=self.settings.log_group),
            rollout_request=queues["rollout_request"],
            rollout_response=queues["rollout_response"],
            generate_request=[queues[f"{GENERATE_REQUEST}-0"]],
            generate_response=queues["generate_response"],
            answers=DynamoOutbox(records, queues["generate_response"]),
            infra=StackRunInfra(clients, self.settings, RUN_ID, queues, RunResources(num_replicas=1)),
            close=lambda: None,
        )

    def look(self) -> set[str]:
        """Names all that is there of runs: resources, and keys in the bucket."""
        clients, stack = self.clients, self.settings.run_stack(RUN_ID)
        queues = clients.call_now("sqs", "list_queues", QueueNamePrefix=stack).get("QueueUrls", [])
        tables = [name for name in clients.call_now("dynamodb", "list_tables")["TableNames"] if stack in name]
        stacks = clients.call_now("cloudformation", "describe_stacks")["Stacks"]
        versions = clients.call_now("s3", "list_object_versions", Bucket=self.bucket)
        keys = [each["Key"] for each in (*versions.get("Versions", []), *versions.get("DeleteMarkers", []))]
        return {*queues, *tables, *keys, *(each["StackId"] for each in stacks if each["StackName"] == stack)}


def new_run(emulator: Emulator, folder: Path, close: Callable[[Callable[[], None]], object]) -> RunOnAws:
    """Its weights lie in `folder`; what is to be closed is handed to `close`."""
    settings = emulator.settings(f"i-{os.urandom(4).hex()}")
    clients = AwsClients(settings)
    close(clients.close)
    outputs = asyncio.run(deploy_deployment(clients, settings, lambda _: None))
    return RunOnAws(settings=settings, clients=clients, bucket=outputs["BucketName"], folder=folder)
