"""What counts as progress."""

from dataclasses import replace

from turnmill.health.progress import Fingerprint, ProgressClock

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
