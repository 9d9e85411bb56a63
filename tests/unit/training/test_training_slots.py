"""The slot budget off policy: no schedule makes a trained token too old, or stands still."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.ports import Write
from turnmill.records import (
    GONE_AFTER_S,
    DropReason,
    ReplicaState,
    ReplicaStatus,
    Task,
    Version,
    encode,
    replica_key,
)
from turnmill.training.batcher import BatchBuilder, Closed
from turnmill.training.served import Served, oldest_served
from turnmill.training.slots import latest_steps

Y, N = True, False


@pytest.mark.parametrize(
    ("may_have_signal", "expected"),
    [
        ([], [3]),
        ([Y, Y, Y, Y, Y], [3, 3, 4, 4, 5, 5]),
        ([N, N, Y, Y, Y], [3, 3, 3, 3, 4, 4]),
        # At most four groups are looked at for one batch, however few of them have signal.
        ([Y, N, N, N, Y], [3, 3, 3, 3, 4, 4]),
        # A batch of none makes no step, but it counts: see below.
        ([N, N, N, N, Y, Y], [3, 3, 3, 3, 4, 4, 5]),
    ],
)
def test_the_last_step_of_a_group_is_that_where_every_open_one_before_it_has_signal(
    may_have_signal: list[bool], expected: list[int]
) -> None:
    assert latest_steps(may_have_signal, step=3, wanted=2, most=4) == expected


@pytest.mark.parametrize(
    ("state", "version", "next_version", "expected"),
    [
        (ReplicaState.SERVING, 3, None, 3),
        # Calls that run end with what they began with.
        (ReplicaState.SERVING, 3, 5, 3),
        (ReplicaState.DRAINING, 3, None, 3),
        (ReplicaState.LOADING, 0, 4, 4),
        (ReplicaState.LOADING, 0, None, 0),
        (ReplicaState.STOPPED, 3, None, 6),
    ],
)
def test_the_oldest_version_is_that_of_the_replicas_that_may_still_sample(
    state: ReplicaState, version: int, next_version: int | None, expected: int
) -> None:
    following = None if next_version is None else Version(incarnation=1, n=next_version)
    looked_at = status("replica-0", version, state=state, next_version=following)
    assert oldest_served([looked_at, status("replica-1", 6)]) == expected
    assert oldest_served([]) is None


def status(name: str, n: int, **changes: Any) -> ReplicaStatus:
    known = {"run_id": "r", "replica": name, "version": Version(incarnation=1, n=n), "fingerprints": {}, "pid": 1}
    return ReplicaStatus(**{**known, "updated_at": 100.0, **changes})


@pytest.mark.parametrize("skew_s", [0.0, -3600.0, 3600.0])
async def test_a_replica_whose_clock_is_wrong_holds_slots_back_until_it_gives_no_sign_of_life(
    tmp_path: Path, skew_s: float
) -> None:
    ports = open_run(tmp_path, "r", num_replicas=1)
    now, told = 1000.0, time.time() + skew_s
    served = Served(ports.records, "r", clock=lambda: now)

    async def tell(name: str, n: int, at: float) -> None:
        value = encode(status(name, n, updated_at=at))
        await ports.records.write([Write(key=replica_key("r", name), value=value, expected=None)])

    try:
        # Left by a process that died long ago.
        await tell("replica-1", 0, time.time() - 7200.0)
        await tell("replica-0", 1, told)
        await served.look(4)
        await tell("replica-0", 1, told + 2.0)
        assert await served.look(4) == 1
        await tell("replica-0", 2, told + 60.0)
        now += 60.0
        assert await served.look(4) == 2
        now += GONE_AFTER_S + 1.0
        for later_s in (70.0, 72.0):
            await tell("replica-2", 4, told + later_s)
            found = await served.look(4)
        assert found == 4
    finally:
        ports.close()


def test_batches_without_any_signal_count_for_they_may_come_to_have_some() -> None:
    before = [Y, Y, N, N, N, Y, Y, N, N, N]
    # Without the first group, three batches of one each end before the last one: [- b -] [- - f] [g - -].
    after = [N, *before[1:]]
    late = latest_steps(after, step=1, wanted=2, most=3)[-1]
    assert 4 <= late <= latest_steps(before, step=1, wanted=2, most=3)[-1]


@pytest.mark.parametrize("seed", range(200))
def test_the_last_step_of_a_group_never_goes_up(seed: int) -> None:
    rng = random.Random(seed)
    wanted = rng.randint(1, 4)
    most = wanted * rng.randint(1, 3)
    may_have_signal = [rng.random() < 0.8 for _ in range(30)]
    before = latest_steps(may_have_signal, step=1, wanted=wanted, most=most)
    while any(may_have_signal):
        may_have_signal[rng.choice([i for i, may in enumerate(may_have_signal) if may])] = False
        after = latest_steps(may_have_signal, step=1, wanted=wanted, most=most)
        assert all(late <= early for late, early in zip(after, before, strict=True))
        before = after


@dataclass(kw_only=True)
class Replica:
    """One name; its process may die, and another one takes its place."""

    is_serving: bool = True
    is_alive: bool = True
    # In its memory, and what its record says, which may be news from long ago.
    version: int = 0
    recorded: int = 0
    # It asked which version is current, and loads that.
    loading: int | None = None
    num_deaths: int = 0


@dataclass(kw_only=True)
class Sample:
    """A conversation that is being played."""

    num_calls: int
    oldest: int | None = None


@dataclass(kw_only=True)
class World:
    """Everything that happens around a builder, one random event after the other."""

    seed: int
    num_steps: int = 0
    oldest: int | None = None
    open: dict[str, Sample] = field(default_factory=dict)
    played: dict[str, int] = field(default_factory=dict)
    closed: list[Closed] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    reasons: Counter[DropReason] = field(default_factory=Counter)
    # Nothing happened since the last draw gave nothing.
    is_idle: bool = False

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        size = rng.choice([2, 4])
        self.config = Config(
            rollout_strategy="off_policy_async",
            age_tolerance=rng.choice([1, 1, 2, 3, 5]),
            number_generation=size,
            global_batch_size=size * rng.randint(1, 4),
            max_refill_rounds=rng.choice([0, 1, 6]),
            max_steps=12,
        )
        self.replicas = [Replica() for _ in range(rng.randint(1, 4))]
        tasks = [Task(id=f"t{i}", metadata={}) for i in range(9)]
        self.chance = {task.id: rng.choice([0.0, 0.3, 0.5, 0.9]) for task in tasks[:-1]} | {tasks[-1].id: 0.5}
        self.broken = rng.choice([0.0, 0.1, 0.4])
        self.builder = BatchBuilder(self.config, tasks, prefix="1.")
        self.names: Counter[str] = Counter()
        self.task_of: dict[str, str] = {}
        # Some things happen often in this world, others next to never.
        self.weights = {name: rng.choice([0.02, 0.3, 1.0, 5.0]) for name in self.events()}
        self.speed = [rng.choice([0.02, 0.3, 1.0]) for _ in self.replicas]

    def events(self) -> dict[str, list[Any]]:
        """What may happen now, and to whom."""
        pointer, alive = self.num_steps, [r for r in self.replicas if r.is_alive]
        serving = [r for r in alive if r.is_serving]
        return {
            "draw": [] if self.is_idle else [None],
            "call": [(sample, r) for sample in self.open.values() if sample.num_calls for r in serving],
            "end": [sample_id for sample_id, sample in self.open.items() if not sample.num_calls],
            "step": self.closed[:1],
            "swap": [r for r in serving if r.version < pointer],
            "news": [r for r in alive if r.recorded < r.version],
            "die": [r for r in serving[1:] if r.num_deaths < 3],
            "join": [r for r in self.replicas if not r.is_alive],
            "ask": [r for r in alive if not r.is_serving and r.loading is None],
            "load": [r for r in alive if r.loading is not None],
        }

    def happen(self) -> None:
        while self.builder.is_closed:
            self.close()
        events = {name: whom for name, whom in self.events().items() if whom}
        assert events, "it stands still"
        (name,) = self.rng.choices(list(events), [self.weights[name] for name in events])
        whom = events[name]
        weights = [1.0] * len(whom)
        if name in ("call", "swap"):
            weights = [self.speed[self.index(item[1] if name == "call" else item)] for item in whom]
        (target,) = self.rng.choices(whom, weights)
        getattr(self, name)(target)
        if name != "draw":
            self.is_idle = False

    def index(self, replica: object) -> int:
        return next(i for i, item in enumerate(self.replicas) if item is replica)

    def draw(self, _: None) -> None:
        """The trainer looks at the records of the replicas, and asks for what there are slots for."""
        records = [
            ReplicaStatus(
                run_id="r",
                replica=str(index),
                version=Version(incarnation=1, n=replica.recorded),
                fingerprints={},
                updated_at=0.0,
                pid=1,
                state=ReplicaState.SERVING if replica.is_serving else ReplicaState.LOADING,
                next_version=None if replica.loading is None else Version(incarnation=1, n=replica.loading),
            )
            for index, replica in enumerate(self.replicas)
            if replica.is_alive
        ]
        found = oldest_served(records)
        self.oldest = max(self.oldest or 0, self.num_steps if found is None else found)
        self.builder.extend(min(self.oldest + self.config.age_tolerance + 1, self.config.max_steps))
        draws = self.builder.draw()
        ids = [f"{draw.task.id}_{self.names.update([draw.task.id]) or self.names[draw.task.id]}" for draw in draws]
        self.builder.bind(draws, ids)
        self.is_idle = not draws
        self.task_of |= {sample_id: draw.task.id for draw, sample_id in zip(draws, ids, strict=True)}
        self.open |= {sample_id: Sample(num_calls=self.rng.randint(1, 4)) for sample_id in ids}
        assert self.builder.num_in_flight <= self.config.global_batch_size * (self.config.age_tolerance + 1)

    def call(self, pair: tuple[Sample, Replica]) -> None:
        sample, replica = pair
        sample.num_calls -= 1
        sample.oldest = replica.version if sample.oldest is None else min(sample.oldest, replica.version)

    def end(self, sample_id: str) -> None:
        sample = self.open.pop(sample_id)
        assert sample.oldest is not None
        reward = None if self.rng.random() < self.broken else float(self.rng.random() < self.chance_of(sample_id))
        if sample_id in self.builder.leaving:
            drops = self.builder.leave(sample_id, reward)
        else:
            assert self.builder.latest_step(sample_id) - 1 - sample.oldest <= self.config.age_tolerance
            self.played[sample_id] = sample.oldest
            drops = self.builder.end(sample_id, reward)
        self.reasons.update(drop.reason for drop in drops)

    def chance_of(self, sample_id: str) -> float:
        return self.chance[self.task_of[sample_id]]

    def close(self) -> None:
        closed = self.builder.close()
        assert closed.drops == ()
        if closed.groups:
            self.closed.append(closed)
            oldest = [self.played[sample_id] for group in closed.groups for sample_id in group]
            self.ages += [closed.step - 1 - version for version in oldest]

    def step(self, closed: Closed) -> None:
        self.closed.remove(closed)
        self.num_steps += 1
        assert closed.step == self.num_steps

    def swap(self, replica: Replica) -> None:
        replica.version = self.num_steps

    def news(self, replica: Replica) -> None:
        replica.recorded = replica.version

    def die(self, replica: Replica) -> None:
        replica.is_alive = replica.is_serving = False
        replica.loading = None
        replica.num_deaths += 1

    def join(self, replica: Replica) -> None:
        # A record before anything else, which says nothing yet.
        replica.is_alive, replica.recorded, replica.version = True, 0, 0

    def ask(self, replica: Replica) -> None:
        replica.loading = self.num_steps

    def load(self, replica: Replica) -> None:
        assert replica.loading is not None
        replica.version = replica.recorded = replica.loading
        replica.is_serving, replica.loading = True, None


def test_a_group_counts_for_its_task_with_the_batch_that_it_is_in_however_early_it_was_decided() -> None:
    config = Config(rollout_strategy="off_policy_async", age_tolerance=2, number_generation=2, global_batch_size=2)
    builder = BatchBuilder(config, [Task(id=f"t{i}", metadata={}) for i in range(3)], prefix="1.")
    builder.extend(3)
    draws = builder.draw()
    builder.bind(draws, [f"{draw.task.id}_{i % 2}" for i, draw in enumerate(draws)])
    # The one without signal in the middle is looked at for the second batch.
    for sample_id in ("t2_0", "t2_1", "t1_0", "t1_1", "t0_0", "t0_1"):
        builder.end(sample_id, float(sample_id.endswith("1") and not sample_id.startswith("t1")))
    counted = []
    while builder.is_closed:
        builder.close()
        counted.append([outcome.task_id for outcome in builder.progress.outcomes])
    assert counted == [["t0"], ["t1", "t2"]]


def play(seed: int) -> World:
    """A world to the end of its run."""
    world = World(seed=seed)
    while world.num_steps < world.config.max_steps:
        world.happen()
    return world


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_makes_a_trained_token_too_old_or_stands_still(seed: int) -> None:
    world = play(seed)
    assert max(world.ages) <= world.config.age_tolerance
    assert set(world.reasons) <= {DropReason.NO_SIGNAL, DropReason.SURPLUS}


def test_the_bound_is_reached() -> None:
    assert any(max(world.ages) == world.config.age_tolerance > 1 for world in map(play, range(12))), (
        "a bound that is never reached would bound more than was asked for"
    )
