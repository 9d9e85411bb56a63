"""What a model can do before it is trained (the baseline), and what it has learned (the held-out tasks).

    tasks -> `playing` (each asked for, invalid ones again) -> `baseline` | `held_out` -> figures with `intervals`

`background` is how a control process plays them beside everything else.
"""

from turnmill.evaluation.background import BackgroundEvaluations
from turnmill.evaluation.baseline import measure_baseline
from turnmill.evaluation.held_out import Evaluation, evaluate, summarise
from turnmill.evaluation.intervals import wilson
from turnmill.evaluation.playing import Progress, Ration, RolloutSource, play

__all__ = [
    "BackgroundEvaluations",
    "Evaluation",
    "Progress",
    "Ration",
    "RolloutSource",
    "evaluate",
    "measure_baseline",
    "play",
    "summarise",
    "wilson",
]
