"""What Turnmill needs from a backend, written for the weakest one. Each port has one contract suite (tests/contracts).

Everything may be called from several processes at once. Every method may raise `BackendUnavailable` after the adapter's
own retries (each adapter is the only retry owner for its service). Nothing here may be lost by SIGKILL of the caller
once the call has returned, unless the text says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from turnmill.records import Alert, Metric, PublishedModel, Version, WeightVersion

# ---------------------------------------------------------------- blobs


@dataclass(frozen=True, kw_only=True)
class BlobInfo:
    """A stored blob."""

    key: str
    size: int
    # SHA-256 hex of the content.
    digest: str


class BlobStore(Protocol):
    """Whole objects under slash-separated keys. A reader sees the old or the new content, never a part."""

    async def put(self, key: str, data: bytes) -> BlobInfo:
        """Store or replace. Idempotent. Raises `InvalidInput` for a key with empty, `.` or `..` segments."""
        ...

    async def get(self, key: str) -> bytes:
        """The content; raises `NotFound`, or `RecordCorrupt` if it does not match its stored digest."""
        ...

    async def list(self, prefix: str = "") -> list[BlobInfo]:
        """All blobs whose key starts with `prefix`, by key."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; removing what is not there is no error."""
        ...


# ---------------------------------------------------------------- records


class Stored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record as read."""

    key: str
    value: bytes
    # 1 at creation, +1 with each write.
    version: int


class Write(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One conditional write."""

    key: str
    # None deletes.
    value: bytes | None
    # 0: must not exist yet. n: must be at version n. None: unconditional.
    expected: int | None


class RecordStore(Protocol):
    """Small records with compare-and-set. Keys are `kind/partition/...`; reads are strongly consistent per key."""

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        """One entry a key, in order; None where there is no record."""
        ...

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        """Try each write; True where it was applied, False where the expectation did not hold.

        Each write is atomic by itself, the sequence is not. Writes to one key are applied in order.
        """
        ...

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """Records whose key starts with `prefix` and is greater than `after`, by key, at most `limit`.

        `prefix` holds at least `kind/partition/`. Pages are not a snapshot.
        """
        ...


# ---------------------------------------------------------------- queues


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is sent."""

    body: bytes
    # Messages of one group are delivered in order, one at a time.
    group: str
    # A second send of the same id within the deduplication window (300 s) is swallowed; include the delivery epoch.
    # None: never swallowed, for news that may well come twice.
    dedup_id: str | None


class Leased(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is received."""

    body: bytes
    group: str
    # Opaque; good for extend, ack and release until the lease ends.
    receipt: str
    # 1 on the first delivery.
    num_receives: int


class WorkQueue(Protocol):
    """At-least-once FIFO per group: while a message of a group is leased, later ones of that group wait."""

    async def send(self, messages: Sequence[Message]) -> None:
        """Append. All are durable on return; order within the sequence is kept per group."""
        ...

    async def lease(self, *, max_messages: int, lease_s: float, wait_s: float = 0.0) -> list[Leased]:
        """Up to `max_messages`, hidden from others for `lease_s`; waits up to `wait_s` for the first one.

        A message received more often than the queue's limit goes to the dead letters instead.
        """
        ...

    async def take(self, *, max_messages: int, wait_s: float = 0.0) -> list[Leased]:
        """Like `lease`, but what comes is removed at once and never delivered again, whatever becomes of the caller.

        Half the work, for news of what is recorded elsewhere. The receipts are good for nothing.
        """
        ...

    async def extend(self, receipts: Sequence[str], lease_s: float) -> list[bool]:
        """Renew leases from now; False where the lease was lost."""
        ...

    async def ack(self, receipts: Sequence[str]) -> list[bool]:
        """Remove for good; False where the lease was lost (the message may be delivered again)."""
        ...

    async def release(self, receipts: Sequence[str], *, delay_s: float = 0.0) -> None:
        """Give back before the lease ends; a lost lease is no error."""
        ...


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """Approximate on AWS, exact when embedded."""

    available: int
    in_flight: int
    delayed: int
    dead: int
    # Seconds since the oldest message was sent, leased and delayed ones included; None without one, or where unknown.
    # Counts are equal where they count the same messages, however old.
    oldest_age_s: float | None = field(default=None, compare=False)
    # Messages sent since the queue was made, without those that were swallowed; None where nobody counts them.
    num_sent: int | None = field(default=None, compare=False)

    @property
    def num_held(self) -> int:
        """All that is there, dead letters included: what was sent and is not held has been removed."""
        return self.available + self.in_flight + self.delayed + self.dead


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A message that was received too often."""

    # Opaque; no other message of the queue ever has it.
    letter_id: str
    body: bytes
    group: str
    num_receives: int
    dead_at: float


class QueueAdmin(Protocol):
    """Operating a queue; not for the data path."""

    async def counts(self) -> QueueCounts: ...

    async def purge(self) -> int:
        """Remove all messages, leased ones too (dead letters stay); how many."""
        ...

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]: ...

    async def redrive(self, letter_ids: Sequence[str] | None = None) -> int:
        """Move the dead letters of these ids, or all, back, their counts at zero; how many were there."""
        ...

    async def discard(self, letter_ids: Sequence[str]) -> int:
        """Remove the dead letters of these ids for good; how many were there."""
        ...


class Queue(WorkQueue, QueueAdmin, Protocol):
    """Both sides of one queue."""


class Count(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How much a write adds to a counter: the record under `key`, a decimal number, 0 before the first one."""

    key: str
    amount: int


class Outbox(Protocol):
    """Records and the news of them in one go: the transactional outbox of a queue."""

    async def write(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count] = ()) -> list[bool]:
        """Try each write, and send its message where it was applied; True there, False where it was not.

        `counts`, where given, has one for each entry: what is applied is counted, in the same transaction, so that a
        counter says exactly what its records do.

        In one transaction where the backend has it, else the record first: no message tells of a record that is not
        there, and a record whose message was lost is found by those who wait for it. Raises `InvalidInput`, having
        done nothing, for the key of a record that does not belong here.
        """
        ...


# ---------------------------------------------------------------- weights


class WeightStore(Protocol):
    """Weight versions and a pointer to the current one. A version's content never changes."""

    async def publish(self, version: Version, source: Path, digest: str) -> WeightVersion:
        """Store the folder `source` (holding `model.safetensors`) as `version`; does not move the pointer.

        Idempotent for equal digests; raises `VersionConflict` if the version is there with another digest.
        """
        ...

    async def point(self, version: Version) -> None:
        """Make `version` current; raises `NotFound` if it was never published."""
        ...

    async def current(self) -> WeightVersion | None:
        """The version pointed to; cheap enough to ask before every call."""
        ...

    async def get(self, version: Version) -> WeightVersion:
        """Raises `NotFound`."""
        ...

    async def prune(self, keep: Sequence[Version]) -> None:
        """Delete all versions but `keep` and the current one."""
        ...


# ---------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A published model and the folder or URI from which it can be loaded."""

    model: PublishedModel
    location: str


class ModelStore(Protocol):
    """The deployment's published models. A version's content never changes."""

    async def publish(self, model: PublishedModel, source: Path, documents: Mapping[str, bytes]) -> StoredModel:
        """Store the folder `source` (Hugging Face format) and the documents, by file name; `model.files` is filled in.

        The first one stands: published again, whatever was published before is returned. Raises `VersionConflict` if
        the version is there with another weight digest.
        """
        ...

    async def find(self, run_id: str, version: Version) -> StoredModel | None:
        """None where it was not published."""
        ...


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A process to run: `turnmill role ROLE --run RUN --name NAME` with `env` added to its environment."""

    role: str
    # Unique within the run, e.g. `replica-0`.
    name: str
    run_id: str
    # Secrets travel here, never in the arguments.
    env: Mapping[str, str] = field(default_factory=dict)
    # How often in a row it is started again after it died (one that lived for long begins anew); 0: its death is final.
    max_restarts: int = 0
    # Exit codes with which it ends for good, without a restart: 0 is an end, any other one a failure.
    final_exit_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """A started role."""

    name: str
    # running | exited | failed (died, and may not be started again)
    state: str
    num_restarts: int
    exit_code: int | None
    pid: int | None
    # Last lines of its log.
    log_tail: tuple[str, ...] = ()


class Launcher(Protocol):
    """Starts roles, watches them, ends only what it started."""

    async def start(self, spec: RoleSpec) -> None:
        """Start; starting a name that runs already does nothing."""
        ...

    async def statuses(self) -> list[RoleStatus]:
        """All roles started so far, in order of their start."""
        ...

    async def stop(self, name: str) -> None:
        """End it (ask, wait, then force) and never start it again; idempotent."""
        ...

    async def close(self) -> None:
        """Stop everything, last started first."""
        ...


# ---------------------------------------------------------------- where a run keeps things


class RunInfra(Protocol):
    """What the ports of one run stand on: its queues, records, and places for blobs, weights, logs and checkpoints."""

    async def deploy(self) -> list[str]:
        """Make all of it and write to each part, so that a later write finds it there; their names, for people.

        Idempotent: what is there stays as it is. Raises `BackendUnavailable` naming what can't be made or written.
        """
        ...

    async def free_bytes(self) -> int | None:
        """How much more can be stored; None where nothing limits it."""
        ...

    async def retire(self) -> int:
        """Remove the messages that wait in the queues of a run that has ended; how many.

        Dead letters, records and everything else stay. Idempotent; makes nothing.
        """
        ...

    async def delete(self) -> None:
        """Remove all of it, results included, when the ports of the run are closed in every process.

        Idempotent; ended in the middle, it is done again.
        """
        ...


# ---------------------------------------------------------------- metrics


class MetricSink(Protocol):
    """Numbers per optimizer step."""

    async def write(self, metric: Metric) -> None:
        """Append; a step written twice counts once (the last one wins)."""
        ...

    async def read(self, run_id: str) -> list[Metric]:
        """All metrics of a run by step."""
        ...


# ---------------------------------------------------------------- alerts


class Notifier(Protocol):
    """A channel to people: a log, a webhook, a chat, a pager. It tries once; whoever calls it is the retry owner.

    Not idempotent: a call that failed, or whose caller was killed, may have been delivered, and comes again. Its
    receiver drops what it knows by the alert's id. What a channel has no room for (long errors, early log lines) is
    cut and marked as such; the alert's record holds all of it.
    """

    @property
    def name(self) -> str:
        """Unique in the deployment; letters, digits, `_` and `-`."""
        ...

    async def send(self, alert: Alert) -> None:
        """Tell of it; raises `DeliveryFailed`, whose text holds no secret."""
        ...

    async def resolve(self, alert: Alert) -> None:
        """Tell that it is over; raises `DeliveryFailed`. Resolving what was never sent is no error."""
        ...


# ---------------------------------------------------------------- a backend


@dataclass(frozen=True, kw_only=True)
class RunPorts:
    """Everything that a role needs of one run."""

    # The deployment's store: `runs/...`.
    runs: RecordStore
    # The run's own store: samples, calls, batches, statuses.
    records: RecordStore
    blobs: BlobStore
    weights: WeightStore
    # The deployment's.
    models: ModelStore
    metrics: MetricSink
    rollout_request: Queue
    rollout_response: Queue
    # One queue a replica, by index.
    generate_request: Sequence[Queue]
    generate_response: Queue
    # Call records, and generate_response.
    answers: Outbox
    infra: RunInfra
    # Releases files, threads and wake-ups; idempotent.
    close: Callable[[], None]
