"""`turnmill runs`, `status`, `watch`: what a deployment's records say. They read and change nothing."""

import difflib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from turnmill.cli import render
from turnmill.errors import NotFound
from turnmill.records import Metric, Run
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading import list_runs, read_metrics

F = TypeVar("F", bound=Callable[..., Any])
WATCH_INTERVAL_S = 0.5


def root_option(command: F) -> F:
    """Where runs are kept."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(".turnmill"),
        envvar="TURNMILL_ROOT",
        show_default=True,
        help="Folder of the deployment (or TURNMILL_ROOT).",
    )(command)


def json_option(command: F) -> F:
    """Machine-readable output on standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def find_run(root: Path, run_id: str) -> Run:
    """The run of this id; raises `NotFound` naming the closest ids."""
    known = {run.run_id: run for run in load_runs(root)}
    if run_id not in known:
        close = difflib.get_close_matches(run_id, list(known), n=3, cutoff=0.3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "; `turnmill runs` lists what there is"
        raise NotFound(f"there is no run {run_id!r} in {root}{hint}")
    return known[run_id]


def load_runs(root: Path) -> list[Run]:
    """All runs, oldest first; none where the deployment's folder does not exist."""
    found: list[Run] = run_loop(list_runs(root))
    return found


def load_metrics(root: Path, run: Run) -> list[Metric]:
    """The metrics of a run by step."""
    found: list[Metric] = run_loop(read_metrics(root, run.run_id))
    return found


@click.command()
@root_option
@json_option
def runs(root: Path, as_json: bool) -> None:
    """List all runs."""
    found = load_runs(root)
    if as_json:
        rows = [render.summary(run, load_metrics(root, run)) for run in found]
        click.echo(json.dumps(rows))
        return
    table = Table()
    for name in ("run", "kind", "status", "stage", "steps", "reward", "started"):
        table.add_column(name)
    for run in found:
        figures = render.summary(run, load_metrics(root, run))
        reward = figures["reward_last10"]
        table.add_row(
            run.run_id,
            run.kind.value,
            Text(run.status.value, style=render.RUN_STYLES[run.status]),
            run.stages[-1].name if run.stages else "",
            str(figures["steps"]),
            "" if reward is None else f"{reward:.3f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at)),
        )
    Console().print(table if found else f"no runs in {root}; start one with `turnmill demo`")


@click.command()
@click.argument("run_id", metavar="RUN")
@root_option
@json_option
def status(run_id: str, root: Path, as_json: bool) -> None:
    """Show one run: its stages, figures, and each parameter with its source."""
    run = find_run(root, run_id)
    metrics = load_metrics(root, run)
    if as_json:
        record = msgspec.to_builtins(run)
        record.pop("worker_token_hash")
        latest = metrics[-1].values if metrics else {}
        click.echo(json.dumps({**record, "summary": render.summary(run, metrics), "latest": latest}))
        return
    console = Console()
    console.print(render.live_view(run, metrics))
    if run.error:
        console.print(Text(f"error: {run.error}", style="red"))
    if metrics:
        console.print(render.curve_table(metrics))
    console.print(render.parameters_table(run))


@click.command()
@click.argument("run_id", metavar="RUN")
@root_option
@json_option
def watch(run_id: str, root: Path, as_json: bool) -> None:
    """Follow a run until it ends: step, reward curve, time left. `--json` prints one line a step."""
    run = find_run(root, run_id)
    if as_json or not Console().is_terminal:
        _follow_lines(root, run, as_json)
        return
    with Live(render.live_view(run, load_metrics(root, run)), auto_refresh=False) as live:
        while not run.status.is_final:
            time.sleep(WATCH_INTERVAL_S)
            run = find_run(root, run_id)
            live.update(render.live_view(run, load_metrics(root, run)), refresh=True)


def _follow_lines(root: Path, run: Run, as_json: bool) -> None:
    shown = 0
    while True:
        run = find_run(root, run.run_id)
        metrics = load_metrics(root, run)
        for metric in metrics[shown:]:
            line = json.dumps({"step": metric.step, "time": metric.time, **metric.values})
            click.echo(line if as_json else render.step_line(metric, int(run.config["max_steps"])))
        shown = len(metrics)
        if run.status.is_final:
            figures = render.summary(run, metrics)
            click.echo(json.dumps(figures) if as_json else f"run {run.run_id} {run.status.value}")
            return
        time.sleep(WATCH_INTERVAL_S)
