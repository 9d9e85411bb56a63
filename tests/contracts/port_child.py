"""Another process on the same ports, run by the suites: BACKEND FOLDER VERB ARGUMENT..."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.contracts import aws_objects, aws_queue, aws_records
from tests.contracts.published import MODEL
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.outbox import DynamoOutbox
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded import open_run
from turnmill.backends.embedded.models import FolderModelStore
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.ports import Count, Message, ModelStore, Outbox, Queue, RecordStore, Write

BACKEND = sys.argv[1] if len(sys.argv) > 1 else ""


@contextmanager
def opened_records(folder: Path) -> Iterator[RecordStore]:
    """The store that the suites open in `folder`, on the backend of this process."""
    if BACKEND == "aws":
        # The environment tells where the emulator is.
        clients = AwsClients(AwsSettings(name="contracts"))
        yield aws_records.open_records(clients, folder)
        clients.close()
    else:
        records = SqliteRecordStore(folder / "records")
        yield records
        records.close()


@contextmanager
def opened_outbox(folder: Path) -> Iterator[Outbox]:
    """The outbox that the suites open in `folder`, on the backend of this process."""
    if BACKEND == "aws":
        clients = AwsClients(AwsSettings(name="contracts"))
        yield DynamoOutbox(aws_records.open_records(clients, folder), SqliteQueue(folder / "news.db"))
        clients.close()
    else:
        ports = open_run(folder, "run", num_replicas=1)
        yield ports.answers
        ports.close()


async def increment(folder: Path, key: str, times: str) -> None:
    """Count `key` up by compare-and-set, as often as asked; print the number of lost races."""
    lost = 0
    with opened_records(folder) as records:
        for _ in range(int(times)):
            applied = False
            while not applied:
                [stored] = await records.get([key])
                count, version = (int(stored.value), stored.version) if stored else (0, 0)
                [applied] = await records.write([Write(key=key, value=str(count + 1).encode(), expected=version)])
                lost += not applied
    print(lost)


async def record_forever(folder: Path, prefix: str) -> None:
    """Write one record after another and print the number of each that is stored, until killed."""
    number = 0
    with opened_records(folder) as records:
        while True:
            await records.write([Write(key=f"{prefix}{number:06d}", value=b"x" * 1000, expected=0)])
            print(number, flush=True)
            number += 1


@contextmanager
def opened_queue(folder: Path) -> Iterator[Queue]:
    """The queue that the suites open in `folder`, on the backend of this process."""
    if BACKEND == "aws":
        clients = aws_queue.open_clients()
        yield aws_queue.open_queue(clients, aws_queue.queue_name(folder))
        clients.close()
    else:
        queue = SqliteQueue(folder / "queue.db")
        yield queue
        queue.close()


async def send_forever(folder: Path) -> None:
    """Send one message after another and print the number of each that is stored, until killed."""
    number = 0
    with opened_queue(folder) as queue:
        while True:
            await queue.send([Message(body=b"x", group=str(number), dedup_id=str(number))])
            print(number, flush=True)
            number += 1


async def consume(folder: Path, times: str) -> None:
    """Lease and acknowledge `times` messages one at a time, waiting for each; print their bodies."""
    with opened_queue(folder) as queue:
        print("ready", flush=True)
        for _ in range(int(times)):
            leased = await queue.lease(max_messages=1, lease_s=30, wait_s=30)
            await queue.ack([message.receipt for message in leased])
            print(leased[0].body.decode(), flush=True)


async def lease(folder: Path, lease_s: str) -> None:
    """Lease one message, print its body and die with it."""
    with opened_queue(folder) as queue:
        [leased] = await queue.lease(max_messages=1, lease_s=float(lease_s))
        print(leased.body.decode(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


async def drain(folder: Path) -> None:
    """Take what comes, together with others, until all messages are gone; print the bodies."""
    with opened_queue(folder) as queue:
        while (await queue.counts()).available + (await queue.counts()).in_flight > 0:
            leased = await queue.lease(max_messages=5, lease_s=30, wait_s=0.1)
            acked = await queue.ack([message.receipt for message in leased])
            for message, done in zip(leased, acked, strict=True):
                assert done
                print(message.body.decode())


async def take(folder: Path) -> None:
    """Take one message, print its body and die with it."""
    with opened_queue(folder) as queue:
        [taken] = await queue.take(max_messages=1)
        print(taken.body.decode(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


async def take_forever(folder: Path) -> None:
    """Take one message after another and print their bodies, until killed."""
    with opened_queue(folder) as queue:
        while True:
            for taken in await queue.take(max_messages=1, wait_s=30):
                print(taken.body.decode(), flush=True)


async def answer_forever(folder: Path, first: str) -> None:
    """Write one record with its message after another and print the number of each that is stored, until killed."""
    number = int(first)
    with opened_outbox(folder) as outbox:
        while True:
            key = f"calls/run/train/s/{number:06d}"
            message = Message(body=key.encode(), group=key, dedup_id=None)
            counted = [Count(key="tokens/run/a", amount=1)]
            await outbox.write([(Write(key=key, value=b"x" * 1000, expected=0), message)], counted)
            print(number, flush=True)
            number += 1


async def publish(folder: Path, source: str, published_at: str, digest: str) -> None:
    """Publish the folder `source` as the one version of a model; print when the standing one was published."""
    model = replace(MODEL, published_at=float(published_at), digest=digest)
    stored = await open_models(folder).publish(model, Path(source), {"README.md": published_at.encode()})
    print(stored.model.published_at)


def open_models(folder: Path) -> ModelStore:
    if BACKEND == "aws":
        return aws_objects.open_models(aws_objects.open_clients(), folder)
    return FolderModelStore(folder / "models")


# All but those that need the ports of a run.
_AWS_VERBS = (
    "increment",
    "record_forever",
    "send_forever",
    "consume",
    "drain",
    "lease",
    "take",
    "take_forever",
    "answer_forever",
    "publish",
)
VERBS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "increment": increment,
    "record_forever": record_forever,
    "send_forever": send_forever,
    "consume": consume,
    "drain": drain,
    "lease": lease,
    "take": take,
    "take_forever": take_forever,
    "answer_forever": answer_forever,
    "publish": publish,
}


def main() -> None:
    folder, verb, *arguments = sys.argv[2:]
    assert BACKEND == "embedded" or verb in _AWS_VERBS
    asyncio.run(VERBS[verb](Path(folder), *arguments))


if __name__ == "__main__":
    main()
