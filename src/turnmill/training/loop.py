"""Training from the first rollout to the final checkpoint.

    collect a batch -> record it -> samples BATCHED -> check records -> audit fingerprints -> step -> publish weights
        -> batch APPLIED -> point to the new version -> samples TRAINED -> metric -> collect the next batch

One task runs it. It consumes closed batches from the collector, waits for rollouts (collector) and for the step (a
thread, so that the rollout source goes on meanwhile), is unblocked by ended samples, and produces weight versions,
metrics and a checkpoint. A step commits with the write that makes its batch APPLIED; everything after follows from it.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from turnmill.config import Config
from turnmill.errors import Conflict, NoProgress, NotFound, RecordCorrupt
from turnmill.ports import RecordStore, RunPorts, Write
from turnmill.records import (
    Batch,
    BatchState,
    Metric,
    Purpose,
    ReplicaStatus,
    Run,
    SampleRecord,
    SampleState,
    Task,
    TrainingStatus,
    Version,
    decode,
    encode,
    replica_key,
    sample_key,
    training_key,
)
from turnmill.training.audit import check_fingerprints
from turnmill.training.batcher import BatchBuilder, Closed
from turnmill.training.checkpoint import Manifest, export
from turnmill.training.collector import Collector, RolloutSource, get_all, load_calls
from turnmill.training.samples import TrainingSample, rows_of, stored_record
from turnmill.training.tally import Tally, step_values
from turnmill.training.trainer import StepResult, Trainer

logger = logging.getLogger(__name__)
BASE_VERSION = Version(incarnation=0, n=0)
FINAL = "final"
# Collections without any signal, in a row, that stop the run.
MAX_EMPTY_ROUNDS = 10
# Collections with more than half of their samples invalid, in a row, that stop the run.
MAX_INVALID_ROUNDS = 3


async def train(
    ports: RunPorts,
    *,
    run: Run,
    config: Config,
    tasks: Sequence[Task],
    rollouts: RolloutSource,
    trainer: Trainer,
    folder: Path,
    stop: asyncio.Event,
) -> None:
    """Train `config.max_steps` steps, or until `stop`, and leave the final checkpoint in `folder`/final.

    The outcome is in the run's `TrainingStatus` too: succeeded, cancelled, or failed with the text of the error that
    is raised. When stopped, what is being collected is cancelled and the last weights are exported.
    """
    status = await _Status.open(ports.records, run.run_id, config.max_steps)
    builder = BatchBuilder(config, tasks, prefix=f"{status.incarnation}.")
    collector = Collector(ports.records, rollouts, builder, config, stop)
    training = _Training(ports, run.run_id, config, collector, trainer, status, folder)
    try:
        await training.publish_base()
        state = await training.steps(stop)
        checkpoint = await training.export(folder / FINAL) if state == "succeeded" or training.step else None
        await status.write(state, training.step, checkpoint=checkpoint, version=training.version)
    except Exception as error:
        # The supervision boundary of the trainer: leave no sample open and say why it ended.
        logger.error("training stopped at step %d: %s", training.step, error, extra={"at": run.run_id})
        try:
            await collector.cancel()
        finally:
            await status.write("failed", training.step, error=f"{type(error).__name__}: {error}")
        raise


class _Status:
    """The `TrainingStatus` record; written by compare-and-set, so a second trainer of the run fences the first."""

    def __init__(self, records: RecordStore, run_id: str, max_steps: int, incarnation: int, stored: int) -> None:
        self._records = records
        self._run_id = run_id
        self._max_steps = max_steps
        self.incarnation = incarnation
        self._stored = stored

    @classmethod
    async def open(cls, records: RecordStore, run_id: str, max_steps: int) -> "_Status":
        """Become the next incarnation; raises `Conflict` if the run has batches that another trainer recorded."""
        if await records.scan(f"batches/{run_id}/", limit=1):
            raise Conflict(f"run {run_id} has been trained already and can't be continued: start a new run")
        (found,) = await records.get([training_key(run_id)])
        incarnation = decode(found.value, TrainingStatus).incarnation + 1 if found else 1
        status = cls(records, run_id, max_steps, incarnation, found.version if found else 0)
        await status.write("running", 0)
        return status

    async def write(
        self,
        state: str,
        step: int,
        *,
        error: str | None = None,
        checkpoint: Path | None = None,
        version: Version | None = None,
    ) -> None:
        record = TrainingStatus(
            run_id=self._run_id,
            state=state,
            step=step,
            max_steps=self._max_steps,
            incarnation=self.incarnation,
            updated_at=time.time(),
            error=error,
            checkpoint=str(checkpoint) if checkpoint else None,
            version=version,
        )
        await _write_all(
            self._records, [Write(key=training_key(self._run_id), value=encode(record), expected=self._stored)]
        )
        self._stored += 1


class _Training:
    """The steps of one trainer process."""

    def __init__(
        self,
        ports: RunPorts,
        run_id: str,
        config: Config,
        collector: Collector,
        trainer: Trainer,
        status: _Status,
        folder: Path,
    ) -> None:
        self._ports = ports
        self._run_id = run_id
        self._config = config
        self._collector = collector
        self._trainer = trainer
        self._status = status
        # Holds weights until they are published: if this process is killed, they are left where the run's files are.
        self._folder = folder
        # Optimizer steps made, and the version that holds them.
        self.step = 0
        self.version = BASE_VERSION
        # Own fingerprints by version text, oldest first.
        self._fingerprints: dict[str, str] = {}
        self._tally = Tally()
        self._num_empty = 0
        self._num_mostly_invalid = 0

    async def publish_base(self) -> None:
        """Store version 0.0 unless it is there, and point to it unless something is current."""
        self._fingerprints[str(BASE_VERSION)] = await asyncio.to_thread(self._trainer.fingerprint)
        try:
            await self._ports.weights.get(BASE_VERSION)
        except NotFound:
            await self._publish(BASE_VERSION)
        if await self._ports.weights.current() is None:
            await self._ports.weights.point(BASE_VERSION)

    async def steps(self, stop: asyncio.Event) -> str:
        """Make the run's optimizer steps; the final state."""
        while self.step < self._config.max_steps:
            before = (self._tally.num_ended, self._tally.num_invalid)
            closed = None if stop.is_set() else await self._collector.collect(self._tally, self.step)
            if closed is None:
                return "cancelled"
            self._check_progress(closed, *before)
            if not closed.groups:
                continue
            result = await self._train(closed)
            await self._write_metric(result, sum(len(group) for group in closed.groups))
            await self._status.write("running", self.step, version=self.version)
            self._tally = Tally()
        return "succeeded"

    def _check_progress(self, closed: Closed, ended_before: int, invalid_before: int) -> None:
        """Raise `NoProgress` with a diagnosis after too many collections without signal or full of invalid samples."""
        num_ended = self._tally.num_ended - ended_before
        num_invalid = self._tally.num_invalid - invalid_before
        self._num_mostly_invalid = self._num_mostly_invalid + 1 if 2 * num_invalid > num_ended else 0
        self._num_empty = 0 if closed.groups else self._num_empty + 1
        self._tally.num_empty_rounds += not closed.groups
        if self._num_mostly_invalid == MAX_INVALID_ROUNDS:
            raise NoProgress(
                f"more than half of the samples were invalid in {MAX_INVALID_ROUNDS} steps running; in the last one "
                f"{num_invalid} of {num_ended}, and the last of them {self._collector.last_invalid}. The environment "
                "or the infrastructure fails, not the policy"
            )
        if self._num_empty:
            logger.warning("no group with signal (%d in a row): %s", self._num_empty, self._tally.describe())
        if self._num_empty == MAX_EMPTY_ROUNDS:
            raise NoProgress(
                f"{MAX_EMPTY_ROUNDS} steps in a row without a group whose rewards differ: {self._tally.describe()}. "
                "The tasks are too hard or too easy for this model, or the reward does not tell good from bad"
            )

    async def _train(self, closed: Closed) -> StepResult:
        """One optimizer step, from the closed batch to samples TRAINED."""
        begun = time.monotonic()
        batch = Batch(run_id=self._run_id, step=self.step + 1, groups=closed.groups)
        records = self._ports.records
        await _write_all(records, [Write(key=batch.key, value=encode(batch), expected=0)])
        samples = await self._mark_batched(batch)
        groups = await self._load(batch, [sample for sample, _ in samples])
        draining = asyncio.create_task(self._collector.drain(self._tally, self.step), name="drain")
        try:
            result = await asyncio.to_thread(self._trainer.step, groups)
            stepped = time.monotonic()
            await draining
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        drained = time.monotonic()
        version = Version(incarnation=self._status.incarnation, n=batch.step)
        digest = await asyncio.to_thread(self._trainer.fingerprint)
        self._fingerprints[str(version)] = digest
        await self._publish(version)
        applied = replace(batch, state=BatchState.APPLIED, version=version, digest=digest)
        await _write_all(records, [Write(key=batch.key, value=encode(applied), expected=1)])
        await self._ports.weights.point(version)
        previous, self.version, self.step = self.version, version, batch.step
        await _write_all(records, [_state_write(s, SampleState.TRAINED, stored) for s, stored in samples])
        await self._ports.weights.prune([BASE_VERSION, previous, version])
        self._tally.seconds.train_s += stepped - begun
        self._tally.seconds.generate_s += drained - stepped
        self._tally.seconds.publish_s += time.monotonic() - drained
        return result

    async def _mark_batched(self, batch: Batch) -> list[tuple[SampleRecord, int]]:
        """Write BATCHED; the batch's samples, in order, as they are stored now, with their stored versions."""
        keys = [sample_key(self._run_id, Purpose.TRAIN, sample_id) for sample_id in batch.sample_ids]
        marked: list[tuple[SampleRecord, int]] = []
        writes: list[Write] = []
        for key, stored in zip(keys, await get_all(self._ports.records, keys), strict=True):
            sample = stored_record(stored, key, SampleRecord)
            if stored is None or sample.state is not SampleState.REPORTED:
                raise RecordCorrupt(f"{key}: state: expected {SampleState.REPORTED!r}, found {sample.state!r}")
            batched = replace(sample, step=batch.step)
            writes.append(_state_write(batched, SampleState.BATCHED, stored.version))
            marked.append((batched, stored.version + 1))
        await _write_all(self._ports.records, writes)
        return marked

    async def _load(self, batch: Batch, samples: Sequence[SampleRecord]) -> list[list[TrainingSample]]:
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
        check_fingerprints(replicas, self._fingerprints, versions)
        return [[checked[sample_id] for sample_id in group] for group in batch.groups]

    async def _publish(self, version: Version) -> None:
        """Store the current weights as `version`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".weights-", dir=self._folder) as name:
            folder = Path(name)
            await asyncio.to_thread(self._trainer.save_weights, folder)
            await self._ports.weights.publish(version, folder, self._fingerprints[str(version)])

    async def _write_metric(self, result: StepResult, num_trained: int) -> None:
        values = self._tally.values(threshold=self._config.success_threshold, num_trained=num_trained)
        values |= step_values(result)
        await self._ports.metrics.write(Metric(run_id=self._run_id, step=self.step, time=time.time(), values=values))
        logger.info(
            "step %d: reward %.3f over %d rollouts, %.1f s + %.1f s",
            self.step,
            values.get("reward_mean", 0.0),
            values["num_generated"],
            values["generate_s"],
            values["train_s"],
            extra={"at": self._run_id},
        )

    async def export(self, folder: Path) -> Path:
        """Write the final checkpoint."""
        manifest = Manifest(
            run_id=self._run_id,
            step=self.step,
            version=self.version,
            digest=self._fingerprints[str(self.version)],
            position=self._collector.builder.position,
        )
        await asyncio.to_thread(export, folder, manifest, self._trainer.save_pretrained)
        return folder


def _state_write(sample: SampleRecord, state: SampleState, stored: int) -> Write:
    return Write(key=sample.key, value=encode(replace(sample, state=state)), expected=stored)


async def _write_all(records: RecordStore, writes: Sequence[Write]) -> None:
    """Conditional writes that nobody else may have forestalled; raises `Conflict` naming the first lost one."""
    for write, done in zip(writes, await records.write(writes), strict=True):
        if not done:
            raise Conflict(
                f"{write.key} changed since it was read at version {write.expected}: another process wrote it"
            )
