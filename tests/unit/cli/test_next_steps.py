"""What people are told to type next about a run that came to nothing."""

import pytest

from turnmill.cli.next_steps import next_step
from turnmill.records import ErrorClass, Run, RunStatus, StageRecord


def run(status: RunStatus, failed: ErrorClass | None = None, **changes: object) -> Run:
    stage = StageRecord(name="SubmitTraining", state="failed", started_at=1.0, ended_at=2.0, error_class=failed)
    values: dict[str, object] = {
        "run_id": "r1",
        "cause": "cli/x",
        "status": status,
        "created_at": 0.0,
        "config": {},
        "sources": {},
        "data_path": "tasks.jsonl",
        "stages": () if failed is None else (stage,),
    }
    return Run(**{**values, **changes})  # type: ignore[arg-type]


RESUME = "go on with it: turnmill resume r1 --root R"
RETRY = "once more with other parameters: turnmill retry r1 --NAME VALUE --root R"


@pytest.mark.parametrize(
    ("of", "num_steps", "text"),
    [
        (run(RunStatus.SUCCEEDED), 9, None),
        (run(RunStatus.ACTIVE), 9, None),
        (run(RunStatus.CANCELLED), 0, RESUME),
        (run(RunStatus.FAILED, ErrorClass.ROLE_FAILED), 0, RESUME),
        # A baseline that stopped the run would stop it again.
        (run(RunStatus.FAILED, ErrorClass.STAGE_FAILED), 0, RETRY),
        (run(RunStatus.FAILED, ErrorClass.STAGE_FAILED), 5, RESUME),
        # Their errors have the command.
        (run(RunStatus.FAILED, ErrorClass.BUDGET), 5, None),
        (run(RunStatus.FAILED, ErrorClass.INVALID_INPUT), 0, None),
        (run(RunStatus.FAILED, refused="lr is wrong"), 0, None),
        (run(RunStatus.FAILED, ErrorClass.ROLE_FAILED, retried_as="r2"), 0, None),
        (run(RunStatus.INTERRUPTED), 3, RESUME),
        (run(RunStatus.INTERRUPTED, upload="a.jsonl"), 3, "go on with it: turnmill up --root R"),
    ],
)
def test_what_is_suggested_can_help(of: Run, num_steps: int, text: str | None) -> None:
    assert next_step(of, num_steps=num_steps, at_root=" --root R") == text
