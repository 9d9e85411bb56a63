"""When a stage is slow, a role in a crash loop, and when dead letters grow: tables of what was seen."""

from itertools import pairwise
from typing import Any

import pytest

from turnmill.records import Metric
from turnmill.wiring.watching.checks.crash_loops import Restarts
from turnmill.wiring.watching.checks.dead_letters import GROWING_S, Growth
from turnmill.wiring.watching.checks.evaluations import failed_step
from turnmill.wiring.watching.checks.slow_stages import Evaluations, expected_evaluation_s, slow_training


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


# ---------------------------------------------------------------- evaluations while a run trains


def test_a_step_is_not_slow_for_the_evaluation_that_follows_it() -> None:
    # Every fifth step is evaluated for 300 s: the pace of the steps stays what it is.
    played = [300.0 if number % 5 == 0 else 0.0 for number in range(21)]
    times = [30.0]
    for own_s in played[1:]:
        times.append(times[-1] + 2.0 + own_s)
    told: dict[str, Any] = {
        "started_at": 0.0,
        "now": times[-1] + 1.0,
        "first_s": 600.0,
        "num_left": 10,
        "limit_s": 10_000.0,
    }
    assert slow_training(times, **told, evaluations=Evaluations(played_s=played)) is None
    # Those that are still to come take of the time that is left.
    much = slow_training(times, **told, evaluations=Evaluations(played_s=played, left_s=9000.0))
    assert much is not None and "10 steps are left at 2.0 s each" in much


def test_an_evaluation_that_is_due_may_take_its_time_and_no_more() -> None:
    times = ends(*[2.0] * 20)
    told: dict[str, Any] = {"started_at": 0.0, "first_s": 600.0, "num_left": 10, "limit_s": 100_000.0}
    due = Evaluations(due_s=1000.0)
    assert slow_training(times, now=times[-1] + 1599.0, **told, evaluations=due) is None
    late = slow_training(times, now=times[-1] + 1601.0, **told, evaluations=due)
    assert late is not None and "the step that is being made takes 1601 s" in late
    assert slow_training([], now=1599.0, **told, evaluations=due) is None
    first = slow_training([], now=1601.0, **told, evaluations=due)
    assert first == "no step within 1601 s; 1600 s are expected"


def test_of_evaluations_the_last_one_says_whether_they_fail() -> None:
    def at(step: int, **values: float) -> Metric:
        return Metric(run_id="r", step=step, time=1.0, values=values)

    assert failed_step([]) is None and failed_step([at(1, reward_mean=0.5)]) is None
    assert failed_step([at(0, val_failed=1.0), at(1, reward_mean=0.5)]) == 0
    assert failed_step([at(2, val_solved=0.5), at(4, val_failed=1.0), at(5, reward_mean=0.5)]) == 4
    assert failed_step([at(4, val_failed=1.0), at(6, val_solved=0.5)]) is None
