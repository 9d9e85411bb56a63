"""Who may begin, by ceilings, forecast and the day's dollars; who may go on; and what `turnmill cost` prints."""

import json
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
from turnmill.config import Config, to_dict
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
    encode,
    token_count_key,
)
from turnmill.wiring.alarms import run_failed
from turnmill.wiring.costs import admitted, check_unspent, cost_of, costs_of_all


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


async def test_a_run_that_has_used_up_its_budget_does_not_go_on_with_it(tmp_path: Path) -> None:
    made = run("r1", status=RunStatus.FAILED, budget_tokens=1000)
    await store(tmp_path, made, seconds=60.0, tokens=1034)
    with pytest.raises(BudgetUsedUp, match=r"budget_tokens = 1000 .*1,034 tokens generated \(train 1,034\), 60 s"):
        await check_unspent(tmp_path, made)
    await check_unspent(tmp_path, replace(made, config={**made.config, "budget_tokens": 1035}))
    assert issubclass(BudgetUsedUp, InvalidInput)


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
    found = await costs_of_all(tmp_path)
    assert [(one.run.run_id, one.spent.num_tokens, one.spent.usd) for one in found] == [("a", 10, 1.0), ("b", 5, 0.0)]
    assert (await cost_of(tmp_path, run("nobody"))).spent.num_tokens == 0


def invoke(root: Path, *arguments: str) -> Any:
    return CliRunner().invoke(turnmill, ["cost", "--root", str(root), *arguments])


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
