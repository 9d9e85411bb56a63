"""Rewards per group over the whole path: played, held, scored by the worker, trained, from records that say so."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.house import CONFIG, open_house
from turnmill.conversation.history import read_calls
from turnmill.environment import Chat, Environment, Outcome, Rollout, opening_messages, reward
from turnmill.records import DropReason, Purpose, SampleState, Task


def shares_of_others(answers: Sequence[str]) -> list[float]:
    """For each answer: the share of the others that differ from it."""
    return [sum(other != answer for other in answers) / (len(answers) - 1) for answer in answers]


async def different(rollouts: Sequence[Rollout]) -> list[float]:
    return shares_of_others([rollout.turns[0].reply.content[0] for rollout in rollouts])


class Different(Environment):
    """Any word is worth nothing by itself; another first letter than the others have is."""

    rewards = (reward(different, per="group"),)

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete(opening_messages(task))
        return Outcome(reward=0.0)


@pytest.mark.slow
async def test_a_worker_scores_groups_and_the_trainer_trains_what_they_add(tmp_path: Path) -> None:
    config = replace(CONFIG, group_rewards=True)
    async with open_house(tmp_path, config=config, environment=Different()) as house:
        await house.train()
        samples = {sample.sample_id: sample for sample in await house.samples()}
        batches = await house.batches()
        assert len(batches) == 2
        for batch in batches:
            for group in batch.groups:
                answers = []
                for sample_id in group:
                    (call,) = await read_calls(house.ports.records, house.run.run_id, Purpose.TRAIN, sample_id)
                    answers.append(call.reply["content"][0])
                found = [samples[sample_id] for sample_id in group]
                assert [sample.group_reward for sample in found] == pytest.approx(shares_of_others(answers))
                assert {(sample.reward, sample.state) for sample in found} == {(0.0, SampleState.TRAINED)}
        scores = [sample for sample in samples.values() if sample.drop_reason is DropReason.GROUP_SCORE]
        assert len(scores) >= 4 and all(not sample.calls for sample in scores)
        assert not [sample for sample in samples.values() if sample.state in (SampleState.REPORTED, SampleState.LEASED)]
