"""The doctor names the part at fault in twelve induced stalls: real runs in real processes, each with one harm done."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.control_plane.stalls import STALLS, Stall, doctor, hang_environment, place_of, started, suffer
from tests.e2e.processes import PATIENCE_S, start_run, wait_for
from tests.faults import disk

Record = Callable[[str, object], None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="roles are found in /proc"),
]


def test_there_are_twelve_stalls() -> None:
    assert len({stall.name for stall in STALLS}) == 12


# Both harms of a role look alike to the doctor; the short series has one of each.
LONG = ("SIGSTOP of worker-0", "SIGSTOP of replica-0", "SIGSTOP of control", "SIGKILL of trainer")


@pytest.mark.parametrize(
    "stall",
    [
        pytest.param(stall, id=stall.name.replace(" ", "-"), marks=[pytest.mark.long] if stall.name in LONG else [])
        for stall in STALLS
    ],
)
def test_the_doctor_and_the_watchdog_name_the_part_that_halts_a_run(
    tmp_path: Path, stall: Stall, record_property: Record
) -> None:
    """Defect 25: a backlog and a stall raise no alarm."""
    if stall.role == "disk" and (why := disk.why_not()) is not None:
        pytest.skip(why)
    with place_of(stall, tmp_path) as root:
        outcome = suffer(stall, root)
    record_property("figure", outcome.line())


def test_a_run_that_stays_stalled_ends_as_failed_with_the_diagnosis_and_without_leftovers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with ExitStack() as stack:
        running = stack.enter_context(started(root))
        wait_for("a step", lambda: running.num_steps() >= 1, running.process)
        hang_environment(running, stack)
        _, err = running.process.communicate(timeout=PATIENCE_S)
        assert running.process.returncode == 1
        assert "no progress for" in err and "the environment hangs" in err and "Traceback" not in err
        assert running.children() == []
    assert running.folder is not None
    code, report = doctor(root, running.folder.name)
    assert (code, report["verdict"], report["role"]) == (1, "ended badly", "environment")


def test_a_run_that_has_succeeded_is_healthy(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with start_run(root, max_steps="1") as running:
        figures = running.finish()
    code, report = doctor(root, figures["run_id"])
    assert (code, report["verdict"], report["diagnoses"]) == (0, "ended as it should", [])
