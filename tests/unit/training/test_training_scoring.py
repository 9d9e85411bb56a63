"""Rewards that compare the samples of a group, in the loop: over real ports, scored by a real environment."""

import asyncio
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.loop_bench import Bench, Builders, ScriptedRollouts
from turnmill.environment import Chat, Environment, Outcome, ScriptedChat
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.groups import is_group, rollouts_of
from turnmill.environment.outcomes import Rollout
from turnmill.environment.rewards import RewardFunction, reward
from turnmill.errors import NoProgress
from turnmill.records import Call, DropReason, InvalidReason, SampleRecord, SampleState, Task
from turnmill.training.trainer import Trainer


def place_of(rollout: Rollout) -> int:
    return int(rollout.task.id.rpartition("_")[2])


def rank(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 for the youngest of the group, 0.0 for the oldest."""
    order = sorted(place_of(rollout) for rollout in rollouts)
    return [order.index(place_of(rollout)) / (len(rollouts) - 1) for rollout in rollouts]


class Scoring(Environment):
    """What the worker has: it scores groups; the samples are played by the script."""

    def __init__(self, *functions: RewardFunction) -> None:
        self.rewards = functions

    async def play(self, task: Task, chat: Chat) -> Outcome:
        raise AssertionError("nothing is played here")


class GroupRollouts(ScriptedRollouts):
    """Scores groups with an environment; tells of one end at a time, in the order of the requests."""

    environment: Environment = Scoring(reward(rank, weight=0.5, per="group"))
    groups: list[list[Rollout]]

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids: list[str] = []
        for task, group_id in wanted:
            if is_group(task.metadata):
                ids.append(await self.score(task, group_id))
            else:
                ids += await super().request([(task, group_id)])
        return ids

    async def ended(self) -> list[SampleRecord]:
        if len(self.ready) > 1:
            return [self.ready.pop(0)]
        return await super().ended()

    async def score(self, task: Task, group_id: str) -> str:
        g = self.num_requested.get(task.id, 0)
        self.num_requested[task.id] = g + 1
        sample_id = f"{task.id}_{g}"
        self.groups.append(rollouts_of(task.metadata))
        asked = Task(id=sample_id, metadata=task.metadata)
        result = await play_scored(self.environment, asked, WatchedChat(ScriptedChat([])), reward_range=(0.0, 1.0))
        sample = self.sample_of(sample_id, [], result.reward, group_id)
        if result.reason is not None:
            sample = replace(sample, state=SampleState.INVALID, reason=result.reason, detail=result.detail)
        sample = replace(sample, metrics=result.metrics)
        sample = replace(sample, report_digest=sample.expected_report_digest())
        await self.put(sample.key, sample)
        self.ready.append(sample)
        return sample_id


@pytest.fixture
def group_rollouts(bench: Bench, tiny_model: Path, builders: Builders) -> GroupRollouts:
    """All samples are worth the same by themselves."""
    made = GroupRollouts(bench.ports, tiny_model, builders, lambda task, g: 0.25)
    made.groups = []
    return made


@pytest.mark.parametrize("strategy", ["on_policy_sync", "off_policy_async"])
async def test_a_group_is_scored_as_a_whole_and_trained_by_the_sum(
    bench: Bench, group_rollouts: GroupRollouts, tiny_model: Path, strategy: str
) -> None:
    bench.config = replace(bench.config, rollout_strategy=strategy)
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(group_rollouts, group_rewards=True)
    assert (await bench.status()).state == "succeeded"
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    for batch in await bench.batches():
        for group in batch.groups:
            rewards = sorted(samples[sample_id].trained_reward or 0.0 for sample_id in group)
            assert rewards == pytest.approx([0.25, 0.25 + 1 / 6, 0.25 + 1 / 3, 0.75])
            assert {samples[sample_id].reward for sample_id in group} == {0.25}
    # Every sample has come to an end, those that scored groups and those that no batch had a place for included.
    trained = {sample_id for batch in await bench.batches() for sample_id in batch.sample_ids}
    for sample_id, sample in samples.items():
        if sample_id in trained:
            assert sample.state is SampleState.TRAINED
        else:
            expected = DropReason.GROUP_SCORE if sample_id.startswith("group-") else DropReason.SURPLUS
            assert (sample.state, sample.drop_reason) == (SampleState.DROPPED, expected)
    metrics = await bench.ports.metrics.read("run-1")
    # Curves show what a conversation is worth by itself, and only conversations are counted.
    assert all(metric.values["reward_mean"] == 0.25 for metric in metrics)
    assert sum(metric.values["num_generated"] for metric in metrics) <= len(samples) - len(group_rollouts.groups)


async def test_a_function_sees_whole_conversations_rewards_and_metrics(
    bench: Bench, group_rollouts: GroupRollouts
) -> None:
    await bench.train(group_rollouts, group_rewards=True, max_steps=1)
    group = group_rollouts.groups[0]
    assert [rollout.task.id for rollout in group] == ["t0_0", "t0_1", "t0_2", "t0_3"]
    rollout = group[0]
    assert (rollout.reward, rollout.metrics, rollout.task.metadata) == (0.25, {"turns": 2.0}, {"prompt": "go"})
    assert [len(turn.messages) for turn in rollout.turns] == [1, 3]
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "user", "assistant"]


async def test_without_the_parameter_nothing_is_scored(bench: Bench, group_rollouts: GroupRollouts) -> None:
    with pytest.raises(NoProgress, match="without a group whose rewards differ"):
        await bench.train(group_rollouts)
    assert group_rollouts.groups == []


async def test_a_trainer_that_comes_after_finds_what_the_groups_added(
    bench: Bench, group_rollouts: GroupRollouts, tiny_model: Path
) -> None:
    """It makes the recorded steps anew, and must come to the recorded weights."""
    await bench.train(group_rollouts, group_rewards=True, max_steps=2)
    shutil.rmtree(bench.folder)
    bench.trainer = Trainer(tiny_model, bench.config)
    await bench.train(group_rollouts, group_rewards=True, max_steps=3)
    batches = await bench.batches()
    assert [batch.step for batch in batches] == [1, 2, 3] and len({batch.digest for batch in batches}) == 3


async def test_samples_that_fail_and_groups_without_signal_are_replaced_as_ever(
    bench: Bench, group_rollouts: GroupRollouts
) -> None:
    def flat_for_t1(rollouts: Sequence[Rollout]) -> list[float]:
        return [0.5] * len(rollouts) if rollouts[0].task.id.startswith("t1_") else rank(rollouts)

    group_rollouts.environment = Scoring(reward(flat_for_t1, per="group"))
    group_rollouts.reward = lambda task, g: None if (task, g) in (("t0", 1), ("t2", 0)) else 0.0
    await bench.train(group_rollouts, group_rewards=True, max_steps=1)
    (batch,) = await bench.batches()
    assert batch.groups == (("t0_0", "t0_2", "t0_3", "t0_4"), ("t2_1", "t2_2", "t2_3", "t2_4"))
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    assert {samples[f"t1_{g}"].drop_reason for g in range(4)} == {DropReason.NO_SIGNAL}
    assert not [sample for sample in samples.values() if sample.state in (SampleState.REPORTED, SampleState.BATCHED)]


async def test_a_group_that_can_not_be_scored_is_asked_again_then_replaced_and_never_trained(
    bench: Bench, group_rollouts: GroupRollouts
) -> None:
    num_failures = 0

    def stumbles(rollouts: Sequence[Rollout]) -> list[float]:
        nonlocal num_failures
        if {place_of(rollout) for rollout in rollouts} == {0, 1, 2, 3} and rollouts[0].task.id.startswith("t0_"):
            num_failures += 1
            raise ZeroDivisionError("of t0")
        return rank(rollouts)

    group_rollouts.environment = Scoring(reward(stumbles, per="group"))
    await bench.train(group_rollouts, group_rewards=True, max_steps=1)
    samples = {sample.sample_id: sample for sample in await bench.samples()}
    assert num_failures == 3
    assert {samples[f"t0_{g}"].drop_reason for g in range(4)} == {DropReason.UNSCORED}
    (batch,) = await bench.batches()
    assert batch.groups[0] == ("t0_4", "t0_5", "t0_6", "t0_7")
    failed = [sample for sample in samples.values() if sample.state is SampleState.INVALID]
    assert len(failed) == 3 and {sample.reason for sample in failed} == {InvalidReason.REWARD_ERROR}
    assert "reward function stumbles raised ZeroDivisionError: of t0" in str(failed[0].detail)
    (metric,) = await bench.ports.metrics.read("run-1")
    assert (metric.values["num_invalid"], metric.values["dropped_unscored"]) == (0, 4)
    assert metric.values["invalid_share"] == 4 / metric.values["num_generated"]


async def test_groups_that_can_never_be_scored_stop_the_run_with_the_reason(
    bench: Bench, group_rollouts: GroupRollouts
) -> None:
    def broken(rollouts: Sequence[Rollout]) -> list[float]:
        return [1.0]

    group_rollouts.environment = Scoring(reward(broken, per="group"))
    with pytest.raises(NoProgress, match=r"more than half .* reward function broken: it must return a list"):
        await bench.train(group_rollouts, group_rewards=True)


class OtherRollouts(GroupRollouts):
    """A worker whose environment says what it likes."""

    metrics: dict[str, float]

    async def score(self, task: Task, group_id: str) -> str:
        sample_id = await super().score(task, group_id)
        sample = replace(self.ready.pop(), metrics=self.metrics)
        sample = replace(sample, report_digest=sample.expected_report_digest())
        await self.put(sample.key, sample)
        self.ready.append(sample)
        return sample_id


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"0": 1.0}, "its metrics are no values of 4 samples: 0"),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, "its metrics are no values of 4 samples: a, b, c, d"),
        ({"0": 1.0, "1": 1e300, "2": 0.0, "3": 0.0}, "its values are up to 1e+300"),
    ],
)
async def test_a_report_that_is_no_score_of_the_group_is_none(
    bench: Bench, tiny_model: Path, builders: Builders, metrics: dict[str, float], text: str
) -> None:
    rollouts = OtherRollouts(bench.ports, tiny_model, builders, lambda task, g: 0.25)
    rollouts.groups, rollouts.metrics = [], metrics
    with pytest.raises(NoProgress, match=f"more than half .* reward_error: {re.escape(text)}"):
        await bench.train(rollouts, group_rewards=True)


class StoppingRollouts(GroupRollouts):
    """Asks for the end when the second group is to be scored."""

    stop: asyncio.Event

    async def score(self, task: Task, group_id: str) -> str:
        if len(self.groups) == 1:
            self.stop.set()
        return await super().score(task, group_id)


async def test_a_run_that_is_stopped_leaves_nothing_open(bench: Bench, tiny_model: Path, builders: Builders) -> None:
    rollouts = StoppingRollouts(bench.ports, tiny_model, builders, lambda task, g: 0.25)
    rollouts.groups, rollouts.stop = [], bench.stop
    await bench.train(rollouts, group_rewards=True)
    assert (await bench.status()).state == "cancelled"
    open_states = (SampleState.REQUESTED, SampleState.LEASED, SampleState.REPORTED, SampleState.BATCHED)
    assert not [sample.sample_id for sample in await bench.samples() if sample.state in open_states]


def test_what_a_group_adds_is_protected_by_the_sample_s_digest(
    sample_of: Callable[..., SampleRecord], call_of: Callable[..., Call]
) -> None:
    sample = sample_of("t0_0", [call_of("t0_0", 0)], 0.5)
    scored = replace(sample, group_reward=0.25)
    assert (sample.trained_reward, scored.trained_reward) == (0.5, 0.75)
    assert scored.expected_report_digest() != sample.report_digest == sample.expected_report_digest()
    assert replace(scored, reward=None).trained_reward is None
