"""Off policy in real processes: two replicas, one of them slowed down, and a trainer that dies."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import Running, read_records, start_run, wait_for
from tests.e2e.test_evaluated_runs import arm, held_out, metrics_of, played
from tests.e2e.test_resume import POINTS
from turnmill.records import SampleState, Version
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import read_metrics

ASYNC: dict[str, Any] = {
    "rollout_strategy": "off_policy_async",
    "age_tolerance": "2",
    "max_steps": "6",
    "generation_replicas": "2",
    "max_concurrent_rollouts": "48",
    "baseline_rollouts": "0",
}


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process runs for a quarter of the time only."""
    is_over = threading.Event()

    def pulse() -> None:
        try:
            while not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                is_over.wait(0.3)
                os.kill(pid, signal.SIGCONT)
                is_over.wait(0.1)
        except ProcessLookupError:
            # It has ended, as the run did.
            return

    thread = threading.Thread(target=pulse, name="pulses")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def check_ages(running: Running, run_id: str) -> int:
    """Of what was trained, by the records of the calls' samples and by the metrics; the greatest."""
    samples, _ = read_records(running.root, run_id)
    ages = [
        sample.step - 1 - Version.parse(sample.versions[0]).n
        for sample in samples
        if sample.state is SampleState.TRAINED and sample.step is not None and sample.versions is not None
    ]
    metrics = run_loop(read_metrics(running.root, run_id))
    assert max(ages) == max(metric.values["staleness_max"] for metric in metrics) <= 2
    assert max(metric.values["audit_max"] for metric in metrics) < 1e-3
    return max(ages)


@pytest.mark.slow
def test_a_slowed_replica_makes_no_trained_token_too_old(tmp_path: Path) -> None:
    with start_run(tmp_path / "root", **ASYNC) as running:
        pid = wait_for("replica-1", lambda: running.role_pid("replica-1"), running.process)
        wait_for("the first step", running.num_steps, running.process)
        with slowed(pid):
            figures = running.finish()
        assert figures["steps"] == 6
        check_accounting(tmp_path / "root", figures)
        assert check_ages(running, figures["run_id"]) > 0
        check_steps(tmp_path / "root", figures)


@pytest.mark.slow
def test_the_bound_holds_after_the_trainer_was_killed(tmp_path: Path) -> None:
    with start_run(tmp_path / "root", **ASYNC) as running:
        wait_for("two steps", lambda: running.num_steps() >= 2, running.process)
        running.kill("trainer")
        figures = running.finish()
        assert figures["steps"] == 6
        check_accounting(tmp_path / "root", figures)
        check_ages(running, figures["run_id"])
        check_steps(tmp_path / "root", figures)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("points", [POINTS[:4], POINTS[4:8], POINTS[8:]], ids=lambda points: points[0])
def test_the_bound_holds_wherever_in_a_step_the_trainer_was_killed(tmp_path: Path, points: tuple[str, ...]) -> None:
    """Rollouts, the replicas' loading and the steps go on beside one another when it dies and when it is back."""
    with start_run(tmp_path, **{**ASYNC, "max_steps": "10", "save_steps": "1", "save_top_k": "2"}) as running:
        running.kill_trainer_at(points)
        figures = running.finish()
    assert (figures["status"], figures["steps"]) == ("succeeded", 10)
    check_accounting(tmp_path, figures)
    check_ages(running, figures["run_id"])
    check_steps(tmp_path, figures)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_conversations_of_an_adapter_that_outlive_their_workers_make_no_trained_token_too_old(tmp_path: Path) -> None:
    """A new attempt replays the calls of the one before, however long ago these were sampled."""
    changes = {"training_method": "RFT_MULTITURN_LORA", "lora_rank": "8", "lr": "5e-3", "max_concurrent_rollouts": "24"}
    with start_run(tmp_path, **{**ASYNC, **changes, "max_steps": "8"}) as running:
        for _ in range(4):
            running.wait_for_steps(running.num_steps() + 1)
            running.kill("worker-0")
        figures = running.finish()
    assert figures["steps"] == 8
    check_accounting(tmp_path, figures)
    check_ages(running, figures["run_id"])
    check_steps(tmp_path, figures)
    samples, _ = read_records(tmp_path, figures["run_id"])
    assert any(sample.attempt > 1 for sample in samples)
    metrics = run_loop(read_metrics(tmp_path, figures["run_id"]))
    assert sum(metric.values["num_generated"] for metric in metrics) == sum(
        sample.reward is not None for sample in samples
    ), "each rollout counts in one step"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_evaluations_beside_rollouts_are_of_one_version_each_although_a_replica_is_slow(tmp_path: Path) -> None:
    arm(tmp_path, "validation-played", "metric-written")
    changes = {"max_steps": "4", "val_every": "1", "val_rollouts": "16", "eval_rollouts": "16"}
    with start_run(tmp_path, eval_data=held_out(tmp_path), **{**ASYNC, **changes}) as running:
        pid = wait_for("replica-1", lambda: running.role_pid("replica-1"), running.process)
        with slowed(pid):
            figures = running.finish()
    assert not list((tmp_path / "failpoints").iterdir()), "the trainer was killed twice"
    check_accounting(tmp_path, figures)
    check_ages(running, figures["run_id"])
    check_steps(tmp_path, figures)
    metrics = metrics_of(tmp_path, figures["run_id"])
    assert [metrics[step].values["val_num_rollouts"] for step in range(5)] == [16.0] * 5
    assert [metrics[step].values["val_num_stale"] for step in range(5)] == [0.0] * 5
    for sample, calls in played(tmp_path, figures["run_id"]):
        version = sample.group_id.partition("/")[0].removeprefix("v")
        assert sample.state is SampleState.REPORTED and {call.version for call in calls} == {version}
