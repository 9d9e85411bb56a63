"""Rollouts that are measured and never trained: asked for, waited for, and played again where they were invalid."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class Played:
    """What came of a number of wanted rollouts."""

    # As they ended.
    valid: list[SampleRecord] = field(default_factory=list)
    # Without a reward, and with one that was not accepted: both were played again.
    num_invalid: int = 0
    num_refused: int = 0


async def _any(_: SampleRecord) -> bool:
    return True


async def play(
    wanted: Sequence[Task],
    rollouts: RolloutSource,
    *,
    name: str,
    progress: Progress,
    groups: str | None = None,
    ration: Ration | None = None,
    accept: Callable[[SampleRecord], Awaitable[bool]] = _any,
) -> Played:
    """One valid rollout, which `accept` takes, for each of `wanted`, in groups that begin with `groups`.

    Raises `NoProgress` once more were lost than were asked for, and `BudgetExceeded` when the ration's allowance is
    used up before all were played.
    """
    groups = f"{name}/" if groups is None else groups
    progress.num_wanted += len(wanted)
    by_id = {task.id: task for task in wanted}
    waiting = deque((task, f"{groups}{task.id}") for task in wanted)
    missing: set[str] = set()
    played = Played()
    while waiting or missing:
        num = len(waiting) if ration is None else await ration.num_now(len(waiting), len(missing))
        if num:
            missing.update(await rollouts.request([waiting.popleft() for _ in range(num)]))
        if not missing:
            raise BudgetExceeded(f"evaluation {name}: {len(played.valid)} of {len(wanted)} rollouts were played")
        for sample in await rollouts.ended():
            if sample.sample_id not in missing:
                continue
            missing.discard(sample.sample_id)
            if sample.is_valid and await accept(sample):
                played.valid.append(sample)
                progress.num_done += 1
                continue
            _lose(sample, played, name, len(wanted))
            waiting.append((by_id[sample.task_id], f"{groups}{sample.task_id}"))
    return played


def _lose(sample: SampleRecord, played: Played, name: str, num_wanted: int) -> None:
    """Count one that does not count; raises `NoProgress` if that is too much."""
    if sample.is_valid:
        played.num_refused += 1
    else:
        played.num_invalid += 1
    num_lost = played.num_invalid + played.num_refused
    if num_lost > num_wanted:
        what = "had tokens of other weights" if sample.is_valid else f"{sample.reason}: {sample.detail}"
        were = "invalid" if not played.num_refused else "invalid or of other weights"
        raise NoProgress(f"evaluation {name}: {num_lost} rollouts were {were}, the last one {sample.key}: {what}")
