"""How a control process plays what is measured and never trained: held-out evaluations, and the baseline."""

import asyncio
from pathlib import Path

from turnmill import failpoints
from turnmill.budget import Allowance, Meter
from turnmill.config import Config
from turnmill.errors import BudgetExceeded, Conflict
from turnmill.evaluation import Evaluation, Progress, Ration, evaluate, measure_baseline
from turnmill.pipeline.budget import trainer_says
from turnmill.pipeline.engine import load_run
from turnmill.ports import RunPorts, Write
from turnmill.records import Baseline, Purpose, Run, encode
from turnmill.rollout.scheduler import Scheduler
from turnmill.wiring.reading.runs import read_validated


async def play(
    ports: RunPorts, run: Run, config: Config, meter: Meter, name: str, path: Path, purpose: Purpose, progress: Progress
) -> Evaluation | Baseline:
    """Evaluate on the tasks of a file, or play the baseline on them and record what came of it."""
    tasks = await asyncio.to_thread(read_validated, await load_run(ports.runs, run.run_id), path)
    scheduler = Scheduler(ports.records, ports.rollout_request, ports.rollout_response, run.run_id, purpose, config)
    allowance = Allowance(ports.records, run.run_id, config.budget_tokens)
    ration = Ration(allowance=allowance, batch_size=config.global_batch_size) if config.budget_tokens else None
    await scheduler.start()
    try:
        if purpose is Purpose.BASELINE:
            baseline = await measure_baseline(
                tasks, scheduler, run=run, config=config, progress=progress, ration=ration
            )
            failpoints.hit("baseline-played")
            await _record(ports, baseline)
            failpoints.hit("baseline-recorded")
            return baseline
        return await evaluate(
            tasks,
            scheduler,
            name=name,
            num_rollouts=config.eval_rollouts,
            threshold=config.success_threshold,
            progress=progress,
            ration=ration,
        )
    except BudgetExceeded as error:
        raise await meter.exceeded("budget_tokens", await trainer_says(ports, run.run_id)) from error
    finally:
        await scheduler.close()


async def _record(ports: RunPorts, baseline: Baseline) -> None:
    """In place of one that stopped an earlier attempt; raises `Conflict` if somebody else records one now."""
    (stored,) = await ports.records.get([baseline.key])
    write = Write(key=baseline.key, value=encode(baseline), expected=stored.version if stored else 0)
    (is_applied,) = await ports.records.write([write])
    if not is_applied:
        raise Conflict(f"the baseline of run {baseline.run_id} was recorded by another process")
