"""Which replica answers a conversation: spread, who moves when one is lost or comes back, and by whose clock."""

import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.conversation.routing import LOOK_S, Routes, rendezvous
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import ReplicaState, ReplicaStatus, Version, encode, replica_key, replica_name

RUN_ID = "run"
SAMPLES = [f"task-{index}_0" for index in range(4000)]


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[RecordStore]:
    ports = open_run(tmp_path, RUN_ID, num_replicas=1)
    yield ports.records
    ports.close()


class Fleet:
    """Replicas that say what a test has them say, and routes that have looked at it."""

    def __init__(self, records: RecordStore, num: int) -> None:
        self._records = records
        self._num = num
        self.joined = dict.fromkeys(range(num), 1.0)

    async def say(self, index: int, *, state: ReplicaState = ReplicaState.SERVING, age_s: float = 0.0) -> None:
        status = ReplicaStatus(
            run_id=RUN_ID,
            replica=replica_name(index),
            version=Version(incarnation=1, n=1),
            fingerprints={},
            updated_at=time.time() - age_s,
            pid=1,
            state=state,
            joined_at=self.joined[index],
        )
        key = replica_key(RUN_ID, status.replica)
        await self._records.write([Write(key=key, value=encode(status), expected=None)])

    async def routes(self) -> Routes:
        routes = Routes(self._records, RUN_ID, self._num)
        await routes.refresh()
        return routes


async def test_conversations_are_spread_evenly_and_only_those_of_a_lost_or_won_replica_move() -> None:
    for num in range(2, 9):
        before = {sample: rendezvous(sample, range(num)) for sample in SAMPLES}
        expected = len(SAMPLES) / num
        # Five standard deviations of a binomial.
        assert all(abs(n - expected) < 5 * (expected * (1 - 1 / num)) ** 0.5 for n in Counter(before.values()).values())
        for lost in range(num):
            rest = [index for index in range(num) if index != lost]
            after = {sample: rendezvous(sample, rest) for sample in SAMPLES}
            moved = {sample for sample in SAMPLES if after[sample] != before[sample]}
            # The other way round it says that a replica that is won takes only what it wins.
            assert moved == {sample for sample in SAMPLES if before[sample] == lost}
            assert set(after.values()) == set(rest)


async def test_a_fleet_that_changes_at_random_moves_no_running_conversation_without_need(records: RecordStore) -> None:
    """A conversation leaves a replica only when that is gone, or was away; it goes to none that joined after it began,
    unless there is no other."""
    rng = random.Random(7)
    fleet = Fleet(records, 4)
    live = set(range(4))
    for index in live:
        await fleet.say(index)
    routes = await fleet.routes()
    now = 2.0
    began: dict[str, float] = {}
    at: dict[str, int] = {}
    for turn in range(60):
        changed: set[int] = set()
        for index in range(4):
            if rng.random() < 0.25:
                changed.add(index)
                if index in live and len(live) > 1:
                    live.remove(index)
                    await fleet.say(index, state=rng.choice([ReplicaState.DRAINING, ReplicaState.STOPPED]))
                else:
                    # Back, or away for so short a time that nobody saw it.
                    live.add(index)
                    fleet.joined[index] = now
                    await fleet.say(index)
        routes = await fleet.routes()
        now += 1.0
        for sample in [f"sample-{turn}-{k}" for k in range(20)]:
            began[sample] = now
        now += 1.0
        for sample, begun_at in began.items():
            index = routes.replica_of(sample, begun_at)
            assert index in live
            if at.get(sample, index) != index:
                assert at[sample] in changed
            older = [each for each in live if fleet.joined[each] <= begun_at]
            assert not older or index in older
            at[sample] = index
        counted = Counter(at[sample] for sample in began if began[sample] > now - 2)
        assert set(counted) <= live


async def test_a_replica_is_gone_by_its_word_or_by_its_silence(records: RecordStore) -> None:
    fleet = Fleet(records, 3)
    for index in range(3):
        await fleet.say(index)
    sample = next(sample for sample in SAMPLES if rendezvous(sample, range(3)) == 1)
    assert (await fleet.routes()).replica_of(sample, 2.0) == 1
    for state, age_s in [
        (ReplicaState.LOADING, 0.0),
        (ReplicaState.DRAINING, 0.0),
        (ReplicaState.STOPPED, 0.0),
        (ReplicaState.SERVING, 60.0),
        # By a clock that was set back since.
        (ReplicaState.SERVING, -60.0),
    ]:
        await fleet.say(1, state=state, age_s=age_s)
        assert (await fleet.routes()).replica_of(sample, 2.0) != 1
    await fleet.say(1, age_s=5.0)
    assert (await fleet.routes()).replica_of(sample, 2.0) == 1


async def test_where_nobody_lives_each_conversation_waits_for_its_own(records: RecordStore) -> None:
    fleet = Fleet(records, 3)
    routes = await fleet.routes()
    for sample in SAMPLES[:50]:
        replica = routes.replica_of(sample, 2.0)
        assert replica == rendezvous(sample, range(3))
        assert routes.new_replica_of(sample, 2.0, replica=replica, sent_at=3.0) is None


async def test_a_call_moves_when_its_replica_is_gone_or_was_away_since_it_was_sent(records: RecordStore) -> None:
    fleet = Fleet(records, 2)
    for index in range(2):
        await fleet.say(index)
    sample = next(sample for sample in SAMPLES if rendezvous(sample, range(2)) == 0)

    async def moved(replica: int, sent_at: float) -> int | None:
        return (await fleet.routes()).new_replica_of(sample, 2.0, replica=replica, sent_at=sent_at)

    assert await moved(0, 3.0) is None
    await fleet.say(0, state=ReplicaState.DRAINING)
    assert await moved(0, 3.0) == 1
    # It is back: what it was sent before is lost with the process that it was, what is sent now is not.
    fleet.joined[0] = 10.0
    await fleet.say(0)
    assert await moved(0, 3.0) == 1
    assert await moved(0, 11.0) is None
    assert await moved(1, 3.0) is None
    # The only one: whoever waits there waits for it to come back.
    await fleet.say(1, state=ReplicaState.STOPPED)
    assert await moved(0, 3.0) is None
    assert await moved(1, 3.0) == 0


class CountingRecords:
    """Counts how often it is asked."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self.num_gets = 0

    async def get(self, keys: list[str]) -> list[Stored | None]:
        self.num_gets += 1
        return await self._records.get(keys)


async def test_a_lone_replica_is_never_looked_at_and_several_once_in_a_while(records: RecordStore) -> None:
    counting = CountingRecords(records)
    alone = Routes(counting, RUN_ID, 1)  # type: ignore[arg-type]
    await alone.refresh()
    assert (alone.replica_of("a_0", 0.0), counting.num_gets) == (0, 0)
    several = Routes(counting, RUN_ID, 3)  # type: ignore[arg-type]
    started = time.monotonic()
    for _ in range(100):
        await several.refresh()
    assert counting.num_gets <= 1 + (time.monotonic() - started) / LOOK_S
