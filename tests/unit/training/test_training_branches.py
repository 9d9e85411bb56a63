"""However a conversation branched: each sampled token is trained once, and weighs as much as any other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts
from turnmill.config import Config
from turnmill.errors import NoProgress
from turnmill.records import Call, DropReason, Purpose, SampleRecord, call_key, decode
from turnmill.training.samples import TrainingSample, rows_of, trained_ids, training_sample
from turnmill.training.trainer import Trainer

Calls = Callable[..., Call]
Samples = Callable[..., SampleRecord]
Trainers = Callable[[Config], Trainer]


@pytest.fixture
def trainer(trainer_of: Trainers, small_config: Config) -> Trainer:
    return trainer_of(small_config)


def choices_of(calls: Sequence[Call]) -> list[Call]:
    """The calls as the choices of one request."""
    return [
        structs.replace(call, choice=choice, num_choices=len(calls), digest="").sealed()
        for choice, call in enumerate(calls)
    ]


# ---------------------------------------------------------------- rows


def test_of_several_choices_the_one_that_was_gone_on_from_is_trained(call_of: Calls, sample_of: Samples) -> None:
    root = call_of("t_0", 0, prompt=[2, 4], sampled=[310])
    choices = choices_of([call_of("t_0", 1 + c, root, prompt=[3], sampled=[311 + c, 6]) for c in range(3)])
    last = call_of("t_0", 4, choices[1], prompt=[5], sampled=[320])
    calls = [root, *choices, last]
    (row,) = rows_of(sample_of("t_0", calls), calls)
    assert row.token_ids == [2, 4, 310, 3, 312, 6, 5, 320]
    assert row.loss_mask == [0, 0, 1, 0, 1, 1, 0, 1]
    assert trained_ids(calls) == {"t_0_0", "t_0_2", "t_0_4"}


def test_choices_that_nothing_follows_leave_what_is_before_them(call_of: Calls, sample_of: Samples) -> None:
    root = call_of("t_0", 0, prompt=[2, 4], sampled=[310])
    choices = choices_of([call_of("t_0", 1 + c, root, prompt=[3], sampled=[311 + c]) for c in range(2)])
    (row,) = rows_of(sample_of("t_0", [root, *choices]), [root, *choices])
    assert (row.token_ids, row.loss_mask) == ([2, 4, 310], [0, 0, 1])
    alone = choices_of([call_of("t_0", c) for c in range(2)])
    assert rows_of(sample_of("t_0", alone), alone) == []


def test_two_choices_that_were_gone_on_from_are_two_rows(call_of: Calls, sample_of: Samples) -> None:
    choices = choices_of([call_of("t_0", c, prompt=[2, 4], sampled=[310 + c]) for c in range(3)])
    lasts = [call_of("t_0", 3 + c, choices[c], prompt=[3], sampled=[320 + c]) for c in (0, 2)]
    calls = [*choices, *lasts]
    rows = rows_of(sample_of("t_0", calls), calls)
    assert [row.token_ids for row in rows] == [[2, 4, 310, 3, 320], [2, 4, 312, 3, 322]]
    assert [row.loss_mask for row in rows] == [[0, 0, 1, 0, 1]] * 2


# ---------------------------------------------------------------- weights


def sampled_by(trainer: Trainer, make: Calls, index: int, path: Sequence[Call], sampled: Sequence[int]) -> Call:
    """A call behind `path` with the log-probs that a plain forward pass gives to what it sampled."""
    prompt = [3, 20 + index] if path else [2, 300, 6, 4]
    before = [token for call in path for token in call.token_ids] + prompt
    with torch.no_grad():
        logits_tv = trainer.policy.model(input_ids=torch.tensor([[*before, *sampled]])).logits[0].double()
    log_p_tv = torch.log_softmax(logits_tv, dim=-1)
    logprobs = [float(log_p_tv[len(before) - 1 + t, token]) for t, token in enumerate(sampled)]
    return make("t_0", index, path[-1] if path else None, prompt=prompt, sampled=sampled, logprobs=logprobs)


def forked(trainer: Trainer, call_of: Calls) -> list[Call]:
    """Two tokens, behind which three branches have one token each: five to train in three rows."""
    root = sampled_by(trainer, call_of, 0, [], [310, 6])
    return [root, *(sampled_by(trainer, call_of, 1 + b, [root], [311 + b]) for b in range(3))]


def straight(trainer: Trainer, call_of: Calls, num_turns: int = 3) -> list[Call]:
    """One token a turn, in one row."""
    path: list[Call] = []
    for turn in range(num_turns):
        path.append(sampled_by(trainer, call_of, turn, path, [330 + turn]))
    return path


def test_a_token_weighs_the_same_in_a_sample_of_three_rows_as_in_one_of_one(
    trainer: Trainer, call_of: Calls, sample_of: Samples
) -> None:
    many, one = forked(trainer, call_of), straight(trainer, call_of)
    group = [
        training_sample(sample_of("t_0", many, reward=1.0), many),
        training_sample(sample_of("t_0", one, reward=0.0), one),
    ]
    assert [len(sample.rows) for sample in group] == [3, 1]
    # On policy every ratio is 1. Rewards 1 and 0: advantages +-0.5 / (0.70710678 + 0.0001) = +-0.70700680, one a
    # sample. Five tokens of the one and three of the other: -(5 - 3) * 0.70700680 / 8.
    result = trainer.step([group])
    assert (result.num_rows, result.num_tokens) == (4, 8)
    assert result.loss == pytest.approx(-0.17675170, abs=1e-6)


def test_the_gradient_of_a_forked_sample_is_that_of_its_calls_one_by_one(
    trainer_of: Trainers, small_config: Config, call_of: Calls, sample_of: Samples
) -> None:
    trainer = trainer_of(replace(small_config, grad_clip=1e9))
    many, one = forked(trainer, call_of), straight(trainer, call_of)
    model = AutoModelForCausalLM.from_pretrained(trainer.base_model, dtype=torch.float32)
    total = torch.zeros(())
    for calls, advantage in ((many, 0.70700680), (one, -0.70700680)):
        for call in calls:
            path = [call]
            while path[0].parent is not None:
                path.insert(0, next(item for item in calls if item.call_id == path[0].parent))
            ids = [token for item in path for token in item.token_ids]
            log_p_tv = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
            for t in range(len(ids) - call.num_sampled, len(ids)):
                total = total - advantage * log_p_tv[t - 1, ids[t]] / 8
    total.backward()  # type: ignore[no-untyped-call]
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    group = [
        training_sample(sample_of("t_0", many, reward=1.0), many),
        training_sample(sample_of("t_0", one, reward=0.0), one),
    ]
    lr = trainer.step([group]).lr
    for old, new, plain in zip(before, trainer.policy.parameters(), model.parameters(), strict=True):
        assert plain.grad is not None
        torch.testing.assert_close((old - new.detach()) / lr, plain.grad, rtol=1e-3, atol=2e-4)


def test_a_sample_of_which_nothing_is_trained_counts_in_the_advantages_of_its_group(
    trainer: Trainer, call_of: Calls, sample_of: Samples
) -> None:
    one = straight(trainer, call_of)
    unchosen = choices_of([call_of("t_1", c) for c in range(2)])
    group = [
        training_sample(sample_of("t_0", one, reward=1.0), one),
        training_sample(sample_of("t_1", unchosen, reward=0.0), unchosen),
        training_sample(sample_of("t_2", reward=0.0), []),
    ]
    assert [len(sample.rows) for sample in group] == [1, 0, 0]
    # Rewards 1, 0, 0: mean 1/3, standard deviation 0.57735027; the advantage of the first is 0.66666667 / 0.57745027.
    result = trainer.step([group])
    assert (result.num_rows, result.num_tokens) == (1, 3)
    assert result.loss == pytest.approx(-1.15449957, abs=1e-5)


def test_a_group_of_which_nothing_is_trained_changes_nothing(
    trainer: Trainer, call_of: Calls, sample_of: Samples
) -> None:
    def group_of(name: str, rewards: Sequence[float]) -> list[TrainingSample]:
        alone = choices_of([call_of(f"{name}_0", c) for c in range(2)])
        samples = [training_sample(sample_of(f"{name}_0", alone, reward=rewards[0]), alone)]
        return [*samples, training_sample(sample_of(f"{name}_1", reward=rewards[1]), [])]

    many, one = forked(trainer, call_of), straight(trainer, call_of)
    trained = [
        training_sample(sample_of("t_0", many, reward=1.0), many),
        training_sample(sample_of("t_0", one, reward=0.0), one),
    ]
    # As a part of its own, too.
    result = trainer.step([group_of("u", (1.0, 0.0)), trained, group_of("v", (0.0, 1.0))], parts=(1, 2))
    assert (result.num_rows, result.num_tokens) == (4, 8)
    assert result.loss == pytest.approx(-0.17675170, abs=1e-6)
    before = trainer.fingerprint()
    with pytest.raises(NoProgress, match=r"of several choices \(`n`\) only those that the conversation went on from"):
        trainer.step([group_of("u", (1.0, 0.0))])
    assert trainer.fingerprint() == before


# ---------------------------------------------------------------- versions


class Choosy(ScriptedRollouts):
    """At the end of each conversation two choices are asked for, which the first weights answer; none is used."""

    async def play(self, sample_id: str, group_id: str, reward: float | None) -> None:
        await super().play(sample_id, group_id, reward)
        keys = [call_key(RUN_ID, Purpose.TRAIN, sample_id, call_id) for call_id in self.ready.pop().calls]
        calls = [decode(stored.value, Call) for stored in await self.ports.records.get(keys) if stored is not None]
        choices = choices_of([self.call_of(sample_id, 2 + c, calls[-1], version="0.0") for c in range(2)])
        sample = self.sample_of(sample_id, [*calls, *choices], reward, group_id)
        for call in choices:
            await self.put(call.key, call)
        await self.put(sample.key, sample)
        self.ready.append(sample)


async def test_choices_that_are_not_trained_make_no_sample_stale(
    bench: Bench, tiny_model: Path, builders: Builders
) -> None:
    await bench.train(Choosy(bench.ports, tiny_model, builders, lambda _, g: float(g % 2)), max_steps=2)
    assert {sample.drop_reason for sample in await bench.samples()} <= {None, DropReason.SURPLUS}
    metrics = await bench.ports.metrics.read(RUN_ID)
    assert [metric.values["staleness"] for metric in metrics] == [0, 0]
    assert [metric.values["num_trained_tokens"] for metric in metrics] == [32, 32]
