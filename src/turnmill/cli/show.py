"""`turnmill runs`, `status`, `watch`: what a deployment's records say. They read and change nothing."""

import difflib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.text import Text

from turnmill.cli import render
from turnmill.cli.cost_lines import cost_lines_in_short
from turnmill.cli.next_steps import next_step
from turnmill.cli.view import PlainConsole, command, print_steps, say, show
from turnmill.errors import NotFound
from turnmill.health.replicas import describe
from turnmill.records import Metric, ReplicaStatus, Run, RunStatus
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.costs import cost_of
from turnmill.wiring.reading.runs import list_runs, listed_steps, look_at_replicas, read_baseline, read_metrics

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_ROOT = Path(".turnmill")


def root_option(command: F) -> F:
    """Where runs are kept."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT_ROOT,
        envvar="TURNMILL_ROOT",
        show_default=True,
        help="Folder of the deployment (or TURNMILL_ROOT).",
    )(command)


def json_option(text: str) -> Callable[[F], F]:
    """Machine-readable output on standard output."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def at_root(root: Path) -> str:
    """What a command that people are told to type needs in order to find the same deployment."""
    return "" if root == DEFAULT_ROOT else f" --root {shlex.quote(str(root))}"


def find_run(root: Path, run_id: str) -> Run:
    """The run of this id; raises `NotFound` naming the closest ids."""
    return choose_run(load_runs(root), root, run_id)


def choose_run(runs: Sequence[Run], root: Path, run_id: str) -> Run:
    """The one of `runs` with this id; raises `NotFound` naming the closest ids."""
    known = {run.run_id: run for run in runs}
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
@json_option("Print a list of objects, one a run.")
def runs(root: Path, as_json: bool) -> None:
    """List all runs, oldest first."""
    found = [(run, *listed_steps(root, run.run_id)) for run in load_runs(root)]
    if as_json:
        shown = [
            {**render.summary(run, metrics), **({"unreadable": unreadable} if unreadable else {})}
            for run, metrics, unreadable in found
        ]
        click.echo(json.dumps(shown))
    elif found:
        PlainConsole().print(render.runs_table([(run, metrics) for run, metrics, _ in found]))
        for run, _, unreadable in found:
            if unreadable is not None:
                click.echo(f"the figures of run {run.run_id} can't be read: {unreadable}", err=True)
    else:
        click.echo(f"no runs in {root}; start one with `turnmill demo`")


@click.command(short_help="Show one run: stages, figures, parameters.")
@click.argument("run_id", metavar="RUN")
@root_option
@json_option("Print one object.")
def status(run_id: str, root: Path, as_json: bool) -> None:
    """Show one run: its stages, figures, and each parameter with its source."""
    run = find_run(root, run_id)
    metrics, cost = load_metrics(root, run), run_loop(cost_of(root, run))
    baseline = run_loop(read_baseline(root, run.run_id))
    replicas = look_at_replicas(root, run.run_id)
    if as_json:
        record = msgspec.to_builtins(run)
        record.pop("worker_token_hash")
        latest = metrics[-1].values if metrics else {}
        record |= {"summary": render.summary(run, metrics), "latest": latest, "baseline": None, "cost": cost.summary}
        record["replicas"] = msgspec.to_builtins(replicas)
        if baseline is not None:
            record["baseline"] = {**baseline.figures(), "tasks": msgspec.to_builtins(baseline.tasks)}
        click.echo(json.dumps(record))
        return
    console = PlainConsole()
    console.print(render.live_view(run, metrics))
    for text in render.lineage_lines(run):
        say(console, text)
    for text in cost_lines_in_short(cost):
        say(console, text)
    for line in _replica_lines(run, replicas):
        say(console, line)
    if run.error:
        say(console, Text(f"error: {run.error}", style="red"))
    if (step := next_step(run, num_steps=len(metrics), at_root=at_root(root))) is not None:
        say(console, command(step))
    if baseline is not None:
        for text in render.baseline_lines(baseline.figures()):
            say(console, text)
    if metrics:
        console.print(render.curve_table(metrics))
    for text in [*render.evaluation_lines(run), *render.promotion_lines(run)]:
        say(console, text)
    console.print(render.parameters_table(run))
    say(console, render.defaults_text(run))


def _replica_lines(run: Run, replicas: Sequence[ReplicaStatus]) -> list[Text]:
    """What they do now; nothing of a run that has ended."""
    if run.status is not RunStatus.ACTIVE:
        return []
    return [Text(f"{status.replica} {describe(status, time.time())}") for status in replicas]


@click.command(short_help="Follow a run until it ends.")
@click.argument("run_id", metavar="RUN")
@root_option
@json_option("Print one object a step, and the figures of the run as the last one.")
def watch(run_id: str, root: Path, as_json: bool) -> None:
    """Follow a run until it ends: stage, step, reward curve, time left."""
    run = find_run(root, run_id)
    if as_json:
        run_loop(print_steps(root, run.run_id))
        return
    console = PlainConsole()
    run_loop(show(root, run.run_id, console))
    if not console.is_terminal:
        click.echo(f"run {run_id} {find_run(root, run_id).status.value}")
