"""What runs of a deployment cost: the forecast by which one is let in, and what each has used."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from turnmill.backends.embedded import only_one
from turnmill.budget import (
    PARAMETERS,
    Breach,
    Forecast,
    Pace,
    Spent,
    check_price,
    clocks,
    forecast,
    load_prices,
    num_evaluated,
    pace_of,
    problems_of,
    rate_of,
    run_seconds,
    spent_by,
    stage_hours,
    usd_of,
    usd_per_hour_of,
    used_up,
    within_ceilings,
)
from turnmill.config import ENVIRONMENT_PARAMETERS, Config, Resolved, from_dict, to_dict
from turnmill.config.deployment import FILE, load_limits
from turnmill.errors import BackendUnavailable, BudgetUsedUp, Conflict, InvalidInput, TurnmillError
from turnmill.records import Metric, Run, RunClock, RunKind, RunStatus, TrainingStatus, decode, training_key
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import list_runs, read_metrics

logger = logging.getLogger(__name__)

# Earlier runs that a forecast is made from, the latest ones.
_MOST_RUNS = 5
# What makes the pace of one run that of another.
_ALIKE = ("base_model", *ENVIRONMENT_PARAMETERS, "instance_type")
_DAY_S = 86400.0
# How long a run waits until another one is let in.
_TURN_S, _PAUSE_S = 60.0, 0.05
# What is left of a day on which nothing is left.
_LEAST_USD = 1e-6


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


@asynccontextmanager
async def admission(root: Path, run: Run) -> AsyncIterator[Run]:
    """The run as it may begin, see `admitted`; its record is written inside, before the next one of a day is let in."""
    if not load_limits(root)[0].usd_per_day:
        yield await admitted(root, run)
        return
    with ExitStack() as stack:
        end = time.monotonic() + _TURN_S
        while True:
            try:
                stack.enter_context(only_one(root / "locks" / "admission.lock", "another run is being let in"))
                break
            except Conflict as error:
                if time.monotonic() > end:
                    raise BackendUnavailable(f"{error}, and takes too long for it; try again later") from error
            await asyncio.sleep(_PAUSE_S)
        yield await admitted(root, run)


async def admitted(root: Path, run: Run) -> Run:
    """The run as it may begin: within the deployment's ceilings, with its forecast.

    Raises `ConfigError` for a budget beyond a ceiling or an unknown instance type, `InvalidInput` where a budget is
    not enough.
    """
    ceilings, prices = load_limits(root)
    resolved = within_ceilings(Resolved(config=from_dict(run.config), sources=run.sources), ceilings)
    if ceilings.usd or ceilings.usd_per_day:
        check_price(resolved, load_prices(prices))
    found = await forecast_of(root, resolved.config, run.kind, num_eval_tasks=await _num_held_out(run))
    today = await _promised_today(root, run.run_id) if ceilings.usd_per_day else 0.0
    if problems := problems_of(found, resolved.config, resolved.sources, today, ceilings.usd_per_day):
        raise InvalidInput("\n  ".join(["the run would stop before its end:", *problems]))
    if ceilings.usd_per_day and found.usd_per_hour:
        resolved = _within_rest(resolved, ceilings.usd_per_day - today)
    return replace(run, config=to_dict(resolved.config), sources=resolved.sources, forecast=msgspec.to_builtins(found))


async def within_day(root: Path, run: Run, resolved: Resolved) -> Resolved:
    """The parameters of a run that goes on: it spends no more than the other runs of the day leave."""
    per_day = load_limits(root)[0].usd_per_day
    if not per_day or not usd_per_hour_of(run):
        return resolved
    earlier = usd_of(run_seconds(await _earlier_clocks(root, run)), usd_per_hour_of(run))
    return _within_rest(resolved, earlier + per_day - await _promised_today(root, run.run_id))


async def _earlier_clocks(root: Path, run: Run) -> list[RunClock]:
    """Of the attempts that began before this day."""
    ports = backend_of(root).open_run(run.run_id, num_replicas=0)
    try:
        return [clock for clock in await clocks(ports.records, run.run_id) if clock.began_at < _today()]
    finally:
        ports.close()


def _today() -> float:
    """When this day (UTC) began."""
    return time.time() // _DAY_S * _DAY_S


def _within_rest(resolved: Resolved, rest: float) -> Resolved:
    """With the rest of a day's dollars as the budget, unless that is lower."""
    # 0 is no limit.
    rest = max(rest, _LEAST_USD)
    if 0 < resolved.config.budget_usd <= rest:
        return resolved
    sources = {**resolved.sources, "budget_usd": FILE}
    return Resolved(config=replace(resolved.config, budget_usd=rest), sources=sources)


async def forecast_of(root: Path, config: Config, kind: RunKind, *, num_eval_tasks: int | None) -> Forecast:
    """Of a run with these parameters in this deployment; raises `ConfigError` for an unknown instance type.

    `num_eval_tasks`: None where there are held-out tasks and nobody knows how many.
    """
    rate = rate_of(config, load_prices(load_limits(root)[1]))
    return forecast(
        config,
        rate=rate,
        pace=await _measured(root, config),
        num_steps=config.max_steps if kind is RunKind.TRAIN else 0,
        num_eval_rollouts=num_evaluated(config, kind, num_eval_tasks=num_eval_tasks),
    )


async def _num_held_out(run: Run) -> int | None:
    """Its held-out tasks, uncounted where the file can't be read: ValidateData says what is wrong with it."""
    if run.eval_path is None:
        return 0
    try:
        return await asyncio.to_thread(_num_rows, Path(run.eval_path)) or None
    except OSError:
        return None


def _num_rows(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(not line.isspace() for line in lines)


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
    """Dollars of the other runs that began on this day (UTC): used, or expected where they go on.

    Where nothing was measured that may be as much as the run's budget.
    """
    total = 0.0
    for run in await list_runs(root):
        has_begun = run.stages or run.status is RunStatus.ACTIVE
        if run.run_id == run_id or not has_begun or max(run.resumed_at or 0.0, run.created_at) < _today():
            continue
        likely = ((run.forecast or {}).get("usd") or {}).get("likely")
        promised = from_dict(run.config).budget_usd if likely is None else likely
        try:
            usd = (await cost_of(root, run)).spent.usd
        except TurnmillError as error:
            logger.warning("run %s counts with what was expected of it: %s", run.run_id, error)
            total += promised
            continue
        total += usd if run.status.is_final else max(usd, promised)
    return total


async def cost_of(root: Path, run: Run) -> RunCost:
    """What a run has used so far."""
    ports = backend_of(root).open_run(run.run_id, num_replicas=0)
    try:
        of_attempts = await clocks(ports.records, run.run_id)
        return RunCost(run=run, spent=await spent_by(ports.records, run), stage_hours=stage_hours(run, of_attempts))
    finally:
        ports.close()


async def costs_of_all(root: Path) -> tuple[list[RunCost], dict[str, str]]:
    """Of all runs, oldest first, and by run id why some can't be read: a damaged one hides no other."""
    found: list[RunCost] = []
    unreadable: dict[str, str] = {}
    for run in await list_runs(root):
        try:
            found.append(await cost_of(root, run))
        except TurnmillError as error:
            unreadable[run.run_id] = str(error)
    return found, unreadable


async def used_up_by(root: Path, run: Run, *, from_step: int | None = None) -> BudgetUsedUp | None:
    """The error, with the figures, of a run that could not go on with the budgets that it has now.

    `from_step`: it is to go on after this step, and not where it is.
    """
    ports = backend_of(root).open_run(run.run_id, num_replicas=0)
    try:
        spent = await spent_by(ports.records, run)
        (stored,) = await ports.records.get([training_key(run.run_id)])
        training = decode(stored.value, TrainingStatus) if stored else None
        name = used_up(_limited(run, training if from_step is None else None), spent)
        if name is None:
            return None
        return BudgetUsedUp(Breach(run=run, name=name, spent=spent, training=training, root=root).text)
    finally:
        ports.close()


def _limited(run: Run, training: TrainingStatus | None) -> Config:
    """The run's parameters; without a budget of tokens where none will be generated any more."""
    config = from_dict(run.config)
    is_played = training is not None and training.state == "succeeded" and run.eval_path is None
    return replace(config, budget_tokens=0) if is_played else config
