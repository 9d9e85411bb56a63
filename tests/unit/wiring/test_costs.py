"""Who may begin, by ceilings, forecast and the day's dollars; who may go on; and what `turnmill cost` prints."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turnmill import assets
from turnmill.alerts import new_alert
from turnmill.backends.embedded import open_root_records, open_run
from turnmill.cli.commands import turnmill
from turnmill.config import Config, Resolved, from_dict, to_dict
from turnmill.errors import BudgetExceeded, BudgetUsedUp, ConfigError, InvalidInput
from turnmill.ports import Write
from turnmill.records import (
    Alert,
    AlertKind,
    Metric,
    Purpose,
    Run,
    RunClock,
    RunStatus,
    StageRecord,
    TrainingStatus,
    encode,
    token_count_key,
    training_key,
)
from turnmill.wiring.reading.costs import admission, admitted, cost_of, costs_of_all, used_up_by, within_day
from turnmill.wiring.watching.alarms import run_failed


def run(
    run_id: str = "new", *, status: RunStatus = RunStatus.ACTIVE, flags: tuple[str, ...] = (), **changes: Any
) -> Run:
    """A run whose `flags` were set on the command line."""
    config = to_dict(
        Config(**{"max_steps": 10, "global_batch_size": 16, "number_generation": 4, "baseline_rollouts": 0, **changes})
    )
    return Run(
        run_id=run_id,
        cause="test",
        status=status,
        created_at=time.time(),
        config=config,
        sources={name: f"--{name}" if name in flags else "default" for name in config},
        data_path=str(assets.wordle_data("train")),
        stages=(StageRecord(name="ValidateData", state="done", started_at=1.0, ended_at=2.0),),
    )


async def store(root: Path, made: Run, *, seconds: float = 0.0, tokens: int = 0, steps: int = 0) -> None:
    """Put a run there that has used so much, with the metrics of its steps: 20 tokens a rollout, 10 s a step."""
    runs, ports = open_root_records(root), open_run(root, made.run_id, num_replicas=0)
    clock = RunClock(run_id=made.run_id, attempt=1, began_at=1.0, seconds=seconds)
    counter = token_count_key(made.run_id, Purpose.TRAIN, "replica-0")
    await runs.write([Write(key=made.key, value=encode(made), expected=None)])
    await ports.records.write(
        [
            Write(key=clock.key, value=encode(clock), expected=None),
            Write(key=counter, value=str(tokens).encode(), expected=None),
        ]
    )
    values = {"num_generated": 24.0, "num_trained": 16.0, "response_length_mean": 20.0, "generate_s": 10.0}
    for step in range(1, steps + 1):
        await ports.metrics.write(Metric(run_id=made.run_id, step=step, time=1.0, values=values))
    ports.close()
    runs.close()


async def test_a_run_begins_with_its_forecast_and_within_the_ceilings(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\ngenerated_tokens = 5000\n")
    found = await admitted(tmp_path, run())
    assert (found.config["budget_tokens"], found.sources["budget_tokens"]) == (5000, "turnmill.toml")
    assert found.forecast is not None and found.forecast["is_measured"] is False
    with pytest.raises(ConfigError, match=r"budget_tokens = 5001 \(--budget_tokens\) is more than"):
        await admitted(tmp_path, run(budget_tokens=5001, flags=("budget_tokens",)))


async def test_a_forecast_is_made_from_runs_of_the_same_model_and_environment_alone(tmp_path: Path) -> None:
    await store(tmp_path, run("other", status=RunStatus.FAILED, env_args={"max_turns": 2}), steps=3)
    assert (await admitted(tmp_path, run())).forecast["is_measured"] is False  # type: ignore[index]
    await store(tmp_path, run("like", status=RunStatus.FAILED, lr=1e-3), steps=3)
    found = (await admitted(tmp_path, run())).forecast
    assert found is not None and found["is_measured"]
    # 10 steps of 16 x 1.5 rollouts of 20 tokens; 10 s a step and a minute.
    assert found["tokens"]["likely"] == 4800 and found["hours"]["likely"] == pytest.approx(160 / 3600)
    with pytest.raises(InvalidInput, match=r"budget_tokens = 4799 .* will take about 4,800 generated tokens"):
        await admitted(tmp_path, run(budget_tokens=4799))
    assert (await admitted(tmp_path, run(budget_tokens=4800))).forecast == found


async def test_an_earlier_run_whose_files_are_damaged_keeps_no_other_from_beginning(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\nusd_per_day = 1000\n")
    await store(tmp_path, run("good", status=RunStatus.SUCCEEDED), steps=5)
    for name in ("no-metrics", "no-records"):
        await store(tmp_path, run(name, status=RunStatus.SUCCEEDED), steps=5)
    folder = tmp_path / "runs"
    (folder / "no-metrics" / "metrics.jsonl").unlink()
    (folder / "no-metrics" / "metrics.jsonl").mkdir()
    for file in (folder / "no-records" / "records").iterdir():
        file.write_bytes(b"no database" * 1000)
    found = await admitted(tmp_path, run())
    assert found.forecast is not None and found.forecast["is_measured"] is True


async def test_an_unknown_instance_type_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean ml\.p5\.48xlarge"):
        await admitted(tmp_path, run(instance_type="ml.p5.48xlarg", instance_count=2))


async def test_the_runs_of_a_day_share_its_dollars(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\nusd_per_day = 10\n")
    price: dict[str, Any] = {"usd_per_hour": 36.0}  # 0.01 USD a second: the 160 s of the forecast are 1.60 USD
    yesterday = replace(run("old", status=RunStatus.SUCCEEDED, **price), created_at=time.time() - 2 * 86400)
    await store(tmp_path, yesterday, seconds=5000.0, steps=2)
    await store(tmp_path, run("today", status=RunStatus.SUCCEEDED, **price), seconds=830.0)
    assert (await admitted(tmp_path, run(**price))).run_id == "new"
    await store(tmp_path, run("today", status=RunStatus.SUCCEEDED, **price), seconds=850.0)
    with pytest.raises(
        InvalidInput, match=r"usd_per_day = 10 .* promised 8.50 USD, and this one will take about 1.60 USD"
    ):
        await admitted(tmp_path, run(**price))


def resolved_of(made: Run) -> Resolved:
    return Resolved(config=from_dict(made.config), sources=made.sources)


async def test_a_run_of_which_nothing_is_known_spends_no_more_than_the_day_has_left(tmp_path: Path) -> None:
    """Without measurements nobody can refuse it: a ceiling that only looks at forecasts would hold nothing."""
    (tmp_path / "turnmill.toml").write_text("[ceilings]\nusd_per_day = 10\n")
    price: dict[str, Any] = {"usd_per_hour": 36.0}
    await store(tmp_path, run("today", status=RunStatus.FAILED, **price), seconds=400.0)
    found = await admitted(tmp_path, run(**price))
    assert (found.config["budget_usd"], found.sources["budget_usd"]) == (6.0, "turnmill.toml")
    modest = await admitted(tmp_path, run(budget_usd=5.0, **price))
    assert modest.config["budget_usd"] == 5.0
    # What costs nothing has no such limit.
    assert (await admitted(tmp_path, run())).config["budget_usd"] == 0.0
    await store(tmp_path, run("today", status=RunStatus.FAILED, **price), seconds=1000.0)
    with pytest.raises(InvalidInput, match="usd_per_day = 10"):
        await admitted(tmp_path, run(**price))
    assert (await admitted(tmp_path, run())).config["budget_usd"] == 0.0


async def test_a_run_that_goes_on_spends_no_more_than_the_day_has_left_either(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\nusd_per_day = 10\n")
    price: dict[str, Any] = {"usd_per_hour": 36.0}
    await store(tmp_path, run("other", status=RunStatus.SUCCEEDED, **price), seconds=700.0)
    made = replace(run("r1", status=RunStatus.FAILED, budget_usd=100.0, **price), resumed_at=1.0, created_at=1.0)
    await store(tmp_path, made, seconds=900.0)
    # 9 USD on an earlier day, and 3 of the 10 are left of this one.
    found = await within_day(tmp_path, made, resolved_of(made))
    assert (found.config.budget_usd, found.sources["budget_usd"]) == (12.0, "turnmill.toml")
    # What it has used today counts, too.
    ports = open_run(tmp_path, "r1", num_replicas=0)
    today = RunClock(run_id="r1", attempt=2, began_at=time.time(), seconds=200.0)
    await ports.records.write([Write(key=today.key, value=encode(today), expected=0)])
    ports.close()
    assert (await within_day(tmp_path, made, resolved_of(made))).config.budget_usd == 12.0
    await store(tmp_path, run("another", status=RunStatus.SUCCEEDED, **price), seconds=300.0)
    used_up = replace(made, config=to_dict((await within_day(tmp_path, made, resolved_of(made))).config))
    assert await used_up_by(tmp_path, used_up) is not None


async def test_of_two_runs_that_are_let_in_at_the_same_time_the_second_one_counts_the_first(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\nusd_per_day = 10\n")
    price: dict[str, Any] = {"usd_per_hour": 36.0}
    budgets: list[float] = []

    async def let_in(name: str) -> None:
        async with admission(tmp_path, replace(run(name, budget_usd=8.0, **price), stages=())) as admitted_run:
            budgets.append(admitted_run.config["budget_usd"])
            await asyncio.sleep(0.05)
            await store(tmp_path, admitted_run)

    await asyncio.gather(let_in("one"), let_in("two"))
    assert budgets == [8.0, 2.0]


async def test_a_run_that_has_used_up_its_budget_does_not_go_on_with_it(tmp_path: Path) -> None:
    made = run("r1", status=RunStatus.FAILED, budget_tokens=1000)
    await store(tmp_path, made, seconds=60.0, tokens=1034)
    error = await used_up_by(tmp_path, made)
    assert isinstance(error, BudgetUsedUp) and isinstance(error, InvalidInput)
    assert re.search(r"budget_tokens = 1000 .*1,034 tokens generated \(train 1,034\), 60 s", str(error))
    assert await used_up_by(tmp_path, replace(made, config={**made.config, "budget_tokens": 1035})) is None


async def test_a_run_that_is_trained_needs_no_more_tokens_to_be_published(tmp_path: Path) -> None:
    """Killed in Publish, having reached its budget with the last step."""
    made = run("r1", status=RunStatus.ACTIVE, budget_tokens=1000)
    await store(tmp_path, made, tokens=1034)
    trained = TrainingStatus(
        run_id="r1", state="succeeded", step=10, max_steps=10, incarnation=1, updated_at=1.0, checkpoint="/c/final"
    )
    ports = open_run(tmp_path, "r1", num_replicas=0)
    await ports.records.write([Write(key=training_key("r1"), value=encode(trained), expected=0)])
    ports.close()
    assert await used_up_by(tmp_path, made) is None
    # Evaluations would be played, or steps made anew.
    assert await used_up_by(tmp_path, replace(made, eval_path="eval.jsonl")) is not None
    assert await used_up_by(tmp_path, made, from_step=3) is not None


async def test_a_breach_is_an_alert_of_its_own(tmp_path: Path) -> None:
    made = replace(run("r1", status=RunStatus.FAILED), error="budget_tokens = 1 is used up: turnmill resume r1 ...")
    alert: Alert = run_failed(tmp_path, made, BudgetExceeded("used up"))
    assert (alert.kind, alert.error, alert.run_id) == (AlertKind.BUDGET_BREACH, made.error, "r1")
    assert alert.command == f"turnmill cost r1 --root {tmp_path}"
    assert run_failed(tmp_path, made).kind is AlertKind.RUN_FAILED
    assert new_alert(AlertKind.BUDGET_BREACH, "s", command="c").severity == alert.severity


async def test_costs_of_runs_are_added_up(tmp_path: Path) -> None:
    await store(tmp_path, run("a", status=RunStatus.SUCCEEDED, usd_per_hour=2.0), seconds=1800.0, tokens=10)
    await store(tmp_path, run("b", status=RunStatus.FAILED), seconds=60.0, tokens=5)
    found, unreadable = await costs_of_all(tmp_path)
    assert not unreadable
    assert [(one.run.run_id, one.spent.num_tokens, one.spent.usd) for one in found] == [("a", 10, 1.0), ("b", 5, 0.0)]
    assert (await cost_of(tmp_path, run("nobody"))).spent.num_tokens == 0


def invoke(root: Path, *arguments: str) -> Any:
    return CliRunner().invoke(turnmill, ["cost", "--root", str(root), *arguments])


async def test_a_damaged_run_hides_the_cost_of_no_other_one(tmp_path: Path) -> None:
    await store(tmp_path, run("a", status=RunStatus.SUCCEEDED, usd_per_hour=2.0), seconds=1800.0, tokens=10)
    await store(tmp_path, run("b", status=RunStatus.FAILED), seconds=60.0, tokens=5)
    for file in (tmp_path / "runs" / "b" / "records").iterdir():
        file.write_bytes(b"no database" * 1000)
    shown = await asyncio.to_thread(invoke, tmp_path)
    assert shown.exit_code == 0 and "1.00" in shown.stdout
    assert "what run b has used can't be read, and is not in the sums: " in shown.stderr
    listed = json.loads((await asyncio.to_thread(invoke, tmp_path, "--json")).stdout)
    assert [one["run_id"] for one in listed] == ["a", "b"] and "no database" not in listed[1]["unreadable"]


def test_the_command_forecasts_and_lists_prices(tmp_path: Path) -> None:
    parameters = ["--instance-type", "ml.p5.48xlarge", "--instance-count", "10", "--generation-replicas", "4"]
    found = json.loads(invoke(tmp_path, "--forecast", "--json", *parameters).stdout)
    assert 633 < found["usd_per_hour"] < 634 and "10 x ml.p5.48xlarge at 63.296 USD/h" in found["assumptions"][2]
    assert "forecast: at most 2 h 0 min, " in invoke(tmp_path, "--forecast").stdout
    prices = json.loads(invoke(tmp_path, "--prices", "--json").stdout)
    assert prices["usd_per_hour"]["ml.p5en.48xlarge"] == 72.7904 and prices["date"] == "2026-09-10"
    assert "ml.p5en.48xlarge" in invoke(tmp_path, "--prices").stdout
    assert invoke(tmp_path, "--json").stdout == "[]\n" and "no runs in" in invoke(tmp_path).stdout


def test_the_command_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    assert "one of them" in str(invoke(tmp_path, "--forecast", "--prices").exception)
    assert "--max-steps goes with --forecast only" in str(invoke(tmp_path, "--max-steps", "3").exception)
    assert "there is no run 'x'" in str(invoke(tmp_path, "x").exception)
