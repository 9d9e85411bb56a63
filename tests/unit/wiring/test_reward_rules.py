"""Simulated reward curves: noise, growth and plateaus are no collapse; a collapse is seen within a few steps."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from turnmill.records import Metric
from turnmill.wiring.watching.checks.rewards import (
    WINDOW,
    StepRewards,
    at_the_bottom,
    collapses,
    fallen,
    invalid,
    rewards_of,
)

Curve = Callable[[random.Random], list[StepRewards]]
NUM_SEEDS = 12
# Step behind which the curves of the second list go wrong.
BREAK = 60


def of(rewards: Sequence[float], num_invalid: int = 0) -> StepRewards:
    return StepRewards(
        mean=sum(rewards) / len(rewards),
        lowest=min(rewards),
        highest=max(rewards),
        num_valid=len(rewards),
        num_invalid=num_invalid,
    )


def solved(share: float, count: int, rng: random.Random, num_invalid: int = 0) -> StepRewards:
    """A step in which each of `count` rollouts has 1 with this probability, else 0."""
    return of([float(rng.random() < share) for _ in range(count)], num_invalid)


def first_alarm(steps: list[StepRewards]) -> int | None:
    """The number of steps after which a monitor that looks after each one would have raised an alert."""
    return next((num for num in range(1, len(steps) + 1) if collapses(steps[:num])), None)


HEALTHY: dict[str, Curve] = {
    "hardly ever solved": lambda rng: [solved(0.02, 16, rng) for _ in range(200)],
    "seldom solved": lambda rng: [solved(0.1, 16, rng) for _ in range(200)],
    "solved by half, small batches": lambda rng: [solved(0.5, 16, rng) for _ in range(200)],
    "solved by half": lambda rng: [solved(0.5, 64, rng) for _ in range(200)],
    "learning": lambda rng: [solved(0.05 + 0.8 * step / 200, 64, rng) for step in range(200)],
    "learned": lambda rng: [solved(min(0.7, 0.05 + step / 80), 16, rng) for step in range(200)],
    "always solved": lambda rng: [solved(1.0, 16, rng) for _ in range(100)],
    "never solved": lambda rng: [solved(0.0, 16, rng) for _ in range(100)],
    "tasks of all difficulties": lambda rng: [
        solved(min(1.0, max(0.0, rng.gauss(0.4, 0.1))), 32, rng) for _ in range(200)
    ],
    "slow waves": lambda rng: [solved(0.5 + 0.06 * math.sin(step / 20), 64, rng) for step in range(200)],
    "rewards of both signs": lambda rng: [of([rng.gauss(0, 1) for _ in range(16)]) for _ in range(200)],
    "some invalid": lambda rng: [solved(0.5, 30, rng, rng.randrange(5)) for _ in range(200)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_noise_and_growth_are_no_collapse(name: str) -> None:
    alarms = [first_alarm(HEALTHY[name](random.Random(seed))) for seed in range(NUM_SEEDS)]
    assert alarms == [None] * NUM_SEEDS


def broken(before: float, after: float, count: int) -> Curve:
    def curve(rng: random.Random) -> list[StepRewards]:
        shares = [before] * BREAK + [after] * 30
        return [solved(share, count, rng) for share in shares]

    return curve


COLLAPSES: dict[str, tuple[Curve, int]] = {
    "to a third": (broken(0.6, 0.2, 64), 8),
    "to a third, small batches": (broken(0.6, 0.2, 16), 22),
    "to nothing": (broken(0.6, 0.0, 16), 4),
    "to nothing, from little": (broken(0.1, 0.0, 64), 5),
    "little by little": (
        lambda rng: [solved(0.6 - 0.5 * max(0, step - BREAK) / 40, 64, rng) for step in range(BREAK + 40)],
        30,
    ),
    "to no rewards": (
        lambda rng: [solved(0.6, 63, rng, 1) for _ in range(BREAK)] + [solved(0.6, 26, rng, 38) for _ in range(20)],
        4,
    ),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_seen_within_steps(name: str) -> None:
    curve, most = COLLAPSES[name]
    for seed in range(NUM_SEEDS):
        seen = first_alarm(curve(random.Random(seed)))
        assert seen is not None and BREAK < seen <= BREAK + most, f"seed {seed}: {seen}"


def test_nothing_is_said_at_the_start_however_it_looks() -> None:
    rng = random.Random(0)
    steps = [solved(1.0, 16, rng) for _ in range(WINDOW - 1)] + [solved(0.0, 16, rng) for _ in range(WINDOW)]
    assert fallen(steps) is None and at_the_bottom(steps) is None
    assert collapses([]) == [] and collapses(steps[:1]) == []


def test_an_open_collapse_stays_until_rewards_are_well_above_and_then_goes() -> None:
    good, bad, half = [of([0.6] * 8)] * 20, [of([0.1] * 8)] * 8, [of([0.4] * 8)] * 8
    lowest = [of([0.0] * 8)]
    assert fallen(lowest + good + bad) is not None
    assert fallen(lowest + good + half) is None, "that would be none"
    assert fallen(lowest + good + bad + half, is_open=True) is not None, "but this one is not over"
    assert fallen(lowest + good + bad + good, is_open=True) is None
    flat = [of([0.0] * 8)]
    assert at_the_bottom([*good[:8], of([0.0, 1.0]), *flat]) is None
    assert at_the_bottom([*good[:8], of([0.0, 1.0]), *flat], is_open=True) is not None


def test_steps_of_which_nothing_is_valid_count_as_invalid_only() -> None:
    empty = rewards_of(Metric(run_id="r", step=1, time=1.0, values={"num_generated": 0, "num_invalid": 16}))
    assert (empty.num_valid, empty.num_invalid) == (0, 16)
    good = [of([0.5] * 16)] * 10
    assert fallen([*good, *[empty] * 10]) is None
    assert invalid([*good, *[empty] * 4]) == ("100% of the rollouts of the last 4 steps are invalid; before it were 0%")
