"""What training learned of each task, for everybody who only looks: nothing is changed, locked or held up.

records of the batches that count -> statistics by task
"""

from pathlib import Path

from turnmill.records import Run, batch_prefix
from turnmill.training.history import live_of
from turnmill.training.task_statistics import TaskStatistics, TaskTable
from turnmill.wiring.backend import backend_of


def read_task_statistics(root: Path, run: Run) -> list[TaskStatistics]:
    """The tasks of which a group was decided up to the last recorded step, hardest first."""
    stored = backend_of(root).reader(run.run_id).records(batch_prefix(run.run_id), limit=-1)
    table = TaskTable.of(item.batch for item in live_of(run.run_id, stored))
    return sorted(table.statistics.values(), key=_hardness)


def _hardness(task: TaskStatistics) -> tuple[float, float, str]:
    """What was given up each time, with an unknown pass rate, comes before all."""
    rate = -1.0 if task.pass_rate is None else task.pass_rate
    return rate, task.reward_mean or 0.0, task.task_id
