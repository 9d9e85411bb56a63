"""Rollouts that are measured and never trained: asked for, waited for, and played again where they were invalid."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnmill.budget import Allowance
from turnmill.errors import BudgetExceeded, NoProgress
from turnmill.records import SampleRecord, Task


class RolloutSource(Protocol):
    """The slice of the scheduler that an evaluation uses."""

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]: ...

    async def ended(self) -> list[SampleRecord]: ...


@dataclass(kw_only=True)
class Progress:
    """How far an evaluation is; it is changed while it goes on."""

    num_wanted: int = 0
    # Valid ones.
    num_done: int = 0

    def __str__(self) -> str:
        return f"{self.num_done} of {self.num_wanted}"


@dataclass(frozen=True, kw_only=True)
class Ration:
    """Rollouts are asked for while the allowance lasts, so few at a time that what is under way then is one batch."""

    allowance: Allowance
    batch_size: int

    async def num_now(self, num_waiting: int, num_open: int) -> int:
        """How many may be asked for."""
        num = min(num_waiting, self.batch_size - num_open)
        return num if num > 0 and not await self.allowance.look() else 0


async def play(
    wanted: Sequence[Task], rollouts: RolloutSource, *, name: str, progress: Progress, ration: Ration | None = None
) -> tuple[list[SampleRecord], int]:
    """One valid rollout for each of `wanted`, as they ended, and how many were invalid and played again.

    Raises `NoProgress` once more are invalid than were asked for, and `BudgetExceeded` when the ration's allowance is
    used up before all were played.
    """
    progress.num_wanted += len(wanted)
    by_id = {task.id: task for task in wanted}
    waiting = deque((task, f"{name}/{task.id}") for task in wanted)
    missing: set[str] = set()
    valid: list[SampleRecord] = []
    num_invalid = 0
    while waiting or missing:
        num = len(waiting) if ration is None else await ration.num_now(len(waiting), len(missing))
        if num:
            missing.update(await rollouts.request([waiting.popleft() for _ in range(num)]))
        if not missing:
            raise BudgetExceeded(f"evaluation {name}: {len(valid)} of {len(wanted)} rollouts were played")
        for sample in await rollouts.ended():
            if sample.sample_id not in missing:
                continue
            missing.discard(sample.sample_id)
            if sample.is_valid:
                valid.append(sample)
                progress.num_done += 1
                continue
            num_invalid += 1
            if num_invalid > len(wanted):
                raise NoProgress(
                    f"evaluation {name}: {num_invalid} rollouts were invalid, the last one {sample.key}: "
                    f"{sample.reason}: {sample.detail}"
                )
            waiting.append((by_id[sample.task_id], f"{name}/{sample.task_id}"))
    return valid, num_invalid
