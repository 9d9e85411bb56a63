"""A stage that takes longer than is expected: a fixed time for most, for training and evaluation by their pace."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.stage import StageContext
from turnmill.pipeline.stages import STAGES
from turnmill.records import AlertKind, Metric, StageRecord
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.evidence import command, last_lines
from turnmill.wiring.watching.monitor import Finding

# Of steps whose median is the pace now.
NUM_RECENT = 5
# The pace now against the one before.
SLOWER = 3.0
# Steps that are slower by less are not worth a word.
LEAST_S = 5.0
# The step that is being made, against the median of those before.
STUCK = 10.0
# An evaluation against what the pace of the training's rollouts lets expect; and for starting it.
EVALUATION_SLOWER, EVALUATION_START_S = 3.0, 60.0
# Of the limits, while the alert is open: what is just above one must not come and go.
STILL = 2 / 3
# Whose logs tell why.
_ROLES = {
    "Preflight": ("preflight", "control"),
    "StartGeneration": ("replica", "control"),
    "StartRewardWorkers": ("worker", "control"),
    "Evaluate": ("worker", "replica", "control"),
}


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """What of a training's time are evaluations: no step is made meanwhile, and none is slower for it."""

    # In each step that was made; empty: none was.
    played_s: Sequence[float] = ()
    # As long as one may take that is due before the next step is told.
    due_s: float = 0.0
    # Of all that are still to come.
    left_s: float = 0.0


def slow_training(
    times: Sequence[float],
    *,
    started_at: float,
    now: float,
    first_s: float,
    num_left: int,
    limit_s: float,
    evaluations: Evaluations = Evaluations(),
    is_open: bool = False,
) -> str | None:
    """What is slow, None where nothing is. `times`: when each step of the stage ended (Unix seconds), in order.

    `first_s`: within it the first step is expected. `num_left`: steps still to be made. `limit_s`: of the stage.
    """
    share = STILL if is_open else 1.0
    waited_s = now - (times[-1] if times else started_at)
    if not times:
        expected_s = first_s + evaluations.due_s
        return (
            f"no step within {waited_s:.0f} s; {expected_s:.0f} s are expected"
            if waited_s > expected_s * share
            else None
        )
    # The time to the first one is that of starting.
    played_s = evaluations.played_s or [0.0] * len(times)
    durations = [after - before - own_s for (before, after), own_s in zip(pairwise(times), played_s[1:], strict=True)]
    if waited_s > share * max(first_s, STUCK * median(durations or [0.0])) + evaluations.due_s:
        return f"the step that is being made takes {waited_s:.0f} s so far; {first_s:.0f} s would be much"
    if len(durations) < NUM_RECENT:
        return None
    pace_s = median(durations[-NUM_RECENT:])
    if earlier := durations[:-NUM_RECENT]:
        usual_s = median(earlier)
        is_slower = pace_s > share * SLOWER * usual_s and pace_s - usual_s > share * LEAST_S
        if len(earlier) >= NUM_RECENT and is_slower:
            return f"the last {NUM_RECENT} steps took {pace_s:.1f} s each, those before {usual_s:.1f} s"
    needed_s = now - started_at + num_left * pace_s + evaluations.left_s
    if needed_s * (2 - share) > limit_s and num_left:
        return (
            f"{num_left} steps are left at {pace_s:.1f} s each: with them the stage takes {needed_s:.0f} s, and "
            f"max_runtime_s ends it after {limit_s:.0f} s"
        )
    return None


def expected_evaluation_s(num_rollouts: int, metrics: Sequence[Metric]) -> float | None:
    """By the pace of the training's rollouts; None where there is none to go by."""
    num_played = sum(metric.values.get("num_generated", 0.0) for metric in metrics)
    played_s = sum(metric.values.get("generate_s", 0.0) for metric in metrics)
    if num_played <= 0 or played_s <= 0:
        return None
    return EVALUATION_START_S + EVALUATION_SLOWER * num_rollouts * played_s / num_played


class SlowStages:
    """Implements `Check` for the stage that goes on."""

    def __init__(self, root: Path, ctx: StageContext, record: RunRecord, metrics: RecentMetrics) -> None:
        self._root = root
        self._ctx = ctx
        self._record = record
        self._metrics = metrics
        self._rows = {stage.name: stage for stage in STAGES}
        self._found: str | None = None

    async def look(self) -> list[Finding]:
        """See `Check.look`."""
        stage = next(iter(self._record.run.current_stages[-1:]), None)
        if stage is None or stage.state != "running" or stage.name not in self._rows:
            self._found = None
            return []
        why = await self._slowness(stage, time.time())
        self._found = stage.name if why else None
        return [await self._finding(stage.name, why)] if why else []

    async def _slowness(self, stage: StageRecord, now: float) -> str | None:
        row, taken_s = self._rows[stage.name], now - stage.started_at
        limit_s = row.timeout_s(self._ctx.config)
        if stage.name == "SubmitTraining":
            metrics = await self._metrics.read()
            since = [metric for metric in metrics if metric.time >= stage.started_at]
            return slow_training(
                [metric.time for metric in since],
                started_at=stage.started_at,
                now=now,
                first_s=row.expected_s,
                num_left=max(0, self._ctx.config.max_steps - (metrics[-1].step if metrics else 0)),
                limit_s=self._training_limit_s(taken_s),
                evaluations=await self._evaluations(since, limit_s),
                is_open=self._found == stage.name,
            )
        expected_s = row.expected_s
        if stage.name == "DeployRunInfra":
            # By what it is made on: files are there at once, a cloud's services take minutes.
            expected_s = max(expected_s, self._ctx.ports.infra.expected_s)
        if stage.name == "Evaluate":
            # Before and after.
            num_rollouts = 2 * self._num_rollouts(self._ctx.config.eval_rollouts)
            by_pace = expected_evaluation_s(num_rollouts, await self._metrics.read())
            # Nothing to go by: then it is slow when it is likely not to end in time.
            expected_s = max(expected_s, limit_s / 2 if by_pace is None else by_pace)
        return f"it takes {taken_s:.0f} s so far; {expected_s:.0f} s are expected" if taken_s > expected_s else None

    def _training_limit_s(self, taken_s: float) -> float:
        """After how much of the stage the run's own limit ends it, by what earlier stages and attempts took."""
        meter = self._ctx.meter
        before_s = max(0.0, meter.run_s - taken_s) if meter is not None else 0.0
        return self._ctx.config.max_runtime_s - before_s

    async def _evaluations(self, since: Sequence[Metric], limit_s: float) -> Evaluations:
        """Of the training whose stage has made the steps of `since`."""
        config, metrics = self._ctx.config, await self._metrics.read_all()
        if not config.val_every or self._ctx.run.eval_path is None:
            return Evaluations()
        measured = [metric.values["val_s"] for metric in metrics if "val_s" in metric.values]
        usual_s = sum(measured) / len(measured) if measured else None
        # The next one is due with the next step; before all of them there is one, too.
        step = metrics[-1].step if metrics else -1
        is_due = (step + 1) % config.val_every == 0
        if usual_s is not None:
            likely_s: float | None = EVALUATION_START_S + EVALUATION_SLOWER * usual_s
        else:
            likely_s = expected_evaluation_s(self._num_rollouts(config.val_rollouts), metrics)
        num_left = config.max_steps // config.val_every - max(0, step) // config.val_every
        return Evaluations(
            played_s=[metric.values.get("val_s", 0.0) for metric in since],
            # Nothing to go by: then it is slow when the stage is likely not to end in time.
            due_s=(limit_s / 2 if likely_s is None else likely_s) if is_due else 0.0,
            left_s=num_left * (usual_s or 0.0),
        )

    def _num_rollouts(self, wanted: int) -> int:
        """Of one evaluation of at least so many."""
        reports = [stage.result for stage in self._record.run.current_stages if stage.name == "ValidateData"]
        num_rows = reports[-1].get("eval_data", {}).get("rows", 0) if reports else 0
        # In whole passes.
        return int(num_rows) * math.ceil(wanted / num_rows) if num_rows else 0

    async def _finding(self, stage: str, why: str) -> Finding:
        run_id = self._ctx.run.run_id
        lines = await asyncio.to_thread(last_lines, self._root, run_id, _ROLES.get(stage, ()))
        return Finding(
            kind=AlertKind.STAGE_SLOW,
            summary=f"stage {stage} of run {run_id} is slow: {why}",
            command=command(self._root, "logs", run_id, "--stage", stage),
            stage=stage,
            error=why,
            log_lines=tuple(lines),
        )
