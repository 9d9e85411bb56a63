"""The way of one batch from its record to samples TRAINED; made anew after a crash, or once more from the records.

    record: batch RECORDED -> samples BATCHED
    apply:  check replicas -> audit -> step -> publish weights -> batch APPLIED -> point to it
    settle: samples TRAINED, older weights removed
    replay: check records -> audit -> step -> the weights must be those that were recorded

A step commits with the write that makes its batch APPLIED; everything after follows from it. Once the weights are
pointed to, the next batch may be played: what `settle` writes, only the next `record` has to wait for.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from turnmill.training.samples import TrainingSample, check_sample, stored_record, training_sample
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

    def __init__(
        self, ports: RunPorts, run_id: str, trainer: Trainer, status: Status, folder: Path, *, threads: int
    ) -> None:
        """`threads` make the passes of a step that is made here as a whole: then nothing is being played yet."""
        self._ports = ports
        self._run_id = run_id
        self.trainer = trainer
        self._status = status
        # Holds weights until they are published: if this process is killed, they are left where the run's files are.
        self._folder = folder
        self._threads = threads
        # Optimizer steps made, and the version that holds them.
        self.step = 0
        self.version = BASE_VERSION
        self._previous = BASE_VERSION
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

    async def record(
        self,
        groups: tuple[tuple[str, ...], ...],
        samples: Sequence[Sequence[TrainingSample]],
        parts: tuple[int, ...],
        progress: Progress,
        values: dict[str, float],
    ) -> Taken:
        """Store the next batch, and that its samples are in it; raises `Conflict` if the run has another trainer.

        `samples` are those of the groups as they were read before: raises `RecordCorrupt` if they are others by now.
        """
        batch = Batch(
            run_id=self._run_id,
            step=self.step + 1,
            incarnation=self._status.incarnation,
            groups=groups,
            parts=parts,
            progress=progress,
            values=values,
        )
        failpoints.hit("batch-closed")
        await write_all(self._ports.records, [Write(key=batch.key, value=encode(batch), expected=0)])
        failpoints.hit("batch-recorded")
        # Recorded first, looked second: a trainer that took over meanwhile has seen this batch, or this one stops here.
        await self._status.check()
        batched = []
        found = await self._read(batch, SampleState.REPORTED)
        for (sample, version), known in zip(found, chain.from_iterable(samples), strict=True):
            check_sample(sample)
            if (sample.key, sample.report_digest) != (known.key, known.report_digest):
                raise RecordCorrupt(
                    f"{sample.key}: report_digest: expected {known.report_digest} of {known.key}, "
                    f"found {sample.report_digest}"
                )
            batched.append((replace(sample, state=SampleState.BATCHED, step=batch.step), version))
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=version) for s, version in batched]
        )
        failpoints.hit("samples-batched")
        taken = tuple((sample, version + 1) for sample, version in batched)
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
        groups: Sequence[Sequence[TrainingSample]],
        seconds: Seconds,
        beside: Coroutine[Any, Any, None],
        values: Callable[[], dict[str, float]],
        *,
        gradients: Callable[[], Awaitable[None]] | None = None,
        is_vouched: bool = True,
    ) -> StepResult:
        """Make the step of a taken batch, whose samples are `groups`, and have its weights served; adds to `seconds`.

        `gradients` waits until those of all groups are accumulated; without it, they are made here. `beside` runs at
        the same time; when it has ended, `values` are stored with the applied batch in place of what it was recorded
        with. Without `is_vouched` the replicas that sampled may be gone (see `check_fingerprints`).
        """
        begun = time.monotonic()
        # A task even before the replicas are looked at: a coroutine that is never started is a defect.
        other = asyncio.create_task(beside, name="beside the step")
        try:
            await self._check_replicas(groups, is_vouched=is_vouched)
            if gradients is None:
                result = await asyncio.to_thread(self.trainer.step, groups, taken.batch.parts, threads=self._threads)
            else:
                await gradients()
                result = await asyncio.to_thread(self.trainer.finish)
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
        self._previous, self.version, self.step = self.version, version, taken.batch.step
        seconds.train_s += stepped - begun
        seconds.generate_s += drained - stepped
        seconds.publish_s += time.monotonic() - drained
        return result

    async def settle(self, taken: Taken) -> None:
        """Tell the samples of the step just made, and remove what is older than the version before it."""
        trained = [(replace(sample, state=SampleState.TRAINED), stored) for sample, stored in taken.samples]
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=stored) for s, stored in trained]
        )
        failpoints.hit("samples-trained")
        await self._ports.weights.prune([BASE_VERSION, self._previous, self.version])

    async def replay(self, batch: Batch) -> StepResult:
        """Make the step of an applied batch again; raises `AuditFailed` unless it gives the recorded weights."""
        samples = [sample for sample, _ in await self._read(batch, SampleState.TRAINED)]
        groups = await self.load(batch, samples)
        await self._check_replicas(groups, is_vouched=False)
        result = await asyncio.to_thread(self.trainer.step, groups, batch.parts, threads=self._threads)
        digest = await asyncio.to_thread(self.trainer.fingerprint)
        if digest != batch.digest or batch.version is None:
            raise AuditFailed(
                f"step {batch.step} made again from its recorded batch gives the weights {digest}; recorded was "
                f"{batch.digest} (version {batch.version}). Torch or the kind of machine is not what it was, or a "
                "record was altered: go on from a step that has a checkpoint, which needs no replay"
            )
        self.version, self.step = batch.version, batch.step
        logger.info("step %d made again from its batch: same weights", batch.step, extra={"at": self._run_id})
        return result

    async def load(self, batch: Batch, samples: Sequence[SampleRecord]) -> list[list[TrainingSample]]:
        """A batch as the trainer takes it, checked against its digests."""
        loaded = await load_calls(self._ports.records, samples)
        found = (training_sample(sample, calls) for sample, calls in zip(samples, loaded, strict=True))
        checked = {sample.sample_id: ready for sample, ready in zip(samples, found, strict=True)}
        return [[checked[sample_id] for sample_id in group] for group in batch.groups]

    async def _check_replicas(self, groups: Sequence[Sequence[TrainingSample]], *, is_vouched: bool) -> None:
        """The replicas' fingerprints of all versions that sampled a trained token."""
        rows = [row for group in groups for sample in group for row in sample.rows]
        versions = {span.version for row in rows for span in row.spans if any(row.loss_mask[span.start : span.end])}
        found = await self._ports.records.scan(replica_key(self._run_id, ""))
        replicas = [decode(stored.value, ReplicaStatus) for stored in found]
        check_fingerprints(replicas, self.fingerprints, versions, is_vouched=is_vouched)
