"""Training from the first rollout, or from where an earlier process ended, to the final checkpoint.

    resume -> [collect a batch -> record and apply it (stepper) -> next one]* -> final
                                       -> tell: samples, metric, checkpoint every `save_steps`, status

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| steps | closed batches | a batch (`Collector.next`), the step (a thread) | the pump, the gradients | weight versions |
| pump  | ended samples | rollouts, slots | see `collector` | closed batches |
| tell  | the step just made | its writes | - | metrics, checkpoints, status |

One loop for both strategies. On policy the pump rests from the end of a batch until its version is pointed to, and what
it still lets end is waited for after the update; off policy it plays for the steps to come meanwhile. A step is told
while the next batch is played, and at the latest before that one is recorded: so the writes of one step come after all
writes of the step before.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from turnmill import failpoints
from turnmill.budget import Allowance
from turnmill.config import Config
from turnmill.errors import NoProgress
from turnmill.ports import RunPorts
from turnmill.records import Batch, DropReason, Metric, Progress, Run, Task, Version
from turnmill.training import snapshot
from turnmill.training.ahead import Ahead
from turnmill.training.batcher import BatchBuilder
from turnmill.training.checkpoint import Checkpoints, Manifest, export, writing
from turnmill.training.collected import Collected, RolloutSource
from turnmill.training.collector import Audit, Collector
from turnmill.training.history import live_batches
from turnmill.training.keeper import Keeper
from turnmill.training.resume import resume
from turnmill.training.served import Served
from turnmill.training.status import Status
from turnmill.training.stepper import Stepper, Taken
from turnmill.training.tally import ages, step_values
from turnmill.training.task_statistics import TaskTable, write_statistics
from turnmill.training.trainer import StepResult, Trainer, threads_alone
from turnmill.training.validation import Evaluator, Validation

logger = logging.getLogger(__name__)
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
    evaluator: Evaluator | None = None,
) -> None:
    """Train up to step `config.max_steps`, or until `stop`, and leave the final checkpoint in `folder`/final.

    A run that has batches is gone on with (see `resume`). The outcome is in the run's `TrainingStatus` too: succeeded,
    cancelled, exhausted, or failed with the text of the error that is raised. When stopped, or when the run has used up
    its tokens, what is being collected is given up and the last weights are exported.
    """
    status = await Status.open(ports.records, run.run_id, config.max_steps)
    validation = Validation(config, evaluator, stop, run.run_id)
    training = _Training(ports, run.run_id, config, trainer, status, folder, validation)
    collector: Collector | None = None
    try:
        progress = await training.resume(stop)
        if progress is None:
            # On the way to the last recorded step the weights are those of an earlier one: nothing to export.
            await status.write("cancelled", status.step)
            return
        builder = BatchBuilder(
            config,
            tasks,
            prefix=f"{status.incarnation}.",
            progress=progress,
            step=training.step + 1,
            table=training.tasks,
        )
        allowance = Allowance(ports.records, run.run_id, config.budget_tokens)
        served = Served(ports.records, run.run_id)
        collector = Collector(
            ports.records, rollouts, builder, training.ahead, training.audit, config, stop, allowance, served
        )
        state = await training.steps(collector, stop)
        await collector.close(DropReason.SURPLUS)
        position = builder.position
        checkpoint = await training.export(position) if state == "succeeded" or training.step else None
        await status.write(state, training.step, checkpoint=checkpoint, version=training.version)
    except Exception as error:
        # The supervision boundary of the trainer: leave no sample open and say why it ended.
        logger.error("training stopped at step %d: %s", training.step, error, extra={"at": run.run_id})
        try:
            if collector is not None:
                await collector.close(DropReason.CANCELLED)
        finally:
            await status.write("failed", max(training.step, status.step), error=f"{type(error).__name__}: {error}")
            await training.until_kept()
        raise
    finally:
        if collector is not None:
            collector.abort()


class _Training:
    """The steps of one trainer process."""

    def __init__(
        self,
        ports: RunPorts,
        run_id: str,
        config: Config,
        trainer: Trainer,
        status: Status,
        folder: Path,
        validation: Validation,
    ) -> None:
        self._ports = ports
        self._validation = validation
        self._run_id = run_id
        self._config = config
        self._status = status
        self._folder = folder
        self._trainer = trainer
        self.ahead = Ahead(trainer, config)
        self._stepper = Stepper(ports, run_id, trainer, status, folder, threads=threads_alone(config))
        self._checkpoints = Checkpoints(folder, run_id, keep=config.save_top_k)
        self._keeper = Keeper(ports.checkpoints, self._checkpoints) if ports.checkpoints is not None else None
        # Step and incarnation of the batches that have a metric.
        self._told: set[tuple[int, int]] = set()
        # What the recorded batches say of the tasks: all of them, and those up to the step that was told last.
        self.tasks = TaskTable()
        self._told_tasks = TaskTable()
        # By step, those that are not told.
        self._untold: dict[int, Batch] = {}
        self._last: Batch | None = None
        self._num_empty = 0
        self._num_mostly_invalid = 0
        # Tells the step made last.
        self._telling: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self._stepper.step

    @property
    def version(self) -> Version:
        """The weights after them."""
        return self._stepper.version

    @property
    def audit(self) -> Audit | None:
        """Of the older tokens in a batch whose turn may not have come; None on policy, where there are none."""
        return self._stepper.audit_stale if self._config.is_async else None

    async def resume(self, stop: asyncio.Event) -> Progress | None:
        """Go to the last recorded step; where in the data to go on, None when asked to stop before."""
        metrics = await self._ports.metrics.read(self._run_id)
        self._told = {(metric.step, metric.incarnation) for metric in metrics}
        recorded = [item.batch for item in await live_batches(self._ports.records, self._run_id)]
        self.tasks = TaskTable.of(recorded)
        self._untold = {batch.step: batch for batch in recorded}
        return await resume(
            self._ports.records,
            self._run_id,
            status=self._status,
            stepper=self._stepper,
            checkpoints=self._checkpoints,
            keeper=self._keeper,
            finish=self._finish,
            stop=stop,
        )

    async def steps(self, collector: Collector, stop: asyncio.Event) -> str:
        """Make the run's optimizer steps; the final state."""
        self._set_version(self.version)
        try:
            state = await self._steps(collector, stop)
        except BaseException:
            # The error that ended the steps is the one to tell.
            if self._telling is not None:
                await asyncio.gather(self._telling, return_exceptions=True)
            raise
        await self._until_told()
        return state

    async def _steps(self, collector: Collector, stop: asyncio.Event) -> str:
        await self._validate_base()
        collector.start()
        while self.step < self._config.max_steps:
            collected = await collector.next(self._telling)
            if collected is None:
                return "cancelled" if stop.is_set() else "exhausted"
            self._check_progress(collected, collector)
            if collected.groups:
                await self._train(collector, collected)
            if self._validation.is_due(self.step) and not self._config.is_async:
                # Nothing else is played meanwhile: a step's times are those of its own rollouts.
                await self._until_told()
            collector.go_on(self.step)
        return "succeeded"

    async def _train(self, collector: Collector, collected: Collected) -> None:
        """One optimizer step on a closed batch."""
        groups, tally = collected.groups, collected.tally
        aged = ages(chain.from_iterable(groups), collected.closed.step, self._config.max_staleness)

        def values() -> dict[str, float]:
            counted = tally.values(threshold=self._config.success_threshold, num_trained=sum(map(len, groups)))
            return counted | aged | {"early_share": collected.num_early / len(groups)}

        await self._until_told()
        taken = await self._stepper.record(
            collected.closed.groups, groups, collected.parts, collected.progress, values()
        )
        begun = time.monotonic()
        result = await self._stepper.make(taken, groups, gradients=self.ahead.wait, stale=collected.stale)
        stepped = time.monotonic()
        self._set_version(self._stepper.next_version)
        await collector.update_made()
        played = time.monotonic()
        tally.seconds.generate_s += played - stepped
        await self._stepper.commit(taken, values())
        tally.seconds.train_s += stepped - begun
        tally.seconds.publish_s += time.monotonic() - played
        if self._config.is_async:
            tally.seconds.overlap_s += tally.seconds.train_s + tally.seconds.publish_s
        batch = replace(taken.batch, values=values())
        self._telling = asyncio.create_task(self._tell(taken, batch, result), name="tell the step")

    def _set_version(self, version: Version) -> None:
        """What the trainer's weights are, for the gradients made from now on."""
        self.ahead.version = str(version) if self._config.is_async else None

    async def _tell(self, taken: Taken, batch: Batch, result: StepResult) -> None:
        await self._stepper.settle(taken)
        await self._finish(batch, result)

    async def _until_told(self) -> None:
        """Wait until the step made last is told; raises what that ended with."""
        telling, self._telling = self._telling, None
        if telling is not None:
            await telling

    def _check_progress(self, collected: Collected, collector: Collector) -> None:
        """Raise `NoProgress` with a diagnosis after too many collections without signal or full of invalid samples."""
        num_ended, num_invalid, tally = collected.num_ended, collected.num_failed, collected.tally
        # Off policy several batches may close at once, of what ended before: then the others say nothing of that.
        if num_ended:
            self._num_mostly_invalid = self._num_mostly_invalid + 1 if 2 * num_invalid > num_ended else 0
        self._num_empty = 0 if collected.groups else self._num_empty + 1
        tally.num_empty_rounds += not collected.groups
        if self._num_mostly_invalid == MAX_INVALID_ROUNDS:
            raise NoProgress(
                f"more than half of the samples were invalid in {MAX_INVALID_ROUNDS} steps running; in the last one "
                f"{num_invalid} of {num_ended}, and the last of them {collector.last_invalid}. The environment "
                "or the infrastructure fails, not the policy"
            )
        if self._num_empty:
            logger.warning("no group with signal (%d in a row): %s", self._num_empty, tally.describe())
        if self._num_empty == MAX_EMPTY_ROUNDS:
            raise NoProgress(
                f"{MAX_EMPTY_ROUNDS} steps in a row without a group whose rewards differ: {tally.describe()}. "
                f"{collector.builder.useless.diagnosis(collector.last_invalid)}"
            )

    async def _finish(self, batch: Batch, result: StepResult) -> None:
        """What follows from an applied batch, as far as it was not done before: metric, checkpoint, status."""
        self._last = batch
        self._untold[batch.step] = batch
        # A checkpoint that was loaded holds steps that are not told again.
        while self._told_tasks.num_steps < batch.step:
            self._told_tasks.add(self._untold.pop(self._told_tasks.num_steps + 1))
        if (batch.step, batch.incarnation) not in self._told:
            await self._write_metric(batch, result)
        if batch.step % self._config.save_steps == 0:
            await self._save(batch)
        # While recorded steps are made again, the run is where its last one is.
        await self._status.write("running", max(batch.step, self._status.step), version=self.version)
        failpoints.hit("status-written")

    async def _validate_base(self) -> None:
        """Before the first step: what the base model does on the held-out tasks, as the metric of step 0."""
        is_told = any(step == 0 for step, _ in self._told)
        if self.step or is_told or not self._validation.is_due(0):
            return
        if values := await self._validation.values(0, self.version):
            await self._ports.metrics.write(
                Metric(
                    run_id=self._run_id, step=0, incarnation=self._status.incarnation, time=time.time(), values=values
                )
            )

    async def _write_metric(self, batch: Batch, result: StepResult) -> None:
        values = batch.values | step_values(result)
        # Older weights, whose steps are made again, are served no more.
        if batch.step >= self._status.step:
            values |= await self._validation.values(batch.step, self.version)
        metric = Metric(
            run_id=self._run_id, step=batch.step, incarnation=batch.incarnation, time=time.time(), values=values
        )
        await self._ports.metrics.write(metric)
        failpoints.hit("metric-written")
        logger.info(
            "step %d: reward %.3f over %d rollouts, %.1f s + %.1f s",
            batch.step,
            values.get("reward_mean", 0.0),
            values.get("num_generated", 0.0),
            values.get("generate_s", 0.0),
            values.get("train_s", 0.0),
            extra={"at": self._run_id},
        )

    async def _save(self, batch: Batch) -> None:
        """Store the checkpoint of the step just made, unless it is there."""
        if any(item.step == batch.step for item in await asyncio.to_thread(self._checkpoints.stable)):
            return
        manifest = self._manifest(batch.progress.position)
        manifest = replace(
            manifest,
            state_digest=await asyncio.to_thread(snapshot.state_digest, self._trainer),
            reward_mean=batch.values.get("reward_mean"),
        )
        await asyncio.to_thread(self._checkpoints.save, manifest, self._write_checkpoint)
        failpoints.hit("checkpoint-saved")
        if self._keeper is not None:
            self._keeper.look()

    def _write_checkpoint(self, folder: Path) -> None:
        snapshot.save(self._trainer, folder)
        with writing(folder):
            write_statistics(self._told_tasks.statistics, folder)

    def _manifest(self, position: int) -> Manifest:
        return Manifest(
            run_id=self._run_id,
            step=self.step,
            version=self.version,
            digest=self._stepper.digest,
            position=position,
        )

    async def export(self, position: int) -> Path:
        """Write the final checkpoint, and what training may go on with."""
        if self._last is not None:
            await self._save(self._last)
        folder = self._folder / FINAL
        await asyncio.to_thread(export, folder, self._manifest(position), self._trainer.save_pretrained)
        await self.until_kept()
        return folder

    async def until_kept(self) -> None:
        """Wait until the checkpoints are where they outlive this machine."""
        if self._keeper is not None:
            await self._keeper.finish()
