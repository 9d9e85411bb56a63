"""Records on an emulator of AWS, the table and the bucket named after a folder that several processes know."""

import hashlib
from pathlib import Path

from tests.aws.tables import create_table
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.records import DynamoRecordStore


def create(clients: AwsClients, folder: Path) -> None:
    """Once a folder."""
    create_table(clients, _name(folder))
    clients.call_now("s3", "create_bucket", Bucket=_name(folder))


def open_records(clients: AwsClients, folder: Path) -> DynamoRecordStore:
    name = _name(folder)
    return DynamoRecordStore(clients, name, overflow=LargeValues(clients, name, "records/"))


def _name(folder: Path) -> str:
    return f"contracts-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
