"""A run whose environment is a package, as users start it: its code plays in a box, and ends that now and then."""

from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import read_records, start_run
from tests.unit.rollout.boxes import make_package
from turnmill.records import InvalidReason, SampleState

# The third sample of a task ends the process of all, each time that it is tried.
CRASHING = """
import os

from turnmill.environment.wordle import Wordle


class Crashing(Wordle):
    async def play(self, task, chat):
        outcome = await super().play(task, chat)
        if task.id.endswith("_2"):
            os._exit(1)
        return outcome


def load_environment():
    return Crashing()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_package_that_ends_its_box_again_and_again_costs_no_other_rollout(tmp_path: Path) -> None:
    make_package(tmp_path, "crashing", source=CRASHING)
    # Also where nothing can close a box.
    env = {"TURNMILL_UNSAFE_ENV": "1", "TURNMILL_ENV": "crashing"}
    with start_run(tmp_path, env=env, max_steps="2", worker_lease_s="1") as running:
        figures = running.finish(patience_s=280)

    assert figures["steps"] == 2
    check_accounting(tmp_path, figures)
    samples, _ = read_records(tmp_path, figures["run_id"])
    invalid = [sample for sample in samples if sample.state is SampleState.INVALID]
    assert invalid
    assert {(sample.reason, sample.sample_id.rpartition("_")[2]) for sample in invalid} == {
        (InvalidReason.ENV_ERROR, "2")
    }
