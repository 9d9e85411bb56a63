"""How rollouts are played that are measured and never trained: held-out evaluations, and the baseline.

control: Evaluate, the baseline -> `play`       trainer: every `val_every` steps -> `Validator`
                                     `evaluate_version`: scheduler, what the records have, budget
"""

import asyncio
import logging
import time
from pathlib import Path

from turnmill import failpoints
from turnmill.budget import Allowance, Meter
from turnmill.config import Config
from turnmill.errors import BudgetExceeded, Conflict
from turnmill.evaluation import (
    Evaluation,
    Progress,
    Ration,
    RecordedRollouts,
    Terms,
    evaluate,
    measure_baseline,
)
from turnmill.pipeline.budget import trainer_says
from turnmill.pipeline.engine import load_run
from turnmill.ports import RunPorts, Write
from turnmill.records import Baseline, DropReason, Purpose, Run, Task, Version, encode
from turnmill.rollout.news import News
from turnmill.rollout.scheduler import Scheduler
from turnmill.wiring.reading.evaluations import StoredEvaluation, evaluation_key
from turnmill.wiring.reading.runs import read_validated

logger = logging.getLogger(__name__)


async def play(
    ports: RunPorts,
    run: Run,
    config: Config,
    meter: Meter,
    name: str,
    path: Path,
    purpose: Purpose,
    version: Version,
    progress: Progress,
) -> Evaluation | Baseline:
    """Evaluate a version on the tasks of a file, or play the baseline on them and record what came of it."""
    tasks = await asyncio.to_thread(read_validated, await load_run(ports.runs, run.run_id), path)
    try:
        if purpose is Purpose.BASELINE:
            return await _play_baseline(ports, run, config, tasks, progress)
        found = await evaluate_version(
            ports,
            run.run_id,
            config,
            tasks,
            terms_of(config, name, version, config.eval_rollouts),
            ports.rollout_response,
            progress=progress,
        )
        await ports.blobs.put(evaluation_key(name), encode(StoredEvaluation.of(found, name=name, at=time.time())))
        return found
    except BudgetExceeded as error:
        raise await meter.exceeded("budget_tokens", await trainer_says(ports, run.run_id)) from error


def terms_of(config: Config, name: str, version: Version, num_rollouts: int) -> Terms:
    """What a run evaluates, and how."""
    return Terms(
        name=name,
        version=str(version),
        num_rollouts=num_rollouts,
        threshold=config.success_threshold,
        temperature=config.val_temperature,
    )


async def evaluate_version(
    ports: RunPorts,
    run_id: str,
    config: Config,
    tasks: list[Task],
    terms: Terms,
    news: News,
    *,
    progress: Progress | None = None,
) -> Evaluation:
    """Play what the records lack of it; what a process asked for that is gone is given up first.

    The version must be the one pointed to. Raises `BudgetExceeded` and `NoProgress`.
    """
    recorded = RecordedRollouts(ports.records, run_id)
    scheduler = Scheduler(ports.records, ports.rollout_request, news, run_id, Purpose.EVAL, config)
    await scheduler.start()
    try:
        await scheduler.drop(await recorded.open_ones(), DropReason.SUPERSEDED)
        return await evaluate(
            tasks, scheduler, terms, history=recorded, progress=progress, ration=_ration(ports, run_id, config)
        )
    finally:
        await scheduler.close()


def _ration(ports: RunPorts, run_id: str, config: Config) -> Ration | None:
    if not config.budget_tokens:
        return None
    allowance = Allowance(ports.records, run_id, config.budget_tokens)
    return Ration(allowance=allowance, batch_size=config.global_batch_size)


async def _play_baseline(ports: RunPorts, run: Run, config: Config, tasks: list[Task], progress: Progress) -> Baseline:
    scheduler = Scheduler(
        ports.records, ports.rollout_request, ports.rollout_response, run.run_id, Purpose.BASELINE, config
    )
    await scheduler.start()
    try:
        baseline = await measure_baseline(
            tasks, scheduler, run=run, config=config, progress=progress, ration=_ration(ports, run.run_id, config)
        )
        failpoints.hit("baseline-played")
        await _record(ports, baseline)
        failpoints.hit("baseline-recorded")
        return baseline
    finally:
        await scheduler.close()


async def _record(ports: RunPorts, baseline: Baseline) -> None:
    """In place of one that stopped an earlier attempt; raises `Conflict` if somebody else records one now."""
    (stored,) = await ports.records.get([baseline.key])
    write = Write(key=baseline.key, value=encode(baseline), expected=stored.version if stored else 0)
    (is_applied,) = await ports.records.write([write])
    if not is_applied:
        raise Conflict(f"the baseline of run {baseline.run_id} was recorded by another process")


class Validator:
    """Evaluations while a run trains: implements `training.validation.Evaluator`."""

    def __init__(self, ports: RunPorts, run_id: str, config: Config, tasks: list[Task], news: News) -> None:
        self._ports = ports
        self._run_id = run_id
        self._config = config
        self._tasks = tasks
        self._news = news

    async def evaluate(self, step: int, version: Version) -> dict[str, float]:
        """See `Evaluator.evaluate`."""
        name = f"step {step}"
        terms = terms_of(self._config, name, version, self._config.val_rollouts)
        found = await evaluate_version(self._ports, self._run_id, self._config, self._tasks, terms, self._news)
        failpoints.hit("validation-played")
        stored = StoredEvaluation.of(found, name=name, at=time.time(), step=step)
        await self._ports.blobs.put(evaluation_key(name), encode(stored))
        failpoints.hit("validation-stored")
        return figures_of(found)


def figures_of(found: Evaluation) -> dict[str, float]:
    """Numbers of the metric of a step, without those of single tasks."""
    values: dict[str, float | None] = {
        "solved": found.solved,
        "solved_low": found.solved_low,
        "solved_high": found.solved_high,
        "reward_mean": found.reward_mean,
        "reward_low": found.reward_low,
        "reward_high": found.reward_high,
        "num_rollouts": found.num_valid,
        "num_invalid": found.num_invalid,
        "num_stale": found.num_stale,
        **{f"pass_at_{k}": estimate.value for k, estimate in found.pass_at.items() if k != "1"},
        **{f"pass_hat_{k}": estimate.value for k, estimate in found.pass_hat.items() if k != "1"},
        **{f"{name}_mean": value for name, value in found.metrics.items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}
