"""A run that was begun by hand and came to nothing, done again in the foreground."""

import json
from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.deployment import turnmill
from tests.e2e.processes import PATIENCE_S, start_run, start_turnmill, wait_for


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cancelled_run_is_retried_in_the_foreground_as_a_run_of_its_own(tmp_path: Path) -> None:
    with start_run(tmp_path, max_steps="1000") as running:
        wait_for("a step", running.num_steps, running.process)
        assert running.folder is not None
        first = running.folder.name
        assert turnmill(tmp_path, "cancel", first).returncode == 0
        running.process.communicate(timeout=PATIENCE_S)
    command = ["retry", first, "--json", "--root", str(tmp_path), "--max-steps", "1"]
    with start_turnmill(tmp_path, command) as running:
        figures = running.finish()
    assert figures["run_id"] != first and figures["steps"] == 1
    check_accounting(tmp_path, figures)
    shown = turnmill(tmp_path, "status", figures["run_id"]).stdout
    assert f"retry of run {first}" in shown
    assert f"retried as run {figures['run_id']}" in turnmill(tmp_path, "status", first).stdout
    record = json.loads(turnmill(tmp_path, "status", figures["run_id"], "--json").stdout)
    assert (record["cause"], record["upload"]) == (f"retry/{first}/1", None)
