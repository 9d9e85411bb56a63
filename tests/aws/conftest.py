"""Tables of records and queues on the emulator, as they are, and behind proxies that meddle with requests to them."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.aws.emulator import REGION, Emulator
from tests.aws.meddling import Meddler, meddling_with
from tests.aws.scripted_proxy import ScriptedProxy, scripted_proxy
from tests.aws.sqs_messages import OpenProxied
from tests.aws.tables import create_table
from tests.contracts.aws_queue import make_queue, open_queue
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.large_values import LargeValues
from turnmill.backends.aws.queue import SqsQueue
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


@pytest.fixture
def queue_name(clients: AwsClients) -> str:
    """Of a queue that was made."""
    name = f"sqs-{secrets.token_hex(8)}"
    make_queue(clients, name, max_receives=2)
    return name


@pytest.fixture
def queue(clients: AwsClients, queue_name: str) -> SqsQueue:
    return open_queue(clients, queue_name)


@pytest.fixture
def proxied(emulator: Emulator, queue_name: str) -> Iterator[OpenProxied]:
    """The queue behind a proxy, and the proxy."""
    with ExitStack() as stack:

        def open_one(*, max_tries: int = 3) -> tuple[ScriptedProxy, SqsQueue]:
            proxy = stack.enter_context(scripted_proxy(emulator.url))
            settings = AwsSettings(region="us-east-1", endpoint_url=proxy.url)
            clients = AwsClients(settings, max_tries=max_tries)
            stack.callback(clients.close)
            return proxy, open_queue(clients, queue_name)

        yield open_one
