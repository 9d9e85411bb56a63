"""Held-out evaluation against a scripted source of rollouts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.budget import Allowance
from turnmill.errors import BudgetExceeded, NoProgress
from turnmill.evaluation import BackgroundEvaluations, Evaluation, Progress, Ration, Terms, evaluate, wilson
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
