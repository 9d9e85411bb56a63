"""The stages before the first process: control is killed in each, and the run is resumed to its end."""

from pathlib import Path

import pytest

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import PATIENCE_S, is_alive, start_resume, start_run, wait_for
from turnmill.pipeline.stages import STAGES
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import list_runs, look_at_run


@pytest.mark.parametrize(("point", "stage"), [("preflight-started", "Preflight"), ("infra-deployed", "DeployRunInfra")])
def test_a_run_whose_control_process_is_killed_in_a_stage_before_training_is_resumed(
    tmp_path: Path, point: str, stage: str
) -> None:
    armed = tmp_path / "failpoints" / point
    armed.parent.mkdir()
    armed.touch()
    with start_run(tmp_path, max_steps="1") as running:
        running.process.communicate(timeout=PATIENCE_S)
        assert running.process.returncode == -9 and not armed.exists()
    (run,) = run_loop(list_runs(tmp_path))
    assert [entry.name for entry in run.stages][-1] == stage and run.stages[-1].state == "running"
    with start_resume(tmp_path, run.run_id) as resumed:
        pid = wait_for("trainer", lambda: resumed.role_pid("trainer"), resumed.process)
        figures = resumed.finish()
    assert not is_alive(pid)
    assert (figures["run_id"], figures["status"], figures["steps"]) == (run.run_id, "succeeded", 1)
    check_accounting(tmp_path, figures)
    second = look_at_run(tmp_path, run.run_id).current_stages
    assert [(entry.state, entry.attempt) for entry in second] == [("done", 2)] * len(STAGES)
