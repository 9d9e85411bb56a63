"""The way of one batch from its record to samples TRAINED; made anew after a crash, or once more from the records.

    record: batch RECORDED -> samples BATCHED
    make:   check replicas -> audit -> step
    commit: publish weights -> batch APPLIED -> point to it
    settle: samples TRAINED, older weights removed
    replay: check records -> audit -> step -> the weights must be those that were recorded

A step commits with the write that makes its batch APPLIED; everything after follows from it. Once the weights are
pointed to, the next batch may be played: what `settle` writes, only the next `record` has to wait for.
"""

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from turnmill import failpoints
from turnmill.errors import AuditFailed, NotFound, RecordCorrupt
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    Batch,
    BatchState,
    Progress,
    Purpose,
    SampleRecord,
    SampleState,
    Version,
    encode,
    sample_key,
)
from turnmill.training.audit import check_fingerprints
from turnmill.training.checkpoint import writing
from turnmill.training.history import StoredBatch, write_all
from turnmill.training.played import get_all, load_calls
from turnmill.training.samples import TrainingSample, check_sample, stored_record, training_sample
from turnmill.training.served import read_replicas
from turnmill.training.stale_audit import StaleAudit, StaleTokens
from turnmill.training.status import Status
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
        # On policy all tokens are of the current version.
        self._audit = StaleAudit(trainer, ports.weights) if trainer.config.is_async else None
        # Versions of the last steps: those that tokens of the next batch may be of, and the one before the current one,
        # which a replica may be loading.
        self._kept: deque[Version] = deque([BASE_VERSION], maxlen=max(2, trainer.config.max_staleness + 1))
        # The trainer's fingerprints by version text, oldest first.
        self.fingerprints: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Fingerprint of the current version."""
        return self.fingerprints[str(self.version)]

    @property
    def next_version(self) -> Version:
        """What the next step makes."""
        return Version(incarnation=self._status.incarnation, n=self.step + 1)

    # ------------------------------------------------------------ versions

    async def begin(self) -> None:
        """Store version 0.0, which is what the trainer holds now."""
        self.fingerprints[str(BASE_VERSION)] = await asyncio.to_thread(self.trainer.fingerprint)
        await self._publish(BASE_VERSION)

    def follow(self, applied: Sequence[Batch]) -> None:
        """Take over from the trainers that applied these batches, all there are."""
        self.fingerprints |= {str(batch.version): batch.digest or "" for batch in applied}
        self._kept.extend(batch.version for batch in applied if batch.version is not None)

    async def point(self) -> None:
        """Make the current version the one that is served."""
        await self._publish(self.version)
        await self._ports.weights.point(self.version)
        await self._prune()

    async def _prune(self) -> None:
        """Remove versions of which no token is trained any more, and that no replica may be loading."""
        await self._ports.weights.prune([BASE_VERSION, *self._kept])

    def _reach(self, version: Version) -> None:
        """The step that makes `version` is applied."""
        self.version, self.step = version, version.n
        if version not in self._kept:
            self._kept.append(version)

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
            taken = replace(sample, state=SampleState.BATCHED, step=batch.step, versions=known.versions)
            batched.append((taken, version))
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=version) for s, version in batched]
        )
        failpoints.hit("samples-batched")
        samples_taken = tuple((sample, version + 1) for sample, version in batched)
        return Taken(batch=batch, version=1, samples=samples_taken)

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

    async def make(
        self,
        taken: Taken,
        groups: Sequence[Sequence[TrainingSample]],
        *,
        gradients: Callable[[], Awaitable[None]] | None = None,
        stale: Awaitable[StaleTokens] | None = None,
        is_vouched: bool = True,
    ) -> StepResult:
        """Make the step of a taken batch, whose samples are `groups`, in the trainer.

        `gradients` waits until those of all groups are accumulated; without it, they are made here. `stale` is what
        `audit_stale` finds of the batch, where that was begun before. Without `is_vouched` the replicas that sampled
        may be gone (see `check_fingerprints`).
        """
        result = await self._make(groups, taken.batch.parts, gradients, stale, is_vouched=is_vouched)
        failpoints.hit("step-made")
        return result

    async def _make(
        self,
        groups: Sequence[Sequence[TrainingSample]],
        parts: Sequence[int],
        gradients: Callable[[], Awaitable[None]] | None,
        stale: Awaitable[StaleTokens] | None,
        *,
        is_vouched: bool,
    ) -> StepResult:
        """Audit and step. Tokens of older versions are audited beside the gradients, and before the update."""
        await self._check_replicas(groups, is_vouched=is_vouched)
        found = await (stale or self.audit_stale(groups, self.step + 1, may_be_gone=not is_vouched))
        if gradients is None:
            version = str(self.version) if self.trainer.config.is_async else None
            result = await asyncio.to_thread(self.trainer.step, groups, parts, threads=self._threads, version=version)
        else:
            await gradients()
            result = await asyncio.to_thread(self.trainer.finish)
        return found.added_to(result)

    async def audit_stale(
        self, groups: Sequence[Sequence[TrainingSample]], step: int, *, may_be_gone: bool = False
    ) -> StaleTokens:
        """What is found of the older tokens in the batch of step `step`; it may be asked for before its turn comes.

        Older than the weights that the step starts from: the tokens of those are compared in the passes that make its
        gradients. See `StaleAudit.check`.
        """
        if self._audit is None:
            return StaleTokens()
        # That of a step which is not made yet is of this process.
        current = self.version if step == self.step + 1 else Version(incarnation=self._status.incarnation, n=step - 1)
        return await self._audit.check(groups, current, self.fingerprints, may_be_gone=may_be_gone)

    async def commit(self, taken: Taken, values: dict[str, float]) -> None:
        """Store the weights of the step just made, and the batch as applied with `values`; and have them served."""
        version = self.next_version
        self.fingerprints[str(version)] = digest = await asyncio.to_thread(self.trainer.fingerprint)
        await self._publish(version)
        failpoints.hit("weights-stored")
        applied = replace(taken.batch, state=BatchState.APPLIED, version=version, digest=digest, values=values)
        await write_all(self._ports.records, [Write(key=applied.key, value=encode(applied), expected=taken.version)])
        failpoints.hit("batch-applied")
        await self._ports.weights.point(version)
        failpoints.hit("weights-pointed")
        self._reach(version)

    async def settle(self, taken: Taken) -> None:
        """Tell the samples of the step just made, and remove versions that are too old."""
        trained = [(replace(sample, state=SampleState.TRAINED), stored) for sample, stored in taken.samples]
        await write_all(
            self._ports.records, [Write(key=s.key, value=encode(s), expected=stored) for s, stored in trained]
        )
        failpoints.hit("samples-trained")
        await self._prune()

    async def replay(self, batch: Batch) -> StepResult:
        """Make the step of an applied batch again; raises `AuditFailed` unless it gives the recorded weights."""
        samples = [sample for sample, _ in await self._read(batch, SampleState.TRAINED)]
        groups = await self.load(batch, samples)
        result = await self._make(groups, batch.parts, None, None, is_vouched=False)
        digest = await asyncio.to_thread(self.trainer.fingerprint)
        if digest != batch.digest or batch.version is None:
            raise AuditFailed(
                f"step {batch.step} made again from its recorded batch gives the weights {digest}; recorded was "
                f"{batch.digest} (version {batch.version}). Torch or the kind of machine is not what it was, or a "
                "record was altered: go on from a step that has a checkpoint, which needs no replay"
            )
        self._reach(batch.version)
        logger.info("step %d made again from its batch: same weights", batch.step, extra={"at": self._run_id})
        return result

    async def load(self, batch: Batch, samples: Sequence[SampleRecord]) -> list[list[TrainingSample]]:
        """A batch as the trainer takes it, checked against its digests."""
        loaded = await load_calls(self._ports.records, samples)
        found = (training_sample(sample, calls) for sample, calls in zip(samples, loaded, strict=True))
        checked = {sample.sample_id: ready for sample, ready in zip(samples, found, strict=True)}
        return [[checked[sample_id] for sample_id in group] for group in batch.groups]

    async def _check_replicas(self, groups: Sequence[Sequence[TrainingSample]], *, is_vouched: bool) -> None:
        """The replicas' fingerprints of all versions that sampled a trained token.

        Off policy a replica may have ended since and come back with a newer version: the audit of the tokens is what
        vouches for the older one then.
        """
        rows = [row for group in groups for sample in group for row in sample.rows]
        versions = {version for row in rows for version in row.trained_versions}
        replicas = await read_replicas(self._ports.records, self._run_id)
        is_vouched = is_vouched and not self.trainer.config.is_async
        check_fingerprints(replicas, self.fingerprints, versions, is_vouched=is_vouched)
