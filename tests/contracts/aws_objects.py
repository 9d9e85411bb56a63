"""Opens what is kept in S3, CloudWatch Logs and SNS for the suites, on the emulator; each folder has its own names."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.aws.emulator import REGION
from turnmill.backends.aws.blobs import S3BlobStore
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.folders import S3FolderStore
from turnmill.backends.aws.metrics import EmfMetricSink
from turnmill.backends.aws.models import S3ModelStore
from turnmill.backends.aws.settings import AwsSettings
from turnmill.ports import RecordStore


def name_of(folder: Path) -> str:
    """The deployment that stands for `folder`, so that every process that knows the folder finds the same one."""
    return f"t{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def open_clients() -> AwsClients:
    """The emulator is named by the environment."""
    return AwsClients(AwsSettings(region=REGION))


def bucket_of(clients: AwsClients, folder: Path) -> str:
    """Made if it is not there."""
    bucket = f"{name_of(folder)}-000000000000-{REGION}"
    clients.call_now("s3", "create_bucket", Bucket=bucket)
    return bucket


def open_blobs(clients: AwsClients, folder: Path) -> S3BlobStore:
    return S3BlobStore(clients, bucket_of(clients, folder), "runs/run/blobs/")


def open_models(clients: AwsClients, folder: Path) -> S3ModelStore:
    return S3ModelStore(clients, bucket_of(clients, folder), "models/")


def open_folders(clients: AwsClients, folder: Path) -> S3FolderStore:
    return S3FolderStore(clients, bucket_of(clients, folder), "runs/run/checkpoints/")


def open_metrics(clients: AwsClients, folder: Path, records: RecordStore) -> EmfMetricSink:
    return EmfMetricSink(clients, records, log_group=AwsSettings(name=name_of(folder)).log_group)


class Inbox:
    """A queue that is subscribed to a topic."""

    def __init__(self, clients: AwsClients, queue_url: str) -> None:
        self._clients = clients
        self._queue_url = queue_url
        self._messages: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """What the topic has told so far: `Subject`, `Message`, `MessageAttributes`."""
        while True:
            answer = self._clients.call_now(
                "sqs", "receive_message", QueueUrl=self._queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=0
            )
            received = answer.get("Messages", [])
            if not received:
                return self._messages
            for message in received:
                self._messages.append(json.loads(message["Body"]))
                self._clients.call_now(
                    "sqs", "delete_message", QueueUrl=self._queue_url, ReceiptHandle=message["ReceiptHandle"]
                )


def open_topic(clients: AwsClients, folder: Path) -> tuple[str, Inbox]:
    """The ARN of a new topic, and who listens to it."""
    name = name_of(folder)
    topic = clients.call_now("sns", "create_topic", Name=name)["TopicArn"]
    queue_url = clients.call_now("sqs", "create_queue", QueueName=name)["QueueUrl"]
    attributes = clients.call_now("sqs", "get_queue_attributes", QueueUrl=queue_url, AttributeNames=["QueueArn"])
    queue = attributes["Attributes"]["QueueArn"]
    clients.call_now("sns", "subscribe", TopicArn=topic, Protocol="sqs", Endpoint=queue)
    return topic, Inbox(clients, queue_url)
