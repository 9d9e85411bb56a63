"""What is looked for while runs go on. Each kind of trouble has a module: its rule, and the check that applies it."""

from pathlib import Path

from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.stage import StageContext
from turnmill.ports import RecordStore
from turnmill.wiring.watching.checks.crash_loops import CrashLoops
from turnmill.wiring.watching.checks.dead_letters import DeadDeliveries, DeadLetters, DeadMessages, DeadSamples, Source
from turnmill.wiring.watching.checks.evaluations import FailedEvaluations
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.checks.rewards import CollapsedRewards
from turnmill.wiring.watching.checks.slow_stages import SlowStages
from turnmill.wiring.watching.evidence import command
from turnmill.wiring.watching.monitor import Check


def checks_of(root: Path, ctx: StageContext, record: RunRecord) -> list[Check]:
    """The checks of one run, for the process that has it."""
    run_id = ctx.run.run_id
    metrics = RecentMetrics(ctx.ports, run_id)
    sources: list[Source] = [
        DeadMessages(ctx.ports),
        DeadSamples(ctx.ports.records, run_id),
        DeadDeliveries(ctx.ports.runs, run_id),
    ]
    return [
        SlowStages(root, ctx, record, metrics),
        CrashLoops(root, run_id, ctx.launcher),
        CollapsedRewards(root, run_id, metrics),
        FailedEvaluations(root, run_id, metrics),
        DeadLetters(sources, about=f"run {run_id}", command=command(root, "queues", run_id)),
    ]


def checks_of_deployment(root: Path, records: RecordStore) -> list[Check]:
    """What concerns no run."""
    return [DeadLetters([DeadDeliveries(records, None)], about="the deployment", command=command(root, "alerts"))]
