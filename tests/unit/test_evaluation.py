"""Held-out evaluation against a scripted source of rollouts."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.budget import Allowance
from turnmill.errors import BudgetExceeded, NoProgress
from turnmill.evaluation import (
    BackgroundEvaluations,
    Evaluation,
    Progress,
    Ration,
    TaskResult,
    Terms,
    compare,
    evaluate,
    summarise,
    wilson,
)
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    InvalidReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Task,
    Version,
    token_count_key,
)


def terms(num_rollouts: int, *, name: str = "after", version: str = "1.3") -> Terms:
    return Terms(name=name, version=version, num_rollouts=num_rollouts, threshold=1.0, temperature=1.0)


TASKS = [Task(id=f"t{i}", metadata={"prompt": "p"}) for i in range(3)]


class ScriptedRollouts:
    """Ends each requested sample at once: with `reward_of(task, g)`, invalid where that is None."""

    def __init__(self, rewards: dict[str, list[float | None]]) -> None:
        self.rewards = rewards
        self.num_requested: dict[str, int] = {}
        self.waiting: list[SampleRecord] = []

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids = []
        for task, group_id in wanted:
            g = self.num_requested.get(task.id, 0)
            self.num_requested[task.id] = g + 1
            rewards = self.rewards[task.id]
            self.waiting.append(_sample(task.id, g, group_id, rewards[g % len(rewards)]))
            ids.append(f"{task.id}_{g}")
        return ids

    async def ended(self) -> list[SampleRecord]:
        ended, self.waiting = self.waiting, []
        return ended


def _sample(task_id: str, g: int, group_id: str, reward: float | None) -> SampleRecord:
    sample_id = f"{task_id}_{g}"
    return SampleRecord(
        run_id="r",
        purpose=Purpose.EVAL,
        sample_id=sample_id,
        task_id=task_id,
        group_id=group_id,
        state=SampleState.REPORTED if reward is not None else SampleState.INVALID,
        created_at=0.0,
        request=RolloutRequest(sample_id=sample_id, timestamp="", max_length=8, rewards={"range": [0, 1]}, data={}),
        deadline=1.0,
        reward=reward,
        metrics={"turns": 2.0 * (g + 1)} if reward is not None else {},
        reason=None if reward is not None else InvalidReason.ENV_ERROR,
        detail=None if reward is not None else "boom",
    )


async def test_every_task_is_played_equally_often_and_averaged() -> None:
    source = ScriptedRollouts({"t0": [1.0], "t1": [0.0], "t2": [1.0, 0.0]})
    result = await evaluate(TASKS, source, terms(5, name="after"))
    assert source.num_requested == {"t0": 2, "t1": 2, "t2": 2}
    assert (result.num_tasks, result.num_valid, result.num_invalid) == (3, 6, 0)
    assert result.solved == pytest.approx(0.5)
    assert result.reward_mean == pytest.approx(0.5)
    assert result.metrics == {"turns": pytest.approx(3.0)}
    assert [result.solved_low, result.solved_high] == pytest.approx([0.1876, 0.8124], abs=1e-4)


def test_the_interval_of_a_share_stays_within_its_range_and_has_width_at_its_ends() -> None:
    # Worked out by hand: z = 1.96, n = 10: 3.8416 / 13.8416 and its mirror image.
    assert list(wilson(0.0, 10)) == pytest.approx([0.0, 0.27754], abs=1e-5)
    assert list(wilson(1.0, 10)) == pytest.approx([0.72246, 1.0], abs=1e-5)


async def test_an_invalid_rollout_is_played_again_and_never_counts_as_zero() -> None:
    source = ScriptedRollouts({"t0": [None, 1.0, 1.0], "t1": [1.0], "t2": [1.0]})
    result = await evaluate(TASKS, source, terms(6, name="after"))
    assert (result.num_valid, result.num_invalid, result.solved) == (6, 1, 1.0)


async def test_an_evaluation_that_is_invalid_throughout_stops_with_the_reason() -> None:
    source = ScriptedRollouts({"t0": [None], "t1": [1.0], "t2": [1.0]})
    with pytest.raises(NoProgress, match=r"evaluation after: 4 rollouts were invalid.*env_error: boom"):
        await evaluate(TASKS, source, terms(3, name="after"))


async def test_a_background_evaluation_runs_once_and_is_polled_to_its_result_or_error() -> None:
    calls: list[str] = []

    async def play(name: str, path: Path, purpose: Purpose, version: Version, progress: Progress) -> Evaluation:
        calls.append(name)
        if name == "bad":
            raise NoProgress("stuck")
        source = ScriptedRollouts({"t0": [1.0], "t1": [1.0], "t2": [0.0]})
        return await evaluate(TASKS, source, terms(3, name=name), progress=progress)

    background = BackgroundEvaluations(play)
    for _ in range(2):
        await background.start("good", Path("x"))
        await background.start("bad", Path("x"))
    assert background.poll("good") is None and background.progress("good") == "0 of 0"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    result = background.poll("good")
    assert result is not None and result["num_valid"] == 3 and background.progress("good") == "3 of 3"
    solved = {task_id: (task["num_solved"], task["num_rollouts"]) for task_id, task in result["tasks"].items()}
    assert solved == {"t0": (1, 1), "t1": (1, 1), "t2": (0, 1)}
    with pytest.raises(NoProgress, match="stuck"):
        background.poll("bad")
    assert sorted(calls) == ["bad", "good"]
    # Whoever asks once more after an error wants another try: what ended it may have passed by.
    await background.start("bad", Path("x"))
    assert background.poll("bad") is None
    await asyncio.sleep(0)
    assert sorted(calls) == ["bad", "bad", "good"]
    await background.close()


class CountedRollouts(ScriptedRollouts):
    """Each rollout generates ten tokens, counted as soon as it is asked for."""

    def __init__(self, ports: RunPorts) -> None:
        super().__init__({task.id: [1.0, 0.0] for task in TASKS})
        self.ports = ports
        self.num_tokens = 0
        self.most_open = 0

    async def request(self, wanted: Sequence[tuple[Task, str]]) -> list[str]:
        ids = await super().request(wanted)
        self.most_open = max(self.most_open, len(self.waiting))
        self.num_tokens += 10 * len(ids)
        key = token_count_key("r", Purpose.EVAL, "replica-0")
        await self.ports.records.write([Write(key=key, value=str(self.num_tokens).encode(), expected=None)])
        return ids


@pytest.mark.parametrize("budget", [1, 39, 40, 41, 80, 199, 200])
async def test_an_evaluation_generates_no_more_than_one_batch_beyond_its_budget(tmp_path: Path, budget: int) -> None:
    ports = open_run(tmp_path, "r", num_replicas=1)
    source = CountedRollouts(ports)
    ration = Ration(allowance=Allowance(ports.records, "r", budget), batch_size=4)
    with pytest.raises(BudgetExceeded, match=r"evaluation after: \d+ of 24 rollouts were played"):
        await evaluate(TASKS, source, terms(24, name="after"), ration=ration)
    assert budget <= source.num_tokens < budget + 40 and source.most_open <= 4
    ports.close()


async def test_an_evaluation_that_uses_its_budget_up_with_its_last_rollouts_is_complete(tmp_path: Path) -> None:
    ports = open_run(tmp_path, "r", num_replicas=1)
    ration = Ration(allowance=Allowance(ports.records, "r", 201), batch_size=4)
    result = await evaluate(TASKS, CountedRollouts(ports), terms(24, name="after"), ration=ration)
    assert (result.num_valid, result.solved) == (24, 0.5)
    ports.close()


class Ledger:
    """Rollouts that were played before, and the weights of those that are played now."""

    def __init__(self, earlier: Sequence[SampleRecord] = (), *, mixed: Sequence[str] = ()) -> None:
        self.found = list(earlier)
        self.mixed = set(mixed)
        self.asked: list[tuple[str, str]] = []

    async def earlier(self, group_prefix: str, version: str) -> list[SampleRecord]:
        self.asked.append((group_prefix, version))
        return self.found

    async def is_whole(self, sample: SampleRecord, version: str) -> bool:
        return sample.sample_id not in self.mixed


async def test_what_was_played_before_of_the_same_weights_is_not_played_again() -> None:
    ledger = Ledger([_sample("t0", 7, "v1.3/t0", 1.0), _sample("t0", 8, "v1.3/t0", 1.0), _sample("t1", 9, "x", 0.0)])
    source = ScriptedRollouts({"t0": [0.0], "t1": [1.0], "t2": [1.0]})
    progress = Progress()
    result = await evaluate(TASKS, source, terms(6), history=ledger, progress=progress)
    assert ledger.asked == [("v1.3/", "1.3")]
    assert source.num_requested == {"t1": 1, "t2": 2}, "each task twice in all"
    assert {task_id: (one.num_solved, one.num_rollouts) for task_id, one in result.tasks.items()} == {
        "t0": (2, 2),
        "t1": (1, 2),
        "t2": (2, 2),
    }
    assert (progress.num_done, progress.num_wanted) == (6, 6)


async def test_of_more_rollouts_than_are_wanted_the_first_ones_count() -> None:
    ledger = Ledger([_sample("t0", g, "v1.3/t0", float(g == 0)) for g in range(5)])
    source = ScriptedRollouts({"t0": [0.0], "t1": [1.0], "t2": [1.0]})
    result = await evaluate(TASKS, source, terms(3), history=ledger)
    assert (result.tasks["t0"].num_solved, result.tasks["t0"].num_rollouts) == (1, 1)


async def test_a_rollout_that_other_weights_took_part_in_is_played_again_and_counted() -> None:
    source = ScriptedRollouts({"t0": [1.0, 0.0], "t1": [1.0], "t2": [1.0]})
    result = await evaluate(TASKS, source, terms(3), history=Ledger(mixed=["t0_0"]))
    assert (result.num_valid, result.num_stale, result.num_invalid) == (3, 1, 0)
    assert result.tasks["t0"].num_solved == 0


async def test_an_evaluation_whose_weights_always_change_ends_with_the_reason() -> None:
    source = ScriptedRollouts({"t0": [1.0], "t1": [1.0], "t2": [1.0]})
    with pytest.raises(NoProgress, match=r"invalid or of other weights, .*: had tokens of other weights"):
        await evaluate(TASKS, source, terms(3), history=Ledger(mixed=[f"t0_{g}" for g in range(9)]))


async def test_an_evaluation_tells_what_several_rollouts_of_a_task_are_worth() -> None:
    source = ScriptedRollouts({"t0": [1.0, 0.0, 0.0, 0.0], "t1": [1.0], "t2": [0.5]})
    result = await evaluate(TASKS, source, terms(12), history=None)
    assert list(result.pass_at) == list(result.pass_hat) == ["1", "2", "4"]
    assert result.pass_at["2"].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert result.pass_at["4"].value == pytest.approx(2 / 3)
    assert result.pass_hat["2"].value == pytest.approx(1 / 3)
    assert result.reward_mean == pytest.approx(1.75 / 3) and result.reward_low is None, "of three tasks no interval"
    assert result.tasks["t2"].reward_mean == 0.5


def test_tasks_are_compared_one_by_one_and_the_worst_come_first() -> None:
    def side(rewards: dict[str, list[float]]) -> dict[str, TaskResult]:
        samples = [_sample(name, g, "", reward) for name, found in rewards.items() for g, reward in enumerate(found)]
        return summarise(samples, terms(1)).tasks

    before = side({f"t{i}": [1.0, 1.0] for i in range(30)} | {"gone": [1.0]})
    changed = {f"t{i}": [1.0, 0.0] for i in range(25)} | {"t25": [0.0, 0.0], "t26": [0.9, 0.9]}
    found = compare(before, side({f"t{i}": [1.0, 1.0] for i in range(30)} | changed))
    assert (found.num_worse, found.num_same, found.num_better, len(found.worse)) == (27, 3, 0, 20)
    assert [change.task_id for change in found.worse[:3]] == ["t25", "t26", "t0"]
    assert found.reward.value == pytest.approx(-(25 * 0.5 + 1 + 0.1) / 30)
    by_reward = compare(before, side(changed), by="reward")
    assert [change.task_id for change in by_reward.worse[:2]] == ["t25", "t0"]
    assert by_reward.worse[0].gain("reward") == -1.0 and by_reward.worse[0].solved_before == 2


async def test_greedily_each_task_is_played_once_however_many_rollouts_are_wanted() -> None:
    """The same conversation a hundred times over is no evidence for anything."""
    source = ScriptedRollouts({"t0": [1.0], "t1": [0.0], "t2": [1.0]})
    result = await evaluate(TASKS, source, replace(terms(300), temperature=0.0))
    assert (result.num_valid, result.temperature, list(result.pass_at)) == (3, 0.0, ["1"])
