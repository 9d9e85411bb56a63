"""The way of one batch from its record to samples TRAINED; made anew after a crash, or once more from the records.

    record: batch RECORDED -> samples BATCHED
    apply:  check records -> audit -> step -> publish weights -> batch APPLIED -> point to it -> samples TRAINED
    replay: check records -> audit -> step -> the weights must be those that were recorded

A step commits with the write that makes its batch APPLIED; everything after follows from it.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnmill import failpoints
from turnmill.errors import AuditFailed, NotFound, RecordCorrupt
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    Batch,
    BatchState,
    Progress,
    Purpose,
    ReplicaStatus,
    SampleRecord,
    SampleState,
    Version,
    decode,
    encode,
    replica_key,
    sample_key,
)
from turnmill.training.audit import check_fingerprints
from turnmill.training.checkpoint import writing
from turnmill.training.collector import get_all, load_calls
from turnmill.training.history import StoredBatch, write_all
from turnmill.training.samples import TrainingSample, rows_of, stored_record
from turnmill.training.status import Status
from turnmill.training.tally import Seconds
from turnmill.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)
BASE_VERSION = Version(incarnation=0, n=0)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A recorded batch that this trainer may apply."""

    batch: Batch
    # Of its record.
    version: int
    # In order, as they are stored, with the versions of their records.
    samples: tuple[tuple[SampleRecord, int], ...]


class Stepper:
    """The optimizer steps of one trainer process."""

    def __init__(self, ports: RunPorts, run_id: str, trainer: Trainer, status: Status, folder: Path) -> None:
        self._ports = ports
        self._run_id = run_id
        self.trainer = trainer
        self._status = status
        # Holds weights until they are published: if this process is killed, they are left where the run's files are.
        self._folder = folder
        # Optimizer steps made, and the version that holds them.
        self.step = 0
        self.version = BASE_VERSION
        # The trainer's fingerprints by version text, oldest first.
        self.fingerprints: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Fingerprint of the current version."""
        return self.fingerprints[str(self.version)]

    # ------------------------------------------------------------ versions

    async def begin(self) -> None:
        """Store version 0.0, which is what the trainer holds now."""
        self.fingerprints[str(BASE_VERSION)] = await asyncio.to_thread(self.trainer.fingerprint)
        await self._publish(BASE_VERSION)

    async def point(self) -> None:
        """Make the current version the one that is served, and keep no other but the base."""
        await self._publish(self.version)
        await self._ports.weights.point(self.version)
        await self._ports.weights.prune([BASE_VERSION, self.version])

    async def _publish(self, version: Version) -> None:
        """Store the current weights as `version` unless it is there; raises `VersionConflict` if with other weights."""
        digest = self.fingerprints[str(version)]
        try:
            if (await self._ports.weights.get(version)).digest == digest:
                return
        except NotFound:
            pass
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".weights-", dir=self._folder) as name:
                folder = Path(name)
                await asyncio.to_thread(self.trainer.save_weights, folder)
                await self._ports.weights.publish(version, folder, digest)

    # ------------------------------------------------------------ record

    async def record(self, groups: tuple[tuple[str, ...], ...], progress: Progress, values: dict[str, float]) -> Taken:
        """Store the next batch, and that its samples are in it; raises `Conflict` if the run has another trainer."""
        batch = Batch(
            run_id=self._run_id,
            step=self.step + 1,
            incarnation=self._status.incarnation,
            groups=groups,
            progress=progress,
            values=values,
        )
        failpoints.hit("batch-closed")
        await write_all(self._ports.records, [Write(key=batch.key, value=encode(batch), expected=0)])
        failpoints.hit("batch-recorded")
        # Recorded first, looked second: a trainer that took over meanwhile has seen this batch, or this one stops here.
        await self._status.check()
        samples = []
        for sample, version in await self._read(batch, SampleState.REPORTED):
            samples.append((replace(sample, state=SampleState.BATCHED, step=batch.step), version))
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=version) for s, version in samples]
        )
        failpoints.hit("samples-batched")
        taken = tuple((sample, version + 1) for sample, version in samples)
        return Taken(batch=batch, version=1, samples=taken)

    async def retake(self, stored: StoredBatch) -> Taken:
        """Take over a batch that an earlier trainer recorded and did not apply; its samples are settled.

        The record is written as it is: whoever still means to apply the batch has lost that compare-and-set now.
        """
        batch = stored.batch
        await write_all(self._ports.records, [Write(key=batch.key, value=encode(batch), expected=stored.version)])
        samples = await self._read(batch, SampleState.BATCHED)
        return Taken(batch=batch, version=stored.version + 1, samples=tuple(samples))

    async def _read(self, batch: Batch, state: SampleState) -> list[tuple[SampleRecord, int]]:
        """The batch's samples, in order, with the versions of their records; all must be in `state`."""
        keys = [sample_key(self._run_id, Purpose.TRAIN, sample_id) for sample_id in batch.sample_ids]
        samples: list[tuple[SampleRecord, int]] = []
        for key, stored in zip(keys, await get_all(self._ports.records, keys), strict=True):
            sample = stored_record(stored, key, SampleRecord)
            if stored is None or sample.state is not state:
                raise RecordCorrupt(f"{key}: state: expected {state!r}, found {sample.state!r}")
            samples.append((sample, stored.version))
        return samples

    # ------------------------------------------------------------ apply

    async def apply(
        self,
        taken: Taken,
        seconds: Seconds,
        beside: Coroutine[Any, Any, None],
        values: Callable[[], dict[str, float]],
        *,
        is_vouched: bool = True,
    ) -> StepResult:
        """Make the step of a taken batch, with `beside` running at the same time; adds to `seconds`.

        When `beside` has ended, `values` are stored with the applied batch in place of what it was recorded with.
        Without `is_vouched` the replicas that sampled may be gone (see `check_fingerprints`).
        """
        begun = time.monotonic()
        # A task even before the records are read: a coroutine that is never started is a defect.
        other = asyncio.create_task(beside, name="beside the step")
        try:
            samples = [sample for sample, _ in taken.samples]
            groups = await self._load(taken.batch, samples, is_vouched=is_vouched)
            result = await asyncio.to_thread(self.trainer.step, groups, taken.batch.parts)
            stepped = time.monotonic()
            await other
        finally:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        drained = time.monotonic()
        failpoints.hit("step-made")
        version = Version(incarnation=self._status.incarnation, n=taken.batch.step)
        self.fingerprints[str(version)] = digest = await asyncio.to_thread(self.trainer.fingerprint)
        await self._publish(version)
        failpoints.hit("weights-stored")
        applied = replace(taken.batch, state=BatchState.APPLIED, version=version, digest=digest, values=values())
        await write_all(self._ports.records, [Write(key=applied.key, value=encode(applied), expected=taken.version)])
        failpoints.hit("batch-applied")
        await self._ports.weights.point(version)
        failpoints.hit("weights-pointed")
        previous, self.version, self.step = self.version, version, taken.batch.step
        trained = [(replace(sample, state=SampleState.TRAINED), stored) for sample, stored in taken.samples]
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=stored) for s, stored in trained]
        )
        failpoints.hit("samples-trained")
        await self._ports.weights.prune([BASE_VERSION, previous, version])
        seconds.train_s += stepped - begun
        seconds.generate_s += drained - stepped
        seconds.publish_s += time.monotonic() - drained
        return result

    async def replay(self, batch: Batch) -> StepResult:
        """Make the step of an applied batch again; raises `AuditFailed` unless it gives the recorded weights."""
        samples = [sample for sample, _ in await self._read(batch, SampleState.TRAINED)]
        groups = await self._load(batch, samples, is_vouched=False)
        result = await asyncio.to_thread(self.trainer.step, groups, batch.parts)
        digest = await asyncio.to_thread(self.trainer.fingerprint)
        if digest != batch.digest or batch.version is None:
            raise AuditFailed(
                f"step {batch.step} made again from its recorded batch gives the weights {digest}; recorded was "
                f"{batch.digest} (version {batch.version}). Torch, its number of threads or the kind of machine is not "
                "what it was, or a record was altered: go on from a step that has a checkpoint, which needs no replay"
            )
        self.version, self.step = batch.version, batch.step
        logger.info("step %d made again from its batch: same weights", batch.step, extra={"at": self._run_id})
        return result

    async def _load(
        self, batch: Batch, samples: Sequence[SampleRecord], *, is_vouched: bool
    ) -> list[list[TrainingSample]]:
        """The batch as the trainer takes it, checked against its digests and the replicas' fingerprints."""
        checked: dict[str, TrainingSample] = {}
        versions: set[str] = set()
        for sample, calls in zip(samples, await load_calls(self._ports.records, samples), strict=True):
            rows = tuple(rows_of(sample, calls))
            if sample.reward is None:
                raise RecordCorrupt(f"{sample.key}: reward: expected a number, found None")
            checked[sample.sample_id] = TrainingSample(key=sample.key, reward=sample.reward, rows=rows)
            versions |= {call.version for call in calls if any(call.loss_mask)}
        found = await self._ports.records.scan(replica_key(self._run_id, ""))
        replicas = [decode(stored.value, ReplicaStatus) for stored in found]
        check_fingerprints(replicas, self.fingerprints, versions, is_vouched=is_vouched)
        return [[checked[sample_id] for sample_id in group] for group in batch.groups]
