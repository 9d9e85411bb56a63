"""Old rewards against new ones, on numbers worked out by hand."""

import math
from typing import Any

import pytest

from turnmill.evaluation.statistics import student_quantile
from turnmill.records import InvalidReason, Purpose, RolloutRequest, SampleRecord, SampleState
from turnmill.wiring.rescoring.comparison import (
    Comparison,
    Rescored,
    Verdict,
    compare,
    correlation,
    difference_interval,
)


def rescored(sample_id: str, old: float | None, new: float | None, group: str = "g", **changes: Any) -> Rescored:
    sample = SampleRecord(
        run_id="r",
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        task_id=sample_id.partition("_")[0],
        group_id=group,
        state=SampleState.TRAINED,
        created_at=0.0,
        deadline=0.0,
        reward=old,
        group_reward=changes.pop("old_group", None),
        request=RolloutRequest(
            sample_id=sample_id, timestamp="", max_length=10, rewards={"range": [0.0, 1.0]}, data={}
        ),
    )
    known: dict[str, Any] = {"sample": sample, "verdict": Verdict.RESCORED, "reward": new, **changes}
    return Rescored(**known)


def of(*items: Rescored, **sizes: int) -> Comparison:
    return compare(items, success_threshold=0.5, group_sizes=sizes)


def test_means_passes_and_changes_are_of_the_pairs_alone() -> None:
    found = of(
        rescored("a_0", 0.0, 1.0),
        rescored("a_1", 0.5, 0.5),
        rescored("b_0", 1.0, 0.25),
        rescored("b_1", None, 1.0),
        rescored("b_2", 1.0, None, verdict=Verdict.DIVERGED, turn=2),
        rescored("b_3", 1.0, None, verdict=Verdict.INVALID, reason=InvalidReason.REWARD_ERROR),
        rescored("b_4", 1.0, None, verdict=Verdict.INVALID, reason=InvalidReason.INFRA),
    )
    assert (found.num_played, found.num_rescored, found.num_diverged) == (7, 4, 1)
    assert found.invalid == {"reward_error": 1, "infra": 1} and found.num_repaired == 1
    assert (found.num_pairs, found.num_changed) == (3, 2)
    assert found.old_mean == 0.5 and found.new_mean == pytest.approx(1.75 / 3)
    assert found.difference == pytest.approx(0.25 / 3)
    assert (found.old_pass_rate, found.new_pass_rate) == pytest.approx((2 / 3, 2 / 3))
    assert list(found.most_changed) == ["a_0", "b_0"]
    assert [(task.task_id, task.num) for task in found.tasks] == [("a", 2), ("b", 1)]


def test_nothing_to_compare_has_no_figures() -> None:
    found = of(rescored("a_0", 1.0, None, verdict=Verdict.DIVERGED))
    figures = (found.old_mean, found.difference, found.low, found.correlation, found.old_pass_rate)
    assert figures == (None,) * 5 and found.num_pairs == 0


def test_like_meets_like_where_a_group_was_scored() -> None:
    whole = rescored("a_0", 0.5, 0.25, old_group=0.5, group_reward=0.25)
    assert (whole.old, whole.new, whole.change) == (1.0, 0.5, -0.5)
    # Its group was not scored anew: what it added then is left out.
    alone = rescored("a_0", 0.5, 0.25, old_group=0.5)
    assert (alone.old, alone.new, alone.change) == (0.5, 0.25, -0.25)


def test_only_groups_that_are_whole_tell_of_signal() -> None:
    found = of(
        *(rescored(f"a_{i}", 0.0, float(i), group="gains") for i in range(2)),
        *(rescored(f"b_{i}", float(i), 1.0, group="loses") for i in range(2)),
        *(rescored(f"c_{i}", float(i), float(1 - i), group="keeps") for i in range(2)),
        rescored("d_0", 0.0, 1.0, group="torn"),
        rescored("e_0", 0.0, 1.0, group="unknown"),
        gains=2,
        loses=2,
        keeps=2,
        torn=2,
    )
    signal = found.signal
    assert (signal.num, signal.old, signal.new, signal.gained, signal.lost) == (3, 2, 2, 1, 1)
    assert signal.num_incomplete == 1


def test_the_interval_is_of_means_by_task() -> None:
    # Three tasks, deviations from the mean 1: -1, 0, 1 and a second of the last task: 0.
    low, high = difference_interval([[0.0], [1.0], [2.0, 1.0]]) or (0.0, 0.0)
    reach = 4.30265 * math.sqrt(3 / 2 * (1 + 0 + 1)) / 4
    assert (low, high) == pytest.approx((1 - reach, 1 + reach), rel=1e-5)
    # Differences of one task stand for themselves; equal ones leave no doubt.
    assert difference_interval([[0.0, 2.0]]) == pytest.approx((1 - 12.7062, 1 + 12.7062), rel=1e-5)
    assert difference_interval([[0.5, 0.5], [0.5]]) == (0.5, 0.5)
    assert difference_interval([[0.5]]) is None and difference_interval([]) is None


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert student_quantile(degrees) == pytest.approx(value, rel=0.01 if 3 <= degrees < 10 else 1e-4)


def test_correlation_is_pearson_s_and_none_where_nothing_varies() -> None:
    assert correlation([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(1.0)
    assert correlation([0.0, 1.0, 2.0], [2.0, 1.0, 0.0]) == pytest.approx(-1.0)
    assert correlation([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]) == pytest.approx(0.0)
    assert correlation([1.0, 1.0], [0.0, 1.0]) is None and correlation([1.0], [0.0]) is None
