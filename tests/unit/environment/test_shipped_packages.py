"""Packages of this repository, checked as a run checks them: in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnmill.intake.dataset import validate
from turnmill.records import CheckState, PreflightReport, decode

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("env_id", ["my-custom-env", "sql-agent"])
def test_a_shipped_package_is_found_loads_and_passes_each_check(env_id: str) -> None:
    data = REPOSITORY / "custom-environments" / env_id / "data" / "train.jsonl"
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("package_child.py")), env_id, str(data)],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    report = decode(ended.stdout.encode(), PreflightReport)
    assert report.failed == () and {check.state for check in report.checks} == {CheckState.OK}
    assert report.mean_rewards["gold"] == 1.0 and report.mean_rewards["garbage"] < 0.2


@pytest.mark.parametrize("env_id", ["my-custom-env", "sql-agent"])
def test_the_data_of_a_shipped_package_is_valid_and_held_out_rows_are_others(env_id: str) -> None:
    folder = REPOSITORY / "custom-environments" / env_id / "data"
    reports = [validate(folder / name) for name in ("train.jsonl", "eval.jsonl")]
    assert all(report.ok for report in reports)
    assert reports[0].num_rows >= 100 and reports[1].num_rows >= 50
    rows = [set((folder / name).read_text().splitlines()) for name in ("train.jsonl", "eval.jsonl")]
    assert not rows[0] & rows[1]
