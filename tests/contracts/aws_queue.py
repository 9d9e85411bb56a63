"""Queues on the emulator, for the suites: the fixture makes one, its children find it by the same folder."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.queue_bodies import Overflow
from turnmill.backends.aws.queue_properties import dead_letter_queue_properties, queue_properties
from turnmill.backends.aws.settings import AwsSettings

_ACCOUNT = "000000000000"
BUCKET, PREFIX = "contracts", "runs/run/messages/"


def open_clients() -> AwsClients:
    """Of the services that the environment names."""
    return AwsClients(AwsSettings(name="contracts"))


def queue_name(folder: Path) -> str:
    return f"contract-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def make_queue(clients: AwsClients, name: str, *, max_receives: int = 20) -> None:
    """A queue and that of its dead letters, as a run's template makes them; and the bucket of large bodies."""
    prefix = f"arn:aws:sqs:{clients.region}:{_ACCOUNT}:"
    dead, source = f"{name}-dead.fifo", f"{name}.fifo"
    for properties in (
        dead_letter_queue_properties(dead, prefix + source),
        queue_properties(source, prefix + dead, max_receives=max_receives),
    ):
        clients.call_now("sqs", "create_queue", QueueName=properties["QueueName"], Attributes=attributes_of(properties))
    clients.call_now("s3", "create_bucket", Bucket=BUCKET)


def attributes_of(properties: Mapping[str, Any]) -> dict[str, str]:
    """The properties of a template as the service itself takes them."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in properties.items()
        if name != "QueueName"
    }


def open_queue(clients: AwsClients, name: str) -> SqsQueue:
    return SqsQueue(clients, f"{name}.fifo", f"{name}-dead.fifo", overflow=Overflow(clients, BUCKET, PREFIX))
