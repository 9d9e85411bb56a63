"""What the terminal shows."""

from pathlib import Path

import pytest
from rich.console import Console

from turnmill.cli import render
from turnmill.records import Metric, Run, RunKind, RunStatus, StageRecord


def metric(step: int, reward: float, time: float) -> Metric:
    return Metric(run_id="r", step=step, time=time, values={"reward_mean": reward, "num_generated": 64.0})


def run(**changes: object) -> Run:
    values: dict[str, object] = {
        "run_id": "r1",
        "cause": "cli/x",
        "status": RunStatus.ACTIVE,
        "created_at": 0.0,
        "config": {"max_steps": 20, "seed": 3},
        "sources": {"max_steps": "--max-steps"},
        "data_path": "tasks.jsonl",
    }
    return Run(**{**values, **changes})  # type: ignore[arg-type]


def test_a_sparkline_has_one_bar_a_bucket_on_a_scale_that_holds_all_values() -> None:
    assert render.sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert render.sparkline([0.0] * 50 + [1.0] * 50, width=2) == "▁█"
    assert render.sparkline([]) == ""
    assert render.sparkline([-1.0, 9.0]) == "▁█"
    assert render.sparkline([0.0, 5.0, 10.0]) == "▁▅█"


@pytest.mark.parametrize(("seconds", "text"), [(3.2, "3 s"), (185, "3 min 5 s"), (7440, "2 h 4 min")])
def test_durations_read_like_text(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_the_time_left_follows_the_pace_of_the_last_ten_steps() -> None:
    metrics = [metric(i, 0.1, 100.0 * i) for i in range(1, 5)] + [metric(i, 0.1, 400.0 + i) for i in range(5, 16)]
    assert render.eta_s(metrics, 20) == pytest.approx(5.0)
    assert render.eta_s(metrics[:1], 20) is None


def test_the_summary_quotes_first_and_last_ten_rewards_and_both_evaluations() -> None:
    stages = (
        StageRecord(
            name="SubmitTraining",
            state="done",
            started_at=10.0,
            ended_at=52.0,
            result={"checkpoint": "/c", "steps": 12},
        ),
        StageRecord(
            name="Evaluate",
            state="done",
            started_at=52.0,
            ended_at=60.0,
            result={"before": {"solved": 0.03}, "after": {"solved": 0.5}},
        ),
    )
    figures = render.summary(
        run(status=RunStatus.SUCCEEDED, stages=stages), [metric(i, i / 100, float(i)) for i in range(1, 13)]
    )
    assert figures["reward_first"] == pytest.approx(0.01)
    assert figures["reward_last10"] == pytest.approx(0.075)
    assert (figures["eval_before"], figures["eval_after"], figures["train_s"]) == (0.03, 0.5, 42.0)
    assert (figures["steps"], figures["num_generated"], figures["checkpoint"]) == (12, 768, "/c")


def test_a_stage_whose_end_nobody_saw_has_no_duration() -> None:
    stages = (StageRecord(name="SubmitTraining", state="running", started_at=0.0),)
    interrupted = run(status=RunStatus.INTERRUPTED, stages=stages)
    assert render.stages_text(interrupted).plain == "SubmitTraining"
    assert render.summary(interrupted, [])["train_s"] is None
    assert render.stages_text(run(stages=stages)).plain.startswith("SubmitTraining ")


def test_the_summary_of_a_run_that_never_trained_has_no_figures() -> None:
    figures = render.summary(run(status=RunStatus.FAILED, error="bad data"), [])
    assert figures["reward_first"] is None and figures["train_s"] is None and figures["error"] == "bad data"


def test_the_view_names_the_run_its_stages_and_its_curve() -> None:
    console = Console(width=100)
    stages = (StageRecord(name="ValidateData", state="done", started_at=0.0, ended_at=2.0),)
    with console.capture() as capture:
        console.print(render.live_view(run(stages=stages), [metric(1, 0.0, 1.0), metric(2, 1.0, 2.0)]))
        console.print(render.parameters_table(run()))
        console.print(render.defaults_text(run()))
    text = capture.get()
    for part in ("r1", "ValidateData 2 s", "step 2/20", "▁█", "--max-steps", "defaults: seed=3"):
        assert part in text


def test_the_start_names_the_recipe_and_what_was_set_with_its_source() -> None:
    order = run(
        config={"base_model": "wordle-tiny", "lr": 0.001, "max_steps": 5, "shuffle": True, "seed": 0},
        sources={"base_model": "default", "lr": "recipe.toml", "max_steps": "--max-steps", "shuffle": "run.toml"},
    )
    assert render.origin(order, Path("root/runs/r1")).plain.splitlines() == [
        "run r1 in root/runs/r1",
        "model wordle-tiny",
        "its recipe.toml: lr=0.001",
        "set for this run: max_steps=5 (--max-steps), shuffle=true (run.toml)",
    ]


def test_the_start_of_an_evaluation_leaves_out_what_the_recipe_says_about_training() -> None:
    order = run(
        kind=RunKind.EVAL,
        config={"base_model": "/m", "lr": 0.001, "max_length": 160},
        sources={"base_model": "--base-model", "lr": "recipe.toml", "max_length": "recipe.toml"},
    )
    assert render.origin(order, Path("r1")).plain.splitlines()[1:] == ["model /m", "its recipe.toml: max_length=160"]


def test_the_result_counts_the_steps_that_its_mean_is_over() -> None:
    lines = render.result_lines(run(), [metric(i, i / 10, float(i)) for i in range(1, 4)])
    assert lines == ["reward 0.100 at the first step, 0.200 over the last 3 of 3 (0 s, 192 rollouts)"]
    assert render.result_lines(run(), []) == []


def test_the_curve_table_names_ranges_of_steps_and_single_ones() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render.curve_table([metric(i, 0.5, float(i)) for i in range(1, 4)], rows=2))
    rows = [line.split()[0] for line in capture.get().splitlines() if "0.500" in line]
    assert rows == ["1–2", "3"]


def test_the_baseline_is_a_picture_of_tasks_by_their_pass_rate() -> None:
    figures = {
        "verdict": "signal",
        "is_ignored": False,
        "num_passed": 9,
        "num_rollouts": 64,
        "pass_rate": 9 / 64,
        "low": 0.076,
        "high": 0.246,
        "reward_mean": 0.2,
        "num_tasks": 16,
        "histogram": {"0": 10, "0-25": 5, "25-50": 0, "50-75": 0, "75-100": 0, "100": 1},
    }
    assert render.baseline_lines(figures) == [
        "baseline: 9 of 64 rollouts of the base model pass, 0.141 (95 % interval 0.076 to 0.246); mean reward 0.200",
        "16 tasks by how many of theirs pass:",
        "      none  ██████████████████████████████ 10",
        "    0–25 %  ███████████████ 5",
        "   25–50 %  0",
        "   50–75 %  0",
        "  75–100 %  0",
        "       all  ███ 1",
    ]
    too_hard = {**figures, "verdict": "too_hard"}
    assert "pass (too hard), " in render.baseline_lines(too_hard)[0]
    assert "pass (too hard, ignored), " in render.baseline_lines({**too_hard, "is_ignored": True})[0]


def test_a_run_says_where_its_model_is_published_or_why_it_is_not() -> None:
    def lines(**result: object) -> list[str]:
        stage = StageRecord(name="Publish", state="done", started_at=0.0, ended_at=1.0, result=result)
        return render.promotion_lines(run(stages=(stage,)))

    promotion = {"rule": "not_worse", "is_published": True, "reason": "better than its base"}
    assert lines(promotion=promotion, location="/srv/turnmill/bucket/models/r1/1.2") == [
        "published: /srv/turnmill/bucket/models/r1/1.2 (not_worse: better than its base)"
    ]
    (held,) = lines(promotion={**promotion, "is_published": False, "reason": "worse than its base"}, location=None)
    assert held.startswith("not published (not_worse: worse than its base); the checkpoint stays")
    assert render.promotion_lines(run()) == []


def test_the_line_of_an_evaluated_step_tells_what_was_found() -> None:
    found = {"val_solved": 0.25, "val_solved_low": 0.2, "val_solved_high": 0.31}
    one = Metric(run_id="r", step=2, time=1.0, values={"reward_mean": 0.5, "solved": 0.4, **found})
    assert "solved 0.400  held-out 0.250 (0.200 to 0.310)" in render.step_line(one, 20)
    failed = Metric(run_id="r", step=2, time=1.0, values={"reward_mean": 0.5, "val_failed": 1.0})
    assert "held-out failed" in render.step_line(failed, 20)
    assert "held-out" not in render.step_line(metric(2, 0.5, 1.0), 20)
    assert render.held_out_curve([metric(1, 0.5, 1.0), failed]) is None
    later = Metric(run_id="r", step=4, time=2.0, values={**found, "val_solved": 0.5})
    curve = render.held_out_curve([one, metric(3, 0.5, 1.5), later])
    assert curve is not None and "0.250 → 0.500 (0.200 to 0.310) at steps 2 to 4" in curve.plain


def test_the_age_of_what_a_step_trained_is_told_where_something_was_older() -> None:
    values = {"reward_mean": 0.5, "solved": 0.4, "staleness_mean": 0.75, "staleness_max": 2.0}
    one = Metric(run_id="r", step=2, time=1.0, values=values)
    assert "solved 0.400  age 0.8 (most 2)  " in render.step_line(one, 20)
    on_policy = Metric(run_id="r", step=2, time=1.0, values={**values, "staleness_max": 0.0})
    assert "age" not in render.step_line(on_policy, 20)


def test_a_model_that_is_held_back_is_shown_with_the_tasks_that_went_worse() -> None:
    task = {"task_id": "t7", "num_before": 4, "num_after": 4, "solved_before": 4, "solved_after": 0}
    promotion = {
        "rule": "not_worse",
        "is_published": False,
        "reason": "worse than its base",
        "num_worse": 1,
        "num_better": 0,
        "worse": [{**task, "reward_before": 1.0, "reward_after": 0.0}],
    }
    stage = StageRecord(name="Publish", state="done", started_at=1.0, result={"promotion": promotion, "location": None})
    lines = render.promotion_lines(run(stages=(stage,)))
    assert lines[0].startswith("not published (not_worse: worse than its base)")
    assert lines[1] == "1 held-out tasks went worse, 0 better:" and "t7" in lines[3] and "4 of 4" in lines[3]
