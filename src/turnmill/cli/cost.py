"""`turnmill cost`: what runs have used, what one would take, and the prices that this is worked out with."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.box import SIMPLE
from rich.table import Table

from turnmill.budget import Forecast, Prices, load_prices, within_ceilings
from turnmill.cli.cost_lines import cost_lines, costs_table, forecast_lines
from turnmill.cli.options import EPILOG, CommandWithParameters, collect_flags, config_options
from turnmill.cli.show import find_run, json_option, root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.config.deployment import load_limits
from turnmill.errors import InvalidInput
from turnmill.records import RunKind
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.costs import RunCost, cost_of, costs_of_all, forecast_of
from turnmill.wiring.running.control import resolve

F = TypeVar("F", bound=Callable[..., Any])


def budget_options(command: F) -> F:
    """The budgets that a run may be given more of when it goes on; each a keyword, None where it was not given."""
    for name, kind, text in (
        ("max_runtime_s", click.FloatRange(min=0, min_open=True), "Seconds of the whole run, more than it had."),
        ("budget_usd", click.FloatRange(min=0), "Dollars of the whole run, more than it had; 0: no limit."),
        ("budget_tokens", click.IntRange(min=0), "Generated tokens of the whole run, more than it had; 0: no limit."),
    ):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command


@click.command(cls=CommandWithParameters, epilog=EPILOG, short_help="What runs have used, and what one would take.")
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--forecast", "is_forecast", is_flag=True, help="What a run with the parameters given would take.")
@click.option(
    "--eval/--no-eval", "has_eval_data", default=True, help="With or without held-out evaluations (--forecast)."
)
@click.option("--prices", "shows_prices", is_flag=True, help="Dollars an hour by instance type.")
@root_option
@json_option("Print one object, or a list of them, one a run.")
@config_options()
def cost(
    run_id: str | None,
    is_forecast: bool,
    has_eval_data: bool,
    shows_prices: bool,
    config_file: Path | None,
    root: Path,
    as_json: bool,
    **flags: object,
) -> None:
    """Show what RUN, or each run of the deployment, has used: time, generated tokens, dollars.

    With --forecast: what a run with these parameters would take, from the measurements of earlier runs here.
    """
    given = collect_flags(flags)
    if sum((run_id is not None, is_forecast, shows_prices)) > 1:
        raise InvalidInput("give a RUN, or --forecast, or --prices: one of them")
    if given and not is_forecast:
        raise InvalidInput(
            f"--{next(iter(given)).replace('_', '-')} goes with --forecast only: a run has its own parameters"
        )
    if is_forecast:
        _show_forecast(root, config_file, given, has_eval_data, as_json)
    elif shows_prices:
        _show_prices(load_prices(load_limits(root)[1]), as_json)
    elif run_id is not None:
        _show_run(run_loop(cost_of(root, find_run(root, run_id))), as_json)
    else:
        _show_all(root, *run_loop(costs_of_all(root)), as_json)


def _show_forecast(
    root: Path, config_file: Path | None, given: dict[str, object], has_eval_data: bool, as_json: bool
) -> None:
    resolved = within_ceilings(resolve(file=config_file, environ=os.environ, flags=given), load_limits(root)[0])
    found: Forecast = run_loop(
        forecast_of(root, resolved.config, RunKind.TRAIN, num_eval_tasks=None if has_eval_data else 0)
    )
    values = msgspec.to_builtins(found)
    if as_json:
        click.echo(json.dumps(values))
        return
    for line in forecast_lines(values):
        say(PlainConsole(), line)


def _show_prices(prices: Prices, as_json: bool) -> None:
    if as_json:
        listed = {"region": prices.region, "date": prices.date, "usd_per_hour": dict(prices.usd_per_hour)}
        click.echo(json.dumps(listed))
        return
    table = Table(box=SIMPLE, caption=f"on demand, {prices.region}, {prices.date}", caption_justify="left")
    table.add_column("type", no_wrap=True)
    table.add_column("USD/h", justify="right")
    for name, usd in prices.usd_per_hour.items():
        table.add_row(name, f"{usd:g}")
    PlainConsole().print(table)


def _show_run(found: RunCost, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found.summary))
        return
    for line in cost_lines(found):
        say(PlainConsole(), line)


def _show_all(root: Path, found: list[RunCost], unreadable: dict[str, str], as_json: bool) -> None:
    if as_json:
        missing = [{"run_id": run_id, "unreadable": why} for run_id, why in unreadable.items()]
        click.echo(json.dumps([*(one.summary for one in found), *missing]))
        return
    if found:
        PlainConsole().print(costs_table(found))
    for run_id, why in unreadable.items():
        click.echo(f"what run {run_id} has used can't be read, and is not in the sums: {why}", err=True)
    if not found and not unreadable:
        click.echo(f"no runs in {root}; `turnmill cost --forecast` says what one would take")
