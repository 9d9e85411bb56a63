"""The baseline: which rollouts are played, when it goes on to more of them, and what it records."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from turnmill.config import Config
from turnmill.errors import NoProgress
from turnmill.evaluation import Progress, measure_baseline
from turnmill.evaluation.baseline import plan
from turnmill.records import (
    Baseline,
    BaselineVerdict,
    InvalidReason,
    Purpose,
    RolloutRequest,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    Task,
)

RUN = Run(
    run_id="r",
    cause="c",
    status=RunStatus.ACTIVE,
    created_at=0.0,
    config={},
    sources={},
    data_path=None,
    attempt=2,
)
CONFIG = Config()
TASKS = [Task(id=f"t{i:03}", metadata={"prompt": "p"}) for i in range(200)]


class Rollouts:
    """Ends each requested sample at once with the next of `rewards`, over and over; invalid where that is None."""

    def __init__(self, *rewards: float | None) -> None:
        self.rewards = rewards
        self.asked: list[str] = []
        self.waiting: list[SampleRecord] = []

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids = []
        for task, group_id in wanted:
            reward = self.rewards[len(self.asked) % len(self.rewards)]
            sample_id = f"{task.id}_{len(self.asked)}"
            self.asked.append(task.id)
            request = RolloutRequest(sample_id=sample_id, timestamp="", max_length=8, rewards={}, data={})
            self.waiting.append(
                SampleRecord(
                    run_id="r",
                    purpose=Purpose.BASELINE,
                    sample_id=sample_id,
                    task_id=task.id,
                    group_id=group_id,
                    state=SampleState.INVALID if reward is None else SampleState.REPORTED,
                    created_at=0.0,
                    request=request,
                    deadline=1.0,
                    reward=reward,
                    reason=InvalidReason.ENV_ERROR if reward is None else None,
                )
            )
            ids.append(sample_id)
        return ids

    async def ended(self) -> list[SampleRecord]:
        ended, self.waiting = self.waiting, []
        return ended


async def measure(rollouts: Rollouts, config: Config = CONFIG) -> Baseline:
    return await measure_baseline(TASKS, rollouts, run=RUN, config=config, progress=Progress())


async def test_a_model_that_passes_some_is_measured_on_64_rollouts() -> None:
    rollouts = Rollouts(0.0, 0.0, 0.25, 1.0)
    baseline = await measure(rollouts)
    assert (baseline.verdict, baseline.lets_train, baseline.attempt) == (BaselineVerdict.SIGNAL, True, 2)
    assert (baseline.num_rollouts, baseline.num_passed, baseline.num_invalid) == (64, 16, 0)
    assert (baseline.reward_min, baseline.reward_mean, baseline.reward_max) == (0.0, 0.3125, 1.0)
    assert baseline.num_rewards == 3
    # (0.25 + 3.8416 / 128 -+ 1.96 sqrt(0.1875 / 64 + 3.8416 / 16384)) / (1 + 3.8416 / 64), by hand.
    assert (baseline.low, baseline.high) == pytest.approx((0.16015, 0.36817), abs=1e-5)
    assert [(task.num_rollouts, task.num_passed) for task in baseline.tasks] == [(4, 1)] * 16
    assert baseline.tasks[0].low == pytest.approx(0.0456, abs=5e-5)
    assert baseline.histogram() == {"0": 0, "0-25": 16, "25-50": 0, "50-75": 0, "75-100": 0, "100": 0}


@pytest.mark.parametrize(("reward", "verdict"), [(0.0, BaselineVerdict.TOO_HARD), (1.0, BaselineVerdict.TOO_EASY)])
async def test_where_none_or_all_pass_it_goes_on_to_384(reward: float, verdict: BaselineVerdict) -> None:
    rollouts = Rollouts(reward)
    baseline = await measure(rollouts)
    assert (baseline.verdict, baseline.lets_train, baseline.num_rollouts) == (verdict, False, 384)
    assert len(rollouts.asked) == 384 and len(baseline.tasks) == 96
    ignored = await measure(Rollouts(reward), Config(ignore_baseline=True))
    assert (ignored.verdict, ignored.is_ignored, ignored.lets_train) == (verdict, True, True)


async def test_one_success_among_384_is_enough() -> None:
    baseline = await measure(Rollouts(*[0.0] * 383, 1.0))
    assert (baseline.verdict, baseline.num_passed, baseline.num_rollouts) == (BaselineVerdict.SIGNAL, 1, 384)


async def test_a_pass_is_what_reaches_the_threshold() -> None:
    rewards = (0.1, 0.4)
    assert (await measure(Rollouts(*rewards))).verdict is BaselineVerdict.TOO_HARD
    assert (await measure(Rollouts(*rewards), Config(success_threshold=0.4))).verdict is BaselineVerdict.SIGNAL
    assert (await measure(Rollouts(*rewards), Config(success_threshold=0.1))).verdict is BaselineVerdict.TOO_EASY


async def test_invalid_rollouts_are_played_again_and_too_many_end_it() -> None:
    config = Config(baseline_rollouts=4, baseline_max_rollouts=4)
    baseline = await measure(Rollouts(0.0, None, 1.0), config)
    assert (baseline.num_rollouts, baseline.num_invalid) == (4, 2)
    with pytest.raises(NoProgress, match="evaluation baseline: 5 rollouts were invalid"):
        await measure(Rollouts(None), config)


def test_the_first_rollouts_are_a_random_sample_of_the_file_and_more_of_them_are_of_other_tasks() -> None:
    planned = [task.id for task in plan(TASKS, 384, seed=0)]
    assert all(planned.count(task_id) == 4 for task_id in set(planned)) and len(set(planned)) == 96
    assert planned[:64] == [task.id for task in plan(TASKS, 64, seed=0)]
    assert planned != sorted(planned) and planned != [task.id for task in plan(TASKS, 384, seed=1)]
    few = [task.id for task in plan(TASKS[:3], 64, seed=0)]
    assert sorted(few.count(task.id) for task in TASKS[:3]) == [20, 20, 24]


async def test_tasks_are_counted_by_their_pass_rate() -> None:
    config = Config(baseline_rollouts=24, baseline_max_rollouts=24)
    groups = ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1), (1, 0, 1, 0))
    baseline = await measure(Rollouts(*(float(reward) for group in groups for reward in group)), config)
    assert baseline.histogram() == {"0": 1, "0-25": 1, "25-50": 2, "50-75": 1, "75-100": 0, "100": 1}
    many = replace(baseline.tasks[0], num_rollouts=8, num_passed=7)
    assert replace(baseline, tasks=(many,)).histogram()["75-100"] == 1
