"""The baseline: does the base model pass some of the tasks and fail others? Without that there is nothing to learn.

tasks in a seeded order, a few rollouts each -> none or all pass? -> more of them -> verdict
"""

import random
from collections.abc import Sequence

from turnmill.config import Config
from turnmill.evaluation.intervals import wilson
from turnmill.evaluation.playing import Progress, Ration, RolloutSource, play
from turnmill.records import Baseline, BaselineVerdict, Run, SampleRecord, Task, TaskBaseline

# Rollouts of one task before the next one has its turn: enough to tell tasks apart, few enough to see many of them.
ROLLOUTS_PER_TASK = 4
NAME = "baseline"


async def measure_baseline(
    tasks: Sequence[Task],
    rollouts: RolloutSource,
    *,
    run: Run,
    config: Config,
    progress: Progress,
    ration: Ration | None = None,
) -> Baseline:
    """`baseline_rollouts` of the base model; if none or all of them pass, `baseline_max_rollouts` in all.

    An invalid rollout is played again; raises `NoProgress` once more are invalid than were asked for.
    """
    planned = plan(tasks, config.baseline_max_rollouts, seed=config.seed)
    played = await play(planned[: config.baseline_rollouts], rollouts, name=NAME, progress=progress, ration=ration)
    valid, num_invalid = played.valid, played.num_invalid
    if _verdict(_num_passed(valid, config.success_threshold), len(valid)) is not BaselineVerdict.SIGNAL:
        more = await play(planned[config.baseline_rollouts :], rollouts, name=NAME, progress=progress, ration=ration)
        valid, num_invalid = [*valid, *more.valid], num_invalid + more.num_invalid
    return summarise_baseline(valid, num_invalid=num_invalid, run=run, config=config)


def plan(tasks: Sequence[Task], num: int, *, seed: int) -> list[Task]:
    """The task of each of `num` rollouts: a random sample of the file, and the first ones of it are one, too."""
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return [order[i // ROLLOUTS_PER_TASK % len(order)] for i in range(num)]


def summarise_baseline(valid: Sequence[SampleRecord], *, num_invalid: int, run: Run, config: Config) -> Baseline:
    """The record of these rollouts, at least one."""
    rewards = _rewards(valid)
    num_passed = _num_passed(valid, config.success_threshold)
    low, high = wilson(num_passed / len(rewards), len(rewards))
    by_task: dict[str, list[SampleRecord]] = {}
    for sample in valid:
        by_task.setdefault(sample.task_id, []).append(sample)
    return Baseline(
        run_id=run.run_id,
        attempt=run.attempt,
        verdict=_verdict(num_passed, len(rewards)),
        is_ignored=config.ignore_baseline,
        threshold=config.success_threshold,
        num_rollouts=len(rewards),
        num_passed=num_passed,
        num_invalid=num_invalid,
        low=low,
        high=high,
        reward_min=min(rewards),
        reward_mean=sum(rewards) / len(rewards),
        reward_max=max(rewards),
        num_rewards=len(set(rewards)),
        tasks=tuple(_of_task(name, by_task[name], config.success_threshold) for name in sorted(by_task)),
    )


def _of_task(task_id: str, samples: Sequence[SampleRecord], threshold: float) -> TaskBaseline:
    rewards, num_passed = _rewards(samples), _num_passed(samples, threshold)
    low, high = wilson(num_passed / len(rewards), len(rewards))
    return TaskBaseline(
        task_id=task_id,
        num_rollouts=len(rewards),
        num_passed=num_passed,
        low=low,
        high=high,
        reward_mean=sum(rewards) / len(rewards),
    )


def _rewards(samples: Sequence[SampleRecord]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]


def _num_passed(samples: Sequence[SampleRecord], threshold: float) -> int:
    return sum(reward >= threshold for reward in _rewards(samples))


def _verdict(num_passed: int, num: int) -> BaselineVerdict:
    if num_passed == 0:
        return BaselineVerdict.TOO_HARD
    return BaselineVerdict.TOO_EASY if num_passed == num else BaselineVerdict.SIGNAL
