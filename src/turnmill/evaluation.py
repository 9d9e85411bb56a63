"""Held-out evaluation: every task the same number of times, at the run's sampling parameters, with fixed seeds.

tasks x passes -> sample requests -> ended samples -> solve rate over all valid rollouts
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from turnmill.errors import NoProgress
from turnmill.records import SampleRecord, Task


class RolloutSource(Protocol):
    """The slice of the scheduler that an evaluation uses."""

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]: ...

    async def ended(self) -> list[SampleRecord]: ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found. Shares are over valid rollouts; invalid ones were played again."""

    num_tasks: int
    num_valid: int
    num_invalid: int
    # Share of rollouts with reward >= success_threshold.
    solved: float
    # 95 % interval of `solved`.
    solved_low: float
    solved_high: float
    reward_mean: float
    metrics: dict[str, float]


async def evaluate(
    tasks: Sequence[Task], rollouts: RolloutSource, *, name: str, num_rollouts: int, threshold: float
) -> Evaluation:
    """Play each task ceil(num_rollouts / num_tasks) times and average.

    An invalid rollout is played again; raises `NoProgress` once more are invalid than were asked for.
    """
    passes = math.ceil(num_rollouts / len(tasks))
    by_id = {task.id: task for task in tasks}
    wanted = [(task, f"{name}/{task.id}") for _ in range(passes) for task in tasks]
    missing = set(await rollouts.request(wanted))
    valid: list[SampleRecord] = []
    num_invalid = 0
    while missing:
        for sample in await rollouts.ended():
            if sample.sample_id not in missing:
                continue
            missing.discard(sample.sample_id)
            if sample.is_valid:
                valid.append(sample)
                continue
            num_invalid += 1
            if num_invalid > len(wanted):
                raise NoProgress(
                    f"evaluation {name}: {num_invalid} rollouts were invalid, the last one {sample.key}: "
                    f"{sample.reason}: {sample.detail}"
                )
            missing.update(await rollouts.request([(by_id[sample.task_id], f"{name}/{sample.task_id}")]))
    return summarise(valid, num_tasks=len(tasks), num_invalid=num_invalid, threshold=threshold)


def summarise(valid: Sequence[SampleRecord], *, num_tasks: int, num_invalid: int, threshold: float) -> Evaluation:
    """Means over `valid`, at least one."""
    rewards = [sample.reward for sample in valid if sample.reward is not None]
    solved = sum(reward >= threshold for reward in rewards) / len(rewards)
    low, high = wilson(solved, len(rewards))
    names = sorted({name for sample in valid for name in sample.metrics})
    return Evaluation(
        num_tasks=num_tasks,
        num_valid=len(rewards),
        num_invalid=num_invalid,
        solved=solved,
        solved_low=low,
        solved_high=high,
        reward_mean=sum(rewards) / len(rewards),
        metrics={name: sum(s.metrics.get(name, 0.0) for s in valid) / len(valid) for name in names},
    )


def wilson(share: float, num: int, *, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a share of `num` trials (Wilson, 1927): honest for few trials and shares near 0 or 1."""
    centre = share + z**2 / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    scale = 1 + z**2 / num
    return (centre - spread) / scale, (centre + spread) / scale


class BackgroundEvaluations:
    """Evaluations as tasks of this process, one at a time, by name. `play` evaluates one file."""

    def __init__(self, play: Callable[[str, Path], Coroutine[Any, Any, Evaluation]]) -> None:
        self._play = play
        self._tasks: dict[str, asyncio.Task[Evaluation]] = {}

    async def start(self, name: str, path: Path) -> None:
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._play(name, path), name=f"evaluate-{name}")

    def poll(self, name: str) -> dict[str, Any] | None:
        task = self._tasks[name]
        return asdict(task.result()) if task.done() else None

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
