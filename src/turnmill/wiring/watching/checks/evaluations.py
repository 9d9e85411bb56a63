"""Evaluations while a run trains that could not be played: training goes on, and somebody should know."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from turnmill.records import AlertKind, Metric
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.evidence import command, last_lines
from turnmill.wiring.watching.monitor import Finding


def failed_step(metrics: Sequence[Metric]) -> int | None:
    """The step of the last evaluation, if it failed; None where it did not, and where there was none."""
    for metric in reversed(metrics):
        if "val_failed" in metric.values:
            return metric.step
        if "val_solved" in metric.values:
            return None
    return None


class FailedEvaluations:
    """Implements `Check` for the evaluations every `val_every` steps."""

    def __init__(self, root: Path, run_id: str, metrics: RecentMetrics) -> None:
        self._root = root
        self._run_id = run_id
        self._metrics = metrics

    async def look(self) -> list[Finding]:
        """See `Check.look`."""
        step = failed_step(await self._metrics.read_all())
        if step is None:
            return []
        lines = await asyncio.to_thread(last_lines, self._root, self._run_id, ["trainer", "worker"])
        return [
            Finding(
                kind=AlertKind.EVALUATION_FAILED,
                summary=f"the evaluation after step {step} of run {self._run_id} failed; training goes on",
                command=command(self._root, "logs", self._run_id, "--role", "trainer"),
                stage="SubmitTraining",
                log_lines=tuple(lines),
            )
        ]
