"""Tables of records on the emulator, as they are, and behind a proxy that meddles with requests to them."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aws.emulator import REGION, Emulator
from tests.aws.meddling import Meddler, meddling_with
from tests.aws.tables import create_table
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded.queue import SqliteQueue


@pytest.fixture(scope="session")
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    clients = AwsClients(emulator.settings("tests"))
    yield clients
    clients.close()


@pytest.fixture
def table(clients: AwsClients) -> str:
    """An empty table, and a bucket of the same name."""
    name = f"tests-{secrets.token_hex(8)}"
    create_table(clients, name)
    clients.call_now("s3", "create_bucket", Bucket=name)
    return name


@pytest.fixture
def overflow(clients: AwsClients, table: str) -> LargeValues:
    return LargeValues(clients, table, "records/")


@pytest.fixture
def objects(clients: AwsClients, table: str) -> Callable[[], list[str]]:
    """The keys of what lies in the bucket."""

    def listed() -> list[str]:
        found = clients.call_now("s3", "list_objects_v2", Bucket=table).get("Contents", [])
        return [one["Key"] for one in found]

    return listed


@pytest.fixture
def records(clients: AwsClients, table: str, overflow: LargeValues) -> DynamoRecordStore:
    return DynamoRecordStore(clients, table, overflow=overflow)


@pytest.fixture
def meddler(emulator: Emulator) -> Iterator[Meddler]:
    with meddling_with(emulator.url) as running:
        yield running


@pytest.fixture
def meddled(meddler: Meddler, table: str, overflow: LargeValues) -> Iterator[DynamoRecordStore]:
    """The store of `records`, behind the proxy."""
    clients = AwsClients(AwsSettings(name="tests", region=REGION, endpoint_url=meddler.url))
    yield DynamoRecordStore(clients, table, overflow=overflow)
    clients.close()


@pytest.fixture
def news(tmp_path: Path) -> Iterator[SqliteQueue]:
    """A queue for an outbox: where its messages go is another matter."""
    queue = SqliteQueue(tmp_path / "news.db")
    yield queue
    queue.close()
