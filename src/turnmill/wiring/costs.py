"""What runs of a deployment cost: the forecast by which one is let in, and what each has used."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from turnmill.backends.embedded import open_run
from turnmill.budget import (
    PARAMETERS,
    Breach,
    Forecast,
    Pace,
    Spent,
    clocks,
    forecast,
    load_prices,
    pace_of,
    problems_of,
    rate_of,
    spent_by,
    stage_hours,
    used_up,
    within_ceilings,
)
from turnmill.config import Config, Resolved, from_dict, to_dict
from turnmill.config.deployment import load_limits
from turnmill.errors import BudgetUsedUp, InvalidInput, TurnmillError
from turnmill.records import Metric, Run, RunKind, TrainingStatus, decode, training_key
from turnmill.wiring.reading import list_runs, read_metrics

logger = logging.getLogger(__name__)

# Earlier runs that a forecast is made from, the latest ones.
_MOST_RUNS = 5
# What makes the pace of one run that of another.
_ALIKE = ("base_model", "env", "env_args", "instance_type")
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run has used so far."""

    run: Run
    spent: Spent
    # By stage, all attempts together.
    stage_hours: dict[str, float]

    @property
    def summary(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "run_id": self.run.run_id,
            "status": self.run.status.value,
            "tokens": self.spent.tokens,
            "num_tokens": self.spent.num_tokens,
            "hours": self.spent.run_s / 3600,
            "stage_hours": self.stage_hours,
            "usd": self.spent.usd,
            "budgets": {name: self.run.config.get(name, 0) for name in PARAMETERS},
            "forecast": self.run.forecast,
        }


async def admitted(root: Path, run: Run) -> Run:
    """The run as it may begin: within the deployment's ceilings, with its forecast.

    Raises `ConfigError` for a budget beyond a ceiling or an unknown instance type, `InvalidInput` where a budget is
    not enough.
    """
    ceilings, _ = load_limits(root)
    resolved = within_ceilings(Resolved(config=from_dict(run.config), sources=run.sources), ceilings)
    found = await forecast_of(root, resolved.config, run.kind, has_eval_data=run.eval_path is not None)
    today = await _promised_today(root, run.run_id) if ceilings.usd_per_day else 0.0
    if problems := problems_of(found, resolved.config, resolved.sources, today, ceilings.usd_per_day):
        raise InvalidInput("\n  ".join(["the run would stop before its end:", *problems]))
    return replace(run, config=to_dict(resolved.config), sources=resolved.sources, forecast=msgspec.to_builtins(found))


async def forecast_of(root: Path, config: Config, kind: RunKind, *, has_eval_data: bool) -> Forecast:
    """Of a run with these parameters in this deployment; raises `ConfigError` for an unknown instance type."""
    rate = rate_of(config, load_prices(load_limits(root)[1]))
    num_evaluations = (2 if kind is RunKind.TRAIN else 1) if has_eval_data else 0
    return forecast(
        config,
        rate=rate,
        pace=await _measured(root, config),
        num_steps=config.max_steps if kind is RunKind.TRAIN else 0,
        num_eval_rollouts=num_evaluations * config.eval_rollouts
        + (config.baseline_rollouts if kind is RunKind.TRAIN else 0),
    )


async def _measured(root: Path, config: Config) -> Pace | None:
    """The pace of the last runs of the same model and environment on the same type of machine."""
    wanted = {name: value for name, value in to_dict(config).items() if name in _ALIKE}
    found: list[tuple[dict[str, Any], Sequence[Metric]]] = []
    for run in reversed(await list_runs(root)):
        if run.kind is RunKind.TRAIN and {name: run.config.get(name) for name in _ALIKE} == wanted:
            try:
                metrics = await read_metrics(root, run.run_id)
            except TurnmillError as error:
                # What became of an earlier run's files must not keep others from beginning.
                logger.warning("no forecast is made from run %s: %s", run.run_id, error)
                continue
            if metrics:
                found.append((run.config, metrics))
        if len(found) == _MOST_RUNS:
            break
    return pace_of(found)


async def _promised_today(root: Path, run_id: str) -> float:
    """Dollars of the other runs that began on this day (UTC): used, or expected where they go on."""
    begin = time.time() // _DAY_S * _DAY_S
    total = 0.0
    for run in await list_runs(root):
        if run.run_id == run_id or not run.stages or max(run.resumed_at or 0.0, run.created_at) < begin:
            continue
        likely = ((run.forecast or {}).get("usd") or {}).get("likely") or 0.0
        try:
            usd = (await cost_of(root, run)).spent.usd
        except TurnmillError as error:
            logger.warning("run %s counts with what was expected of it: %s", run.run_id, error)
            total += likely
            continue
        total += usd if run.status.is_final else max(usd, likely)
    return total


async def cost_of(root: Path, run: Run) -> RunCost:
    """What a run has used so far."""
    ports = open_run(root, run.run_id, num_replicas=0)
    try:
        of_attempts = await clocks(ports.records, run.run_id)
        return RunCost(run=run, spent=await spent_by(ports.records, run), stage_hours=stage_hours(run, of_attempts))
    finally:
        ports.close()


async def costs_of_all(root: Path) -> list[RunCost]:
    """Of all runs, oldest first."""
    return [await cost_of(root, run) for run in await list_runs(root)]


async def check_unspent(root: Path, run: Run) -> None:
    """Raise `BudgetUsedUp` with the figures where the run, with the budgets that it has now, could not go on."""
    ports = open_run(root, run.run_id, num_replicas=0)
    try:
        spent = await spent_by(ports.records, run)
        name = used_up(from_dict(run.config), spent)
        if name is None:
            return
        (stored,) = await ports.records.get([training_key(run.run_id)])
        training = decode(stored.value, TrainingStatus) if stored else None
        raise BudgetUsedUp(Breach(run=run, name=name, spent=spent, training=training, root=root).text)
    finally:
        ports.close()
