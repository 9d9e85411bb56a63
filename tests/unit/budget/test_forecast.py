"""What a run will take, against figures worked out by hand; and when it is refused for that."""

from dataclasses import replace
from typing import Any

import pytest

from turnmill.budget import Forecast, Pace, Rate, forecast, num_evaluated, pace_of, problems_of
from turnmill.config import Config
from turnmill.records import Metric, RunKind

PACE = Pace(num_steps=10, surplus=1.5, tokens_per_rollout=20.0, seconds_per_token=0.01)
RATE = Rate(usd_per_hour=36.0, text="36 USD/h")


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {"max_steps": 10, "global_batch_size": 16, "number_generation": 4}
    return Config(**{**values, **changes})


def of(pace: Pace | None, **changes: Any) -> Forecast:
    made = config(**changes)
    return forecast(made, rate=RATE, pace=pace, num_steps=made.max_steps, num_eval_rollouts=60)


def metric(**values: float) -> Metric:
    return Metric(run_id="r", step=1, time=1.0, values=values)


def test_the_pace_is_the_mean_over_all_steps_of_earlier_runs() -> None:
    steps = [
        metric(
            num_generated=24,
            num_trained=16,
            response_length_mean=10,
            generate_s=2.0,
            train_s=1.0,
            publish_s=0.5,
            wait_s=9,
        ),
        metric(num_generated=8, num_trained=16, response_length_mean=30, generate_s=1.0, train_s=0.3),
        # Nothing was trained in it.
        metric(num_generated=8, num_trained=0, response_length_mean=30, generate_s=1.0),
    ]
    # 32 rollouts, 32 trained, 24 * 10 + 8 * 30 = 480 tokens, 4.8 s.
    assert pace_of([({}, steps)]) == Pace(num_steps=2, surplus=1.0, tokens_per_rollout=15.0, seconds_per_token=0.01)
    assert pace_of([]) is None and pace_of([({}, steps[2:])]) is None


def test_what_went_on_at_the_same_time_counts_once() -> None:
    values = {"num_generated": 8, "num_trained": 8, "response_length_mean": 10, "generate_s": 2.0, "train_s": 1.0}
    apart, together = (pace_of([({}, [metric(**values, overlap_s=seconds)])]) for seconds in (0.0, 1.0))
    assert apart is not None and together is not None
    assert apart.seconds_per_token == pytest.approx(1.5 * together.seconds_per_token)


def test_a_measured_forecast_is_the_pace_times_the_rollouts() -> None:
    found = of(PACE)
    # 10 steps * 16 * 1.5 + 60 = 300 rollouts, 6,000 tokens, 60 s, and a minute around it.
    assert found.tokens.likely == 6000 and (found.tokens.low, found.tokens.high) == (3600, 10800)
    assert found.hours.likely == pytest.approx(120 / 3600)
    assert found.hours.low == pytest.approx(36 / 3600) and found.hours.high == pytest.approx(228 / 3600)
    assert found.usd.likely == pytest.approx(1.2) and found.usd.high == pytest.approx(2.28)
    assert found.is_measured and "10 steps of 16 rollouts, 60 rollouts of evaluations" in found.assumptions[0]
    assert "20 tokens a rollout" in found.assumptions[1] and "100 tokens a second" in found.assumptions[1]


def test_without_a_measurement_the_lengths_and_the_run_time_bound_it() -> None:
    found = of(None, max_length=160, max_new_tokens=8, max_refill_rounds=2, max_runtime_s=7200.0)
    # (160 * 1.5 + 60) rollouts of a quarter of 160 tokens; at least one token each; at most 3 * 160 + 60 full ones.
    assert found.tokens.likely == 12000 and (found.tokens.low, found.tokens.high) == (220, 86400)
    assert (found.hours.low, found.hours.likely, found.hours.high) == (0, None, 2)
    assert (found.usd.low, found.usd.likely, found.usd.high) == (0, None, 72)
    assert not found.is_measured and "nothing measured yet" in found.assumptions[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"budget_tokens": 5999}, "budget_tokens"),
        ({"budget_usd": 1.1}, "budget_usd"),
        ({"max_runtime_s": 110.0}, "max_runtime_s"),
    ],
)
def test_a_budget_below_the_likely_figure_is_not_enough(changes: dict[str, Any], name: str) -> None:
    made = config(**changes)
    (problem,) = problems_of(of(PACE, **changes), made, {name: "--it"}, 0.0, 0.0)
    assert problem.startswith(f"{name} = ") and "(--it) is not enough: the run will take about" in problem


def test_a_budget_of_the_likely_figure_is_enough_and_none_always_is() -> None:
    changes: dict[str, Any] = {"budget_tokens": 6000, "budget_usd": 1.2 + 1e-9, "max_runtime_s": 120.1}
    assert problems_of(of(PACE, **changes), config(**changes), {}, 0.0, 0.0) == []
    assert problems_of(of(PACE), config(), {}, 0.0, 0.0) == []


def test_on_a_guess_only_what_can_not_be_enough_is_refused() -> None:
    for limit, is_enough in ((219, False), (220, True)):
        found = problems_of(of(None, budget_tokens=limit), config(budget_tokens=limit), {}, 0.0, 0.0)
        assert (found == []) is is_enough
        assert is_enough or "will take at least 220 generated tokens" in found[0]


def test_the_runs_of_a_day_share_a_ceiling() -> None:
    assert problems_of(of(PACE), config(), {}, 8.7, 10.0) == []
    (problem,) = problems_of(of(PACE), config(), {}, 8.9, 10.0)
    assert "usd_per_day = 10" in problem and "8.90 USD" in problem and "1.20 USD" in problem


@pytest.mark.parametrize(
    ("changes", "num"),
    [
        # The baseline, and before and after.
        ({}, 64 + 300 + 300),
        # After 3, 6 and 9 of 10 steps, too; what is played before the first one counts for `before`.
        ({"val_every": 3}, 64 + 300 + 3 * 20 + 300),
        # The last of 2, 4, 6, 8, 10 counts for `after`.
        ({"val_every": 2}, 64 + 300 + 4 * 20 + 300),
        # Unless there are more of them.
        ({"val_every": 2, "val_rollouts": 400}, 64 + 400 + 4 * 400 + 400),
        ({"val_every": 3, "val_rollouts": 400}, 64 + 400 + 3 * 400 + 300),
        ({"val_every": 100, "baseline_rollouts": 0}, 300 + 300),
    ],
)
def test_evaluations_while_a_run_trains_are_counted_and_none_twice(changes: dict[str, Any], num: int) -> None:
    made = config(**{"val_rollouts": 20, **changes})
    assert num_evaluated(made, RunKind.TRAIN, num_eval_tasks=None) == num
    assert num_evaluated(made, RunKind.TRAIN, num_eval_tasks=10) == num
    assert num_evaluated(made, RunKind.TRAIN, num_eval_tasks=0) == made.baseline_rollouts
    assert num_evaluated(made, RunKind.EVAL, num_eval_tasks=None) == 300
    assert num_evaluated(made, RunKind.EVAL, num_eval_tasks=0) == 0


def test_each_held_out_task_is_counted_equally_often_and_once_where_the_likeliest_is_played() -> None:
    made = config(val_rollouts=20, val_every=5, baseline_rollouts=0)
    # 304 at each end, which is 38 passes over 8 tasks, and 24 after step 5.
    assert num_evaluated(made, RunKind.TRAIN, num_eval_tasks=8) == 304 + 24 + 304
    assert num_evaluated(made, RunKind.EVAL, num_eval_tasks=500) == 500
    greedy = replace(made, val_temperature=0.0)
    assert num_evaluated(greedy, RunKind.TRAIN, num_eval_tasks=8) == 3 * 8
    assert num_evaluated(greedy, RunKind.EVAL, num_eval_tasks=8) == 8
