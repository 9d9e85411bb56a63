"""What the collector takes and gives: rollouts that were asked for, and closed batches."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from turnmill.records import Progress, SampleRecord
from turnmill.training.batcher import Closed
from turnmill.training.samples import TrainingSample
from turnmill.training.scoring import Requests
from turnmill.training.stale_audit import StaleTokens
from turnmill.training.tally import Tally


class RolloutSource(Requests, Protocol):
    """The slice of the scheduler that training uses; started and closed by its owner."""

    async def ended(self) -> list[SampleRecord]:
        """Wait for requested samples that are REPORTED or INVALID and were not returned yet; at least one.

        Cancelled, it has returned none.
        """
        ...


@dataclass(kw_only=True)
class Collected:
    """A closed batch."""

    closed: Closed
    # As they were read and checked, group by group.
    groups: list[list[TrainingSample]]
    # Where another trainer goes on behind it.
    progress: Progress
    # What its step's numbers cover; on policy still being added to.
    tally: Tally
    # Groups, the first ones, that `Ahead` was told of.
    num_offered: int
    # Samples that ended since the batch before, and those without a reward among them.
    num_ended: int
    num_failed: int
    # Since its turn came: how the groups are cut into parts, and how many were begun before.
    parts: tuple[int, ...] = ()
    num_early: int = 0
    # Finds out about its older tokens; None where it has none.
    stale: asyncio.Task[StaleTokens] | None = None
