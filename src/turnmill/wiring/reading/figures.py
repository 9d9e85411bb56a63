"""The figures of a run that one quotes, made of its record and its metrics. Pure functions."""

import time
from collections.abc import Sequence
from typing import Any

from turnmill.records import Metric, Run, RunKind, StageRecord


def rewards(metrics: Sequence[Metric]) -> list[float]:
    """The mean reward of each step in which something valid was generated."""
    return [m.values["reward_mean"] for m in metrics if "reward_mean" in m.values]


def max_steps_of(run: Run) -> int:
    """How many optimizer steps a run makes; 0 for an evaluation."""
    return int(run.config.get("max_steps", 0)) if run.kind is RunKind.TRAIN else 0


def stage_s(run: Run, stage: StageRecord) -> float | None:
    """How long a stage took, or has taken up to now; None where nobody saw its end."""
    if stage.ended_at is None:
        return None if run.status.is_final else time.time() - stage.started_at
    return stage.ended_at - stage.started_at


def summary(run: Run, metrics: Sequence[Metric]) -> dict[str, Any]:
    """The figures of a training run that one quotes; None where the run did not get there."""
    values = rewards(metrics)
    stages = {stage.name: stage for stage in run.current_stages}
    training = stages.get("SubmitTraining")
    train_s = stage_s(run, training) if training else None
    evaluations = stages["Evaluate"].result if "Evaluate" in stages else {}
    published = stages["Publish"].result if "Publish" in stages else {}
    return {
        "run_id": run.run_id,
        "kind": run.kind.value,
        "status": run.status.value,
        # Key of the upload that it was made of.
        "upload": run.upload,
        "duplicate_of": run.duplicate_of,
        "created_at": run.created_at,
        "seed": run.config.get("seed"),
        "steps": metrics[-1].step if metrics else 0,
        "reward_first": values[0] if values else None,
        "reward_last10": sum(values[-10:]) / len(values[-10:]) if values else None,
        "eval_before": evaluations.get("before", {}).get("solved"),
        "eval_after": evaluations.get("after", {}).get("solved"),
        "eval": evaluations.get("eval", {}).get("solved"),
        # All figures of each evaluation: `before` and `after` training, or `eval` alone.
        "evaluations": evaluations,
        "train_s": None if train_s is None else round(train_s, 1),
        "num_generated": int(sum(m.values.get("num_generated", 0.0) for m in metrics)),
        "checkpoint": training.result.get("checkpoint") if training else None,
        # Of the base model, before the first step.
        "baseline": training.result.get("baseline") if training else None,
        # Folder of the published model; None where there is none (yet), and why.
        "published": published.get("location"),
        "promotion": published.get("promotion"),
        "error": run.error,
    }
