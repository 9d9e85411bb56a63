"""Every suite here runs on the backends of `SUITES`; a fixture that opens a port has a branch for each of them.

On AWS the services are those of an emulator (tests/aws/emulator.py).
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from tests.contracts import aws_objects, aws_queue, aws_records
from tests.contracts.aws_infra import RunOnAws, new_run
from tests.contracts.clock import Later
from tests.contracts.outbox_side import OutboxSide
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.embedded import open_run
from turnmill.backends.embedded.blobs import FolderBlobStore
from turnmill.backends.embedded.launcher import ProcessLauncher
from turnmill.backends.embedded.metrics import JsonlMetricSink
from turnmill.backends.embedded.models import FolderModelStore
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.backends.embedded.weights import FolderWeightStore
from turnmill.ports import (
    BlobStore,
    FolderStore,
    Launcher,
    MetricSink,
    ModelStore,
    Queue,
    RecordStore,
    RunPorts,
    WeightStore,
)

# Suites that run on other backends, too, by the name of their file.
SUITES: dict[str, list[str]] = {
    "test_backend_contract": ["aws"],
    "test_blobs_contract": ["aws"],
    "test_infra_contract": ["aws"],
    "test_metrics_contract": ["aws"],
    "test_models_contract": ["aws"],
    "test_outbox_contract": ["aws"],
    "test_queue_contract": ["aws"],
    "test_queue_sender_kills": ["aws"],
    "test_queue_take": ["aws"],
    "test_records_contract": ["aws"],
}
# Suites of ports that only one backend needs: the folders of the embedded one last by themselves.
AWS_ONLY = ("test_folders_contract",)
FAKE_ROLE = Path(__file__).with_name("fake_role.py")
PORT_CHILD = "tests.contracts.port_child"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Suites ask for `backend`, mostly through the fixtures that open a port; what waits in real time is slow."""
    if "backend" in metafunc.fixturenames:
        suite = metafunc.module.__name__.rpartition(".")[2]
        marks = [pytest.mark.slow] if "later" in metafunc.fixturenames else []
        if suite in AWS_ONLY:
            backends = [pytest.param("aws", marks=marks)]
        else:
            others = [pytest.param(backend, marks=marks) for backend in SUITES.get(suite, [])]
            backends = [pytest.param("embedded"), *others]
        metafunc.parametrize("backend", backends, scope="function")


@pytest.fixture
def child(backend: str, tmp_path: Path) -> Callable[..., list[str]]:
    """The command of another process that works on the same ports: `child("increment", key, times)`."""

    def command(*arguments: object) -> list[str]:
        return [sys.executable, "-m", PORT_CHILD, backend, str(tmp_path), *map(str, arguments)]

    return command


@pytest.fixture
def hands() -> list[float]:
    """The clock of the queues that `open_queue` opens: one element, seconds; tests move it."""
    return [1_000_000.0]


@pytest.fixture
def later(backend: str, hands: list[float]) -> Later:
    """Lets seconds go by for `open_queue`'s queues; on AWS nobody can move the clock, so that it waits."""

    async def move(seconds: float) -> None:
        if backend == "embedded":
            hands[0] += seconds
        else:
            await asyncio.sleep(seconds)

    return move


@pytest.fixture
def open_queue(
    backend: str, tmp_path: Path, hands: list[float], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Queue]]:
    """Opens the same queue each time, as another process would; `real_time=True` for one that tells real time."""
    if backend == "aws":
        request.getfixturevalue("emulator")
        yield from _open_queues_on_aws(tmp_path)
        return
    opened: list[SqliteQueue] = []

    def open_one(*, max_receives: int = 20, real_time: bool = False) -> Queue:
        path = tmp_path / "queue.db"
        if real_time:
            queue = SqliteQueue(path, max_receives=max_receives)
        else:
            queue = SqliteQueue(path, max_receives=max_receives, clock=lambda: hands[0])
        opened.append(queue)
        return queue

    yield open_one
    for queue in opened:
        queue.close()


def _open_queues_on_aws(folder: Path) -> Iterator[Callable[..., Queue]]:
    clients, name = aws_queue.open_clients(), aws_queue.queue_name(folder)

    def open_one(*, max_receives: int = 20, real_time: bool = True) -> Queue:
        aws_queue.make_queue(clients, name, max_receives=max_receives)
        return aws_queue.open_queue(clients, name)

    yield open_one
    clients.close()


@pytest.fixture
def queue(open_queue: Callable[..., Queue]) -> Queue:
    return open_queue()


@pytest.fixture(scope="session")
def aws_clients(emulator: Emulator) -> Iterator[AwsClients]:
    clients = AwsClients(emulator.settings("contracts"))
    yield clients
    clients.close()


@pytest.fixture
def open_records(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], RecordStore]]:
    """Opens the same store each time, as another process would."""
    if backend == "aws":
        clients = request.getfixturevalue("aws_clients")
        aws_records.create(clients, tmp_path)
        yield lambda: aws_records.open_records(clients, tmp_path)
        return
    opened: list[SqliteRecordStore] = []

    def open_one() -> RecordStore:
        opened.append(SqliteRecordStore(tmp_path / "records"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def records(open_records: Callable[[], RecordStore]) -> RecordStore:
    return open_records()


@pytest.fixture
def run_on_aws(emulator: Emulator, tmp_path: Path, request: pytest.FixtureRequest) -> RunOnAws:
    return new_run(emulator, tmp_path, request.addfinalizer)


@pytest.fixture
def look(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], set[str]]:
    """Names all that is there of runs, but the -wal and -shm files of open databases."""
    if backend == "aws":
        run: RunOnAws = request.getfixturevalue("run_on_aws")
        return run.look

    def entries() -> set[str]:
        found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
        return {name for name in found if not name.endswith(("-wal", "-shm"))}

    return entries


@pytest.fixture
def open_ports(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], RunPorts]]:
    """Opens the ports of the same run each time, as another process would."""
    if backend == "aws":
        run: RunOnAws = request.getfixturevalue("run_on_aws")
        yield run.open_ports
        return
    opened: list[RunPorts] = []

    def open_one() -> RunPorts:
        opened.append(open_run(tmp_path, "run", num_replicas=1))
        return opened[-1]

    yield open_one
    for ports in opened:
        ports.close()


@pytest.fixture
def object_clients(request: pytest.FixtureRequest) -> Iterator[AwsClients]:
    """For what is kept in S3 and CloudWatch; asking for it starts the emulator."""
    request.getfixturevalue("emulator")
    clients = aws_objects.open_clients()
    yield clients
    clients.close()


@pytest.fixture
def open_outbox(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], OutboxSide]]:
    """Opens the same outbox each time, as another process would, with the records and the queue behind it."""
    if backend == "embedded":
        open_ports: Callable[[], RunPorts] = request.getfixturevalue("open_ports")
        yield lambda: OutboxSide.of(open_ports())
        return
    clients, queues = request.getfixturevalue("aws_clients"), list[SqliteQueue]()
    aws_records.create(clients, tmp_path)

    def open_one() -> OutboxSide:
        records = aws_records.open_records(clients, tmp_path)
        # Any queue will do: news go where they are sent after the records.
        queues.append(SqliteQueue(tmp_path / "news.db"))
        return OutboxSide(outbox=DynamoOutbox(records, queues[-1]), records=records, news=queues[-1])

    yield open_one
    for queue in queues:
        queue.close()


@pytest.fixture
def blobs(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> BlobStore:
    if backend == "aws":
        return aws_objects.open_blobs(request.getfixturevalue("object_clients"), tmp_path)
    return FolderBlobStore(tmp_path / "blobs")


@pytest.fixture
def open_models(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], ModelStore]:
    """Opens the same store each time, as another process would."""
    if backend == "aws":
        clients = request.getfixturevalue("object_clients")
        return lambda: aws_objects.open_models(clients, tmp_path)
    return lambda: FolderModelStore(tmp_path / "models")


@pytest.fixture
def open_folders(backend: str, tmp_path: Path, object_clients: AwsClients) -> Callable[[], FolderStore]:
    """Opens the same store each time, as another process would."""
    return lambda: aws_objects.open_folders(object_clients, tmp_path)


@pytest.fixture
def open_weights(backend: str, tmp_path: Path) -> Callable[[], WeightStore]:
    """Opens the same store each time, as another process would."""
    return lambda: FolderWeightStore(tmp_path / "weights")


@pytest.fixture
def metrics(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> MetricSink:
    if backend == "aws":
        # Any record store will do: what is shown here is the sink.
        records: RecordStore = request.getfixturevalue("records")
        return aws_objects.open_metrics(request.getfixturevalue("object_clients"), tmp_path, records)
    return JsonlMetricSink(tmp_path / "metrics.jsonl")


@pytest.fixture
def open_launcher(backend: str, tmp_path: Path) -> Callable[..., Launcher]:
    """A launcher of fake roles, which do what the variable BEHAVE says; the test closes it."""

    def open_one(*, stop_s: float = 5.0, restart_pause_s: float = 0.01, steady_s: float = 60.0) -> Launcher:
        command = [sys.executable, str(FAKE_ROLE)]
        return ProcessLauncher(
            tmp_path, command=command, stop_s=stop_s, restart_pause_s=restart_pause_s, steady_s=steady_s
        )

    return open_one
