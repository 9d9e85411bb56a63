"""A run whose environment is a package, as users start it: its code plays in a box, and ends that now and then."""

from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import PATIENCE_S, read_records, start_run
from tests.unit.rollout.boxes import make_package
from turnmill.records import InvalidReason, SampleState

# The third sample of a task ends the process of all, each time that it is tried.
CRASHING = """
import os
from dataclasses import replace

from turnmill.environment.wordle import Wordle


class Crashing(Wordle):
    async def play(self, task, chat):
        outcome = await super().play(task, chat)
        if task.id.endswith("_2"):
            os._exit(1)
        return outcome

    async def score(self, task, messages):
        score = await super().score(task, messages)
        # Nearly every group has signal, so that few are played.
        return replace(score, reward=score.metrics["greens"] / 5, turn_rewards=())


def load_environment():
    return Crashing()
"""


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 20)
def test_a_package_that_ends_its_box_again_and_again_costs_no_other_rollout(tmp_path: Path) -> None:
    make_package(tmp_path, "crashing", source=CRASHING)
    # Also where nothing can close a box.
    env = {"TURNMILL_UNSAFE_ENV": "1", "TURNMILL_ENV": "crashing"}
    # Few groups: each has a sample that takes its box, and all that play in it, down three times.
    with start_run(tmp_path, env=env, global_batch_size="16", max_steps="2", worker_lease_s="1") as running:
        figures = running.finish()

    assert figures["steps"] == 2
    check_accounting(tmp_path, figures)
    samples, _ = read_records(tmp_path, figures["run_id"])
    invalid = [sample for sample in samples if sample.state is SampleState.INVALID]
    assert invalid
    assert {(sample.reason, sample.sample_id.rpartition("_")[2]) for sample in invalid} == {
        (InvalidReason.ENV_ERROR, "2")
    }
