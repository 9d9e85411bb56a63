"""The decision to publish: the interval of a paired difference against published figures, and the three rules."""

from dataclasses import asdict
from typing import Any

import pytest

from turnmill.evaluation import wilson
from turnmill.pipeline.promotion import Pairs, decide, difference_interval, pair, worse_lines


def evaluations(both: float, gained: float, lost: float, neither: float) -> dict[str, dict[str, Any]]:
    """What Evaluate records of so many pairs."""
    num = both + gained + lost + neither
    found: dict[str, dict[str, Any]] = {}
    for name, solved in (("before", both + lost), ("after", both + gained)):
        low, high = wilson(solved / num, int(num))
        found[name] = {"solved": solved / num, "solved_low": low, "solved_high": high, "num_valid": int(num)}
    found["after"]["pairs"] = {"both": both, "gained": gained, "lost": lost, "neither": neither}
    return found


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Method 10 in table II of Newcombe (1998).
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((18, 12, 2, 18), 0.0562, 0.3290),
        # Worked out with decimal arithmetic of forty digits.
        ((14, 5, 0, 22), 0.0115, 0.2265),
        ((1, 1, 7, 12), -0.5069, -0.0256),
        ((20, 5, 5, 20), -0.1253, 0.1253),
        ((0, 0, 0, 50), -0.0714, 0.0714),
    ],
)
def test_the_interval_of_the_difference_is_the_published_one(
    table: tuple[int, int, int, int], low: float, high: float
) -> None:
    found = evaluations(*table)
    pairs = Pairs(**found["after"]["pairs"])
    found_interval = difference_interval(pairs, found["before"], found["after"])
    assert found_interval == pytest.approx((low, high), abs=5e-5)


def test_tasks_that_are_hard_for_both_make_the_interval_narrower() -> None:
    alike, unlike = evaluations(45, 10, 5, 40), evaluations(27.5, 27.5, 22.5, 22.5)
    widths = []
    for found in (alike, unlike):
        low, high = difference_interval(Pairs(**found["after"]["pairs"]), found["before"], found["after"])
        widths.append(high - low)
    assert widths[0] < 0.65 * widths[1]


def test_rollouts_of_one_task_are_paired_in_all_ways() -> None:
    assert pair({"a": (1, 1), "b": (0, 1)}, {"a": (0, 1), "b": (1, 1)}) == Pairs(both=0, lost=1, gained=1, neither=0)
    # Of 4 rollouts 1 and 3: 3 of 16 ways to pair them are both solved, and there are 4 pairs.
    assert pair({"a": (1, 4)}, {"a": (3, 4)}) == Pairs(both=0.75, lost=0.25, gained=2.25, neither=0.75)


@pytest.mark.parametrize(
    ("rule", "table", "is_published", "finding"),
    [
        ("not_worse", (10, 30, 2, 58), True, "better than its base"),
        ("not_worse", (10, 5, 5, 80), True, "not told apart from its base"),
        ("not_worse", (10, 2, 30, 58), False, "worse than its base"),
        ("better", (10, 30, 2, 58), True, "better than its base"),
        ("better", (10, 5, 5, 80), False, "not told apart from its base"),
        ("always", (10, 2, 30, 58), True, "worse than its base"),
    ],
)
def test_the_rule_decides_by_the_interval(
    rule: str, table: tuple[int, int, int, int], is_published: bool, finding: str
) -> None:
    promotion = decide(rule, evaluations(*table))
    assert (promotion.is_published, promotion.num_pairs) == (is_published, 100)
    assert promotion.reason.startswith(finding)
    assert promotion.difference == pytest.approx((table[1] - table[2]) / 100)
    assert f"{promotion.difference:+.3f} (95 % interval {promotion.low:+.3f} to {promotion.high:+.3f})" in (
        promotion.reason
    )


@pytest.mark.parametrize(("rule", "is_published"), [("not_worse", True), ("better", False), ("always", True)])
def test_without_held_out_tasks_only_a_model_that_must_be_better_is_held(rule: str, is_published: bool) -> None:
    promotion = decide(rule, {})
    assert (promotion.is_published, promotion.difference, promotion.low) == (is_published, None, None)
    assert promotion.reason.startswith("not evaluated: there are no held-out tasks")


def by_reward(value: float, low: float | None, high: float | None) -> dict[str, dict[str, Any]]:
    """What Evaluate records where the solved shares say nothing."""
    found = evaluations(10, 5, 5, 80)
    task = {"task_id": "t|1", "num_before": 4, "num_after": 4, "solved_before": 3, "solved_after": 0}
    found["after"]["comparison"] = {
        "reward": {"value": value, "low": low, "high": high},
        "num_better": 2,
        "num_same": 1,
        "num_worse": 30,
        "worse": [{**task, "reward_before": 0.75, "reward_after": 0.0}],
    }
    return found


@pytest.mark.parametrize(
    ("rule", "change", "is_published", "reason"),
    [
        ("not_worse", (-0.2, -0.3, -0.1), False, "worse than its base on held-out tasks by their mean reward: -0.200"),
        ("not_worse", (-0.2, -0.5, 0.1), True, "not told apart from its base"),
        ("better", (0.2, 0.1, 0.3), True, "better than its base"),
        ("better", (0.2, -0.1, 0.3), False, "not told apart from its base"),
        ("always", (-0.2, -0.3, -0.1), True, "worse than its base"),
    ],
)
def test_the_mean_reward_may_decide_in_the_place_of_what_was_solved(
    rule: str, change: tuple[float, float, float], is_published: bool, reason: str
) -> None:
    promotion = decide(rule, by_reward(*change), "reward")
    assert (promotion.metric, promotion.is_published) == ("reward", is_published)
    assert promotion.reason.startswith(reason)
    assert (promotion.difference, promotion.low, promotion.high) == change


def test_with_too_few_tasks_for_an_interval_nothing_is_shown_either_way() -> None:
    few = by_reward(-0.9, None, None)
    assert decide("not_worse", few, "reward").is_published and not decide("better", few, "reward").is_published
    told = decide("not_worse", few, "reward").reason
    assert told.endswith("-0.900 (too few tasks for a 95 % interval)") and told.startswith("not told apart")


def test_what_went_worse_is_told_task_by_task() -> None:
    promotion = decide("not_worse", by_reward(-0.2, -0.3, -0.1), "reward")
    assert (promotion.num_worse, promotion.num_better, len(promotion.worse)) == (30, 2, 1)
    assert worse_lines(asdict(promotion)) == [
        "30 held-out tasks went worse, 2 better:",
        "  task  solved before  after   mean reward before  after",
        "  t|1   3 of 4         0 of 4  0.750               0.000",
        "  and 29 more",
    ]
    assert worse_lines(asdict(decide("not_worse", evaluations(10, 30, 2, 58)))) == []
