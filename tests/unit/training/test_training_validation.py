"""Evaluations while a run trains: when, of which version, and what becomes of the training meanwhile."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.training.loop_bench import RUN_ID, Bench, Builders, ScriptedRollouts, first_of_four
from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.errors import Conflict, NoProgress, TurnmillError
from turnmill.records import BatchState, Metric, Version
from turnmill.training.trainer import Trainer


class ScriptedEvaluator:
    """Notes what is evaluated and what the run's records say then."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seen: list[tuple[int, str]] = []
        # Batches that are recorded while it plays.
        self.num_batches: list[int] = []
        # By step: what goes wrong.
        self.failures: dict[int, BaseException] = {}
        self.started = asyncio.Event()
        # Cleared: it does not end.
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def evaluate(self, step: int, version: Version) -> dict[str, float]:
        current = await self.bench.ports.weights.current()
        assert current is not None and current.version == version, "it is the one that is served"
        self.seen.append((step, str(version)))
        self.started.set()
        await self.may_end.wait()
        # Time in which a next step could be made, if nobody saw to it that none is.
        await asyncio.sleep(0.2)
        current = await self.bench.ports.weights.current()
        assert current is not None and current.version == version
        batches = await self.bench.batches()
        assert all(batch.state is BatchState.APPLIED for batch in batches)
        self.num_batches.append(len(batches))
        if (failure := self.failures.get(step)) is not None:
            raise failure
        return {"solved": step / 10, "reward_mean": 0.5}


@pytest.fixture
def evaluator(bench: Bench) -> ScriptedEvaluator:
    bench.evaluator = found = ScriptedEvaluator(bench)
    return found


async def metrics(bench: Bench) -> dict[int, Metric]:
    return {metric.step: metric for metric in await bench.ports.metrics.read(RUN_ID)}


async def test_the_base_and_every_few_steps_are_evaluated_with_no_step_meanwhile(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator
) -> None:
    await bench.train(rollouts, max_steps=5, val_every=2)
    assert evaluator.seen == [(0, "0.0"), (2, "1.2"), (4, "1.4")]
    assert evaluator.num_batches == [0, 2, 4]
    found = await metrics(bench)
    assert list(found) == [0, 1, 2, 3, 4, 5]
    solved = {step: metric.values.get("val_solved") for step, metric in found.items()}
    assert solved == {0: 0.0, 1: None, 2: 0.2, 3: None, 4: 0.4, 5: None}
    assert found[2].values["val_s"] >= 0.2 and found[2].values["reward_mean"] > 0
    assert set(found[0].values) == {"val_solved", "val_reward_mean", "val_s"}, "step 0 is no step"


async def test_without_held_out_tasks_or_without_the_parameter_nothing_is_evaluated(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, trainer_of: Callable[[Config], Trainer]
) -> None:
    await bench.train(rollouts, max_steps=2)
    bench.evaluator, bench.trainer = None, trainer_of(bench.config)
    await bench.train(rollouts, max_steps=3, val_every=1)
    assert evaluator.seen == []
    assert not [name for metric in (await metrics(bench)).values() for name in metric.values if name[:4] == "val_"]


async def test_the_steps_of_an_evaluated_run_are_those_of_one_that_is_not(
    bench: Bench,
    rollouts: ScriptedRollouts,
    evaluator: ScriptedEvaluator,
    tmp_path: Path,
    tiny_model: Path,
    builders: Builders,
) -> None:
    await bench.train(rollouts, val_every=1)
    assert len(evaluator.seen) == 4
    ports = open_run(tmp_path / "plain", RUN_ID, num_replicas=1)
    try:
        trainer = Trainer(tiny_model, bench.config)
        plain = Bench(ports, bench.config, bench.tasks, trainer, tmp_path / "plain" / "checkpoints")
        await plain.train(ScriptedRollouts(ports, tiny_model, builders, first_of_four))
        assert await plain.batches() == await bench.batches()
    finally:
        ports.close()


async def test_an_evaluation_that_fails_costs_its_figures_and_not_the_training(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator.failures = {0: NoProgress("all rollouts were invalid"), 2: TurnmillError("the environment hangs")}
    await bench.train(rollouts, max_steps=4, val_every=2)
    assert (await bench.status()).state == "succeeded"
    found = await metrics(bench)
    assert [found[step].values.get("val_failed") for step in range(5)] == [1.0, None, 1.0, None, None]
    assert found[4].values["val_solved"] == 0.4 and "val_solved" not in found[2].values
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the evaluation of step 2 failed, and training goes on: the environment hangs" in told


@pytest.mark.parametrize("failure", [Conflict("another trainer has the run"), RuntimeError("a defect")])
async def test_what_nothing_else_would_survive_either_ends_the_training(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, failure: Exception
) -> None:
    evaluator.failures = {2: failure}
    with pytest.raises(type(failure), match=str(failure)):
        await bench.train(rollouts, max_steps=4, val_every=2)
    assert (await bench.status()).state == "failed"


@pytest.mark.parametrize("step", [0, 2])
async def test_asked_to_stop_in_the_middle_of_an_evaluation_a_run_stops_at_once(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, step: int
) -> None:
    training = asyncio.create_task(bench.train(rollouts, max_steps=4, val_every=2))
    if step:
        await evaluator.started.wait()
        evaluator.started.clear()
        evaluator.may_end.clear()
    else:
        evaluator.may_end.clear()
    await evaluator.started.wait()
    bench.stop.set()
    await training
    status = await bench.status()
    assert (status.state, status.step) == ("cancelled", step)
    found = await metrics(bench)
    assert max(found, default=0) == step
    assert not any("val_solved" in metric.values for at, metric in found.items() if at == step)


async def test_a_trainer_that_died_in_the_middle_of_an_evaluation_is_followed_by_one_that_makes_up_for_it(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, trainer_of: Callable[[Config], Trainer]
) -> None:
    async def evaluated_to_death() -> None:
        training = asyncio.create_task(bench.train(rollouts, max_steps=4, val_every=2))
        await evaluator.started.wait()
        evaluator.started.clear()
        await evaluator.started.wait()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)

    await evaluated_to_death()
    assert max(await metrics(bench)) == 1, "the step is applied and not told"
    evaluator.may_end.set()
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=4, val_every=2)
    found = await metrics(bench)
    assert evaluator.seen == [(0, "0.0"), (2, "1.2"), (2, "1.2"), (4, "2.4")]
    assert found[2].values["val_solved"] == 0.2 and found[4].values["val_solved"] == 0.4
    assert [batch.step for batch in await bench.batches()] == [1, 2, 3, 4]
    status = await bench.status()
    assert (status.state, status.incarnation) == ("succeeded", 2)


async def test_older_weights_whose_steps_are_made_again_are_not_evaluated(
    bench: Bench, rollouts: ScriptedRollouts, evaluator: ScriptedEvaluator, trainer_of: Callable[[Config], Trainer]
) -> None:
    await bench.train(rollouts, max_steps=4, val_every=2, save_steps=100)
    for path in bench.folder.glob("step-*"):
        path.rename(bench.folder.parent / f"away-{path.name}")
    (bench.folder.parent / "root" / "runs" / RUN_ID / "metrics.jsonl").unlink()
    evaluator.seen.clear()
    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=4, val_every=2, save_steps=100)
    assert evaluator.seen == [(4, "1.4")], "those of step 2 are served no more"
    assert [step for step, metric in (await metrics(bench)).items() if "val_solved" in metric.values] == [4]
