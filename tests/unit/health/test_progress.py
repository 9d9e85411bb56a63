"""What counts as progress."""

from dataclasses import replace

import pytest

from turnmill.health.progress import QUIET_S, Fingerprint, ProgressClock, stall_after

BEFORE = Fingerprint(stages=(("SubmitTraining", 1, "running", 0),), last_call=7, num_rewarded=3)


def test_the_clock_runs_until_something_was_achieved() -> None:
    clock = ProgressClock()
    assert clock.observe(100.0, BEFORE) == 0.0
    assert clock.observe(130.0, BEFORE) == 30.0
    assert clock.observe(140.0, replace(BEFORE, last_call=8)) == 0.0
    assert clock.observe(145.0, replace(BEFORE, last_call=8)) == 5.0


def test_each_kind_of_progress_counts() -> None:
    for change in (
        {"stages": ()},
        {"last_call": 8},
        {"num_rewarded": 4},
        {"batches": (1, 1)},
        {"num_training_writes": 1},
        {"served": (("replica-0", "1.1"),)},
    ):
        clock = ProgressClock()
        clock.observe(0.0, BEFORE)
        assert clock.observe(50.0, replace(BEFORE, **change)) == 0.0, change


def test_a_process_that_computes_alone_moves_however_long_it_takes() -> None:
    """A long model load or optimizer step writes nothing until it is done."""
    clock = ProgressClock()
    clock.observe(0.0, BEFORE)
    for now in range(10, 1000, 10):
        assert clock.observe(float(now), BEFORE, {"trainer": 42}) == 0.0
    assert clock.observe(1030.0, BEFORE, {}) == 40.0


def test_one_that_dies_and_computes_again_does_not() -> None:
    clock = ProgressClock()
    clock.observe(0.0, BEFORE)
    assert clock.observe(10.0, BEFORE, {"replica-0": 1}) == 0.0
    assert [clock.observe(10.0 + 10 * pid, BEFORE, {"replica-0": pid}) for pid in (2, 3, 4)] == [20.0, 30.0, 40.0]


@pytest.mark.parametrize("stage", ["Preflight", "StartGeneration", "Publish", None])
def test_a_stage_that_tells_nothing_until_it_is_done_may_be_silent_however_short_the_limit(stage: str | None) -> None:
    """A preflight plays for a minute and a half, which is no stall with deadlines of seconds."""
    assert stall_after(10.0, stage) == QUIET_S > 95.0
    assert stall_after(2400.0, stage) == 2400.0
    assert stall_after(10.0, "SubmitTraining") == stall_after(10.0, "Evaluate") == 10.0
