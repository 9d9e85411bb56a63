"""Rollouts that died with their worker, played once more while their run trains on: none is lost or trained twice."""

import json
from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.deployment import turnmill
from tests.e2e.processes import read_records, start_run, wait_for
from turnmill.records import DropReason, SampleState


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rollouts_that_died_with_their_worker_are_redriven_in_the_run_and_accounted_for(tmp_path: Path) -> None:
    with start_run(tmp_path, max_attempts="1", max_steps="3") as running:
        wait_for("a step", running.num_steps, running.process)
        running.kill("worker-0")

        def letters() -> list[str]:
            listed = turnmill(tmp_path, "dlq", "list", "--kind", "rollout", "--json")
            return [letter["letter_id"] for letter in json.loads(listed.stdout)] if listed.returncode == 0 else []

        wait_for("dead letters", letters, running.process)
        done = turnmill(tmp_path, "dlq", "redrive", "--all", "--kind", "rollout", "--json")
        assert done.returncode == 0, done.stderr
        redriven = {json.loads(line)["letter_id"].rpartition("/")[2] for line in done.stdout.splitlines()}
        figures = running.finish()
    check_accounting(tmp_path, figures)
    check_steps(tmp_path, figures)
    samples = {sample.sample_id: sample for sample in read_records(tmp_path, figures["run_id"])[0]}
    assert redriven
    for sample_id in redriven:
        sample = samples[sample_id]
        assert sample.redriven_after == 1
        # A late one may be in a batch, where its end had not been told before it was redriven.
        if sample.state is not SampleState.TRAINED:
            assert (sample.state, sample.drop_reason) in [
                (SampleState.DROPPED, DropReason.SURPLUS),
                (SampleState.DROPPED, DropReason.NO_SIGNAL),
            ]
    late = turnmill(tmp_path, "dlq", "redrive", "--all")
    assert late.returncode == 0 or "only while its run is active" in late.stderr
