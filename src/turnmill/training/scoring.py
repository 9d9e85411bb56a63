"""Rewards that compare the samples of a group: held until all have ended, then scored by a worker, all at once.

    hold ... hold -> the group is complete -> request -> its end -> group_reward in each sample's record -> Scored
                                                             '-> failed: requested again, given up in the end

What the group adds is stored with the samples before anything is decided on it: whoever trains them later, from the
records, finds it there.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from turnmill.environment.groups import group_metadata, values_of
from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore, Write
from turnmill.records import Call, DropReason, InvalidReason, SampleRecord, Task, encode
from turnmill.training.history import write_all
from turnmill.training.samples import check_sample, stored_record

logger = logging.getLogger(__name__)
# Requests that may fail until a group is given up.
MAX_TRIES = 3
# Largest value: differences of larger ones are lost, or no number.
MOST_VALUE = 1e6


class Requests(Protocol):
    """The slice of the scheduler that scoring uses."""

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        """Have a task played for each (task, group id); the new sample ids, in order."""
        ...

    async def drop(self, sample_ids: Sequence[str], reason: DropReason) -> None:
        """Write DROPPED with the reason, open samples or ended ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A group that is decided."""

    # With what the group adds; as they were held where it could not be scored.
    members: tuple[tuple[SampleRecord, list[Call]], ...]
    # Why it could not be scored: the request's record.
    failure: SampleRecord | None = None


@dataclass(kw_only=True)
class _Group:
    # By sample id, in the order of their ends.
    members: dict[str, tuple[SampleRecord, list[Call]]] = field(default_factory=dict)
    # The request that is on its way.
    request_id: str | None = None
    num_failed: int = 0

    @property
    def in_order(self) -> list[tuple[SampleRecord, list[Call]]]:
        """In one that does not depend on who was first."""
        return [self.members[sample_id] for sample_id in sorted(self.members)]


class GroupScoring:
    """The groups of one trainer that wait for their scores."""

    def __init__(self, records: RecordStore, requests: Requests, size: int) -> None:
        """`size`: samples of a group."""
        self._records = records
        self._requests = requests
        self._size = size
        self._groups: dict[str, _Group] = {}

    def owns(self, sample_id: str) -> bool:
        """It is a request of this, on its way."""
        return any(group.request_id == sample_id for group in self._groups.values())

    async def hold(self, sample: SampleRecord, calls: list[Call]) -> None:
        """Keep a sample with a reward until its group is complete; then have the group scored."""
        group = self._groups.setdefault(sample.group_id, _Group())
        group.members[sample.sample_id] = (sample, calls)
        if len(group.members) == self._size:
            await self._request(sample.group_id, group)

    async def end(self, ended: SampleRecord) -> Scored | None:
        """What becomes of the group whose request ended; None where it is requested again."""
        group_id = ended.group_id
        group = self._groups[group_id]
        group.request_id = None
        values = None
        if ended.reward is not None:
            check_sample(ended)
            await self._requests.drop([ended.sample_id], DropReason.GROUP_SCORE)
            values = values_of(ended.metrics, self._size)
            detail = f"its metrics are no values of {self._size} samples: {', '.join(ended.metrics):.80}"
            if values and max(map(abs, values)) > MOST_VALUE:
                values, detail = None, f"its values are up to {max(map(abs, ended.metrics.values())):g}"
            ended = replace(ended, reason=InvalidReason.REWARD_ERROR, detail=detail)
        if values is None:
            return await self._failed(group_id, group, ended)
        del self._groups[group_id]
        return Scored(members=await self._store(group, values))

    async def _failed(self, group_id: str, group: _Group, ended: SampleRecord) -> Scored | None:
        group.num_failed += 1
        logger.warning("a group is not scored: %s: %s", ended.reason, ended.detail, extra={"at": ended.key})
        if group.num_failed < MAX_TRIES:
            await self._request(group_id, group)
            return None
        del self._groups[group_id]
        return Scored(members=tuple(group.in_order), failure=ended)

    def held(self, among: Collection[str]) -> list[SampleRecord]:
        """Those of the samples `among` that wait here."""
        return [sample for group in self._groups.values() for id, (sample, _) in group.members.items() if id in among]

    async def give_up(self, sample_ids: Collection[str]) -> None:
        """Let samples go unscored: no batch has a place for their groups."""
        for group_id, group in list(self._groups.items()):
            if not group.members.keys().isdisjoint(sample_ids):
                del self._groups[group_id]
                if group.request_id is not None:
                    await self._requests.drop([group.request_id], DropReason.GROUP_SCORE)

    async def clear(self) -> None:
        """Let all go."""
        await self.give_up([id for group in self._groups.values() for id in group.members])

    async def _request(self, group_id: str, group: _Group) -> None:
        task = Task(id=f"group-{group_id}", metadata=group_metadata(group.in_order))
        (group.request_id,) = await self._requests.request([(task, group_id)])

    async def _store(self, group: _Group, values: Sequence[float]) -> tuple[tuple[SampleRecord, list[Call]], ...]:
        """The members with what the group adds, as they are stored now."""
        keys = [sample.key for sample, _ in group.in_order]
        scored, writes = [], []
        for (held, calls), value, stored in zip(group.in_order, values, await self._records.get(keys), strict=True):
            found = stored_record(stored, held.key, SampleRecord)
            if stored is None or found.report_digest != held.report_digest:
                raise RecordCorrupt(
                    f"{held.key}: report_digest: expected {held.report_digest!r}, found {found.report_digest!r}"
                )
            worth = replace(found, group_reward=value)
            worth = replace(worth, report_digest=worth.expected_report_digest())
            scored.append((worth, calls))
            writes.append(Write(key=worth.key, value=encode(worth), expected=stored.version))
        await write_all(self._records, writes)
        return tuple(scored)
