"""When a stage is slow, a role in a crash loop, and when dead letters grow: tables of what was seen."""

from itertools import pairwise

import pytest

from turnmill.records import Metric
from turnmill.wiring.watching.checks.crash_loops import Restarts
from turnmill.wiring.watching.checks.dead_letters import GROWING_S, Growth
from turnmill.wiring.watching.checks.slow_stages import expected_evaluation_s, slow_training


def ends(*durations: float, first: float = 30.0) -> list[float]:
    """When steps ended that took so long, after a first one that ended at `first`."""
    times = [first]
    for duration in durations:
        times.append(times[-1] + duration)
    return times


def slowness(times: list[float], *, wait: float = 1.0, is_open: bool = False, left: int = 1) -> str | None:
    now = (times[-1] if times else 0.0) + wait
    return slow_training(
        times, started_at=0.0, now=now, first_s=600.0, num_left=left, limit_s=10_000.0, is_open=is_open
    )


@pytest.mark.parametrize(
    ("times", "wait", "told"),
    [
        ([], 599.0, None),
        ([], 601.0, "no step within 601 s; 600 s are expected"),
        (ends(), 599.0, None),
        (ends(), 601.0, "the step that is being made takes 601 s"),
        (ends(*[2.0] * 20), 1.0, None),
        # A pause of a minute between steps of two seconds, once: an evaluation, a checkpoint.
        (ends(*[2.0] * 20, 60.0, 2.0), 1.0, None),
        # Slower by so little that nobody minds.
        (ends(*[1.0] * 20, *[5.0] * 5), 1.0, None),
        (ends(*[4.0] * 20, *[11.0] * 9), 1.0, None),
        (ends(*[4.0] * 20, *[13.0] * 2), 1.0, None),
        (ends(*[4.0] * 20, *[13.0] * 3), 1.0, "the last 5 steps took 13.0 s each, those before 4.0 s"),
        # Slow steps may take their time.
        (ends(*[300.0] * 6), 1000.0, None),
        (ends(*[300.0] * 6), 3001.0, "the step that is being made takes 3001 s"),
    ],
)
def test_training_is_slow_by_its_own_pace(times: list[float], wait: float, told: str | None) -> None:
    found = slowness(times, wait=wait)
    assert (found is None) if told is None else found is not None and told in found


def test_training_that_its_time_limit_would_end_is_told_of_while_there_is_time() -> None:
    times = ends(*[10.0] * 50)
    assert slowness(times, left=900) is None
    assert "950 steps are left at 10.0 s each" in str(slowness(times, left=950))
    assert slowness(times, left=0) is None


def test_an_open_slowness_does_not_come_and_go_at_its_limit() -> None:
    times = ends(*[4.0] * 20, *[11.0] * 9)
    assert slowness(times) is None and slowness(times, is_open=True) is not None
    assert slowness(ends(*[4.0] * 30), is_open=True) is None


def test_an_evaluation_is_expected_to_take_what_training_took_for_as_many_rollouts() -> None:
    metrics = [
        Metric(run_id="r", step=step, time=1.0, values={"num_generated": 100.0, "generate_s": 5.0}) for step in (1, 2)
    ]
    assert expected_evaluation_s(1000, metrics) == pytest.approx(60.0 + 3 * 1000 * 0.05)
    assert expected_evaluation_s(1000, []) is None


def test_three_restarts_in_two_minutes_are_a_crash_loop_that_ends_with_two_quiet_minutes() -> None:
    restarts = Restarts()
    seen = [(0.0, 0), (10.0, 1), (30.0, 2), (131.0, 3), (149.0, 4), (151.0, 4), (252.0, 4), (268.0, 4), (270.0, 4)]
    assert [restarts.is_loop(count, now) for now, count in seen] == [
        False,
        False,
        False,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    at_once = Restarts()
    assert at_once.is_loop(3, 1.0), "all between two looks"


def test_dead_letters_grow_while_they_become_more_and_for_ten_minutes() -> None:
    growth = Growth()
    seen: list[tuple[float, dict[str, int], list[str]]] = [
        (0.0, {"samples": 7, "queue a": 0}, []),
        (2.0, {"samples": 7, "queue a": 1}, ["queue a"]),
        (4.0, {"samples": 8, "queue a": 1}, ["queue a", "samples"]),
        (2.0 + GROWING_S + 1, {"samples": 8, "queue a": 1}, ["samples"]),
        (4.0 + GROWING_S + 1, {"samples": 8, "queue a": 1}, []),
        (2000.0, {"samples": 9, "queue a": 0}, ["samples"]),
        # Redriven or purged: it is over at once.
        (2002.0, {"samples": 0, "queue a": 0}, []),
    ]
    assert all(before[0] < after[0] for before, after in pairwise(seen))
    for now, counts, growing in seen:
        assert growth.growing(counts, now) == growing, now
