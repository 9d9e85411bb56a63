"""Answers that an emulator does not give: broken off, with another checksum, in conflict, or accepted and dropped.

A server on 127.0.0.1 says what the services' documentation says.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.metrics import EmfMetricSink
from turnmill.backends.aws.objects import Objects
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.errors import BackendUnavailable, InvalidInput, RecordCorrupt
from turnmill.records import Metric

CONTENT = b"content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>met another</Message></Error>"


@dataclass(frozen=True, kw_only=True)
class Said:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    # How much of the body comes before the connection ends.
    sent: int | None = None


@contextmanager
def service(said: Callable[[int], Said]) -> Iterator[tuple[AwsClients, list[str]]]:
    """Clients of a server that answers the n-th request, from 0, with `said(n)`; and the methods of the requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            one = said(len(asked))
            asked.append(self.command)
            self.send_response(one.status)
            for name, value in one.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(one.body)))
            self.end_headers()
            self.wfile.write(one.body[: one.sent])
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    clients = AwsClients(
        AwsSettings(region="us-east-1", endpoint_url=f"http://127.0.0.1:{server.server_port}"), max_tries=1
    )
    try:
        yield clients, asked
    finally:
        clients.close()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


def stored(*, sent: int | None = None, checksum: bytes = CONTENT) -> Said:
    headers = {
        "x-amz-meta-sha256": DIGEST,
        "x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(checksum).digest()).decode(),
        "x-amz-checksum-type": "FULL_OBJECT",
        "ETag": '"1"',
    }
    return Said(body=CONTENT, headers=headers, sent=sent)


def test_content_that_breaks_off_is_asked_for_again() -> None:
    with service(lambda n: stored(sent=3 if n < 2 else None)) as (clients, asked):
        assert Objects(clients, "bucket", "").get("a") == CONTENT
    assert len(asked) == 3


def test_content_that_always_breaks_off_is_unavailability() -> None:
    with (
        service(lambda _: stored(sent=3)) as (clients, asked),
        pytest.raises(BackendUnavailable, match="AWS s3 get_object failed"),
    ):
        Objects(clients, "bucket", "").get("a")
    assert len(asked) == 4


@pytest.mark.slow
def test_a_file_whose_content_always_breaks_off_is_unavailability(tmp_path: Path) -> None:
    with (
        service(lambda _: stored(sent=3)) as (clients, _),
        pytest.raises(BackendUnavailable, match="AWS s3 download failed"),
    ):
        Objects(clients, "bucket", "").get_file("a", tmp_path / "a", DIGEST)


def test_content_that_is_not_what_s3_has_a_checksum_of_is_corrupt() -> None:
    with (
        service(lambda _: stored(checksum=b"other")) as (clients, _),
        pytest.raises(RecordCorrupt, match="does not match the checksum of S3"),
    ):
        Objects(clients, "bucket", "").get("a")


def test_a_creation_that_met_another_is_tried_again() -> None:
    with service(lambda n: Said(status=409, body=CONFLICT) if n < 2 else Said()) as (clients, asked):
        assert Objects(clients, "bucket", "").create("a", b"1") is True
    assert len(asked) == 3


def test_a_creation_that_is_not_allowed_is_refused_and_not_tried_again() -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    with (
        service(lambda _: Said(status=403, body=denied)) as (clients, asked),
        pytest.raises(InvalidInput, match="AccessDenied"),
    ):
        Objects(clients, "bucket", "").create("a", b"1")
    assert len(asked) == 1


async def test_a_log_line_that_is_accepted_and_dropped_is_told(tmp_path: Path) -> None:
    dropped = json.dumps({"rejectedLogEventsInfo": {"tooOldLogEventEndIndex": 1}}).encode()
    records = SqliteRecordStore(tmp_path / "records")
    with service(lambda _: Said(body=dropped)) as (clients, _):
        sink = EmfMetricSink(clients, records, log_group="/turnmill/t/metrics")
        with pytest.raises(BackendUnavailable, match=r"dropped a metric of r1.*clock"):
            await sink.write(Metric(run_id="r1", step=1, time=1.0, values={"reward_mean": 1.0}))
        assert await sink.read("r1") == []
    records.close()
