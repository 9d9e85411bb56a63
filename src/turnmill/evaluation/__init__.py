"""What a model can do before it is trained (the baseline), and what it has learned (the held-out tasks).

    tasks -> `playing` (each asked for, invalid ones again) -> `baseline` | `held_out` -> figures with intervals
                 `recorded`: what was played before                      `statistics`

`background` is how a control process plays them beside everything else.
"""

from turnmill.evaluation.background import BackgroundEvaluations
from turnmill.evaluation.baseline import measure_baseline
from turnmill.evaluation.comparison import Comparison, changes_of, compare
from turnmill.evaluation.held_out import Evaluation, History, TaskResult, Terms, evaluate, summarise
from turnmill.evaluation.intervals import wilson
from turnmill.evaluation.playing import Played, Progress, Ration, RolloutSource, play
from turnmill.evaluation.recorded import RecordedRollouts
from turnmill.evaluation.statistics import Estimate, mean_of_tasks, pass_at_k, pass_hat_k, share_of_tasks

__all__ = [
    "BackgroundEvaluations",
    "Comparison",
    "Estimate",
    "Evaluation",
    "History",
    "Played",
    "Progress",
    "Ration",
    "RecordedRollouts",
    "RolloutSource",
    "TaskResult",
    "Terms",
    "changes_of",
    "compare",
    "evaluate",
    "mean_of_tasks",
    "measure_baseline",
    "pass_at_k",
    "pass_hat_k",
    "play",
    "share_of_tasks",
    "summarise",
    "wilson",
]
