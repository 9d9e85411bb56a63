"""`turnmill tasks`: what training learned of each task. It reads and changes nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnmill.cli.show import choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.errors import InvalidInput, printable
from turnmill.records import Run, RunKind
from turnmill.training.task_statistics import TaskStatistics
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.reading.tasks import read_task_statistics

_WIDTH = 10
# Characters of a task's id in the table.
_LONGEST_ID = 28


@click.command(short_help="Show how often each task passes.")
@click.argument("run_id", metavar="RUN")
@root_option
@click.option("--limit", type=click.IntRange(min=1), help="The first so many alone.")
@json_option("Print one object a task, hardest first.")
def tasks(run_id: str, root: Path, limit: int | None, as_json: bool) -> None:
    """Show the tasks that RUN trained on by their pass rate, hardest first.

    The rate is an average in which a task's newest group weighs half: what a curriculum goes by. Beside it: rollouts,
    their mean reward, groups with and without signal, and the step of the last one.
    """
    run = choose_run(look_at_runs(root), root, run_id)
    if run.kind is not RunKind.TRAIN:
        raise InvalidInput(f"run {run_id} trains nothing; `turnmill status {run_id}` shows its figures")
    found = read_task_statistics(root, run)
    shown = found[:limit]
    if as_json:
        for task in shown:
            click.echo(json.dumps(task.as_object()))
        return
    console = PlainConsole()
    if not found:
        say(console, f"no group of run {run_id} is recorded yet")
        return
    console.print(_table(shown))
    say(console, _summary(run, found, num_shown=len(shown)))


def _table(found: Sequence[TaskStatistics]) -> Table:
    """One row a task, in less than 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("passes", no_wrap=True)
    for name in ("rollouts", "invalid", "reward", "signal", "none", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in found:
        table.add_row(
            printable(task.task_id, limit=_LONGEST_ID),
            _bar(task.pass_rate),
            str(task.num_played),
            str(task.num_played - task.num_valid),
            "" if task.reward_mean is None else f"{task.reward_mean:.2f}",
            str(task.num_signal),
            str(task.num_no_signal),
            str(task.step),
        )
    return table


def _bar(rate: float | None) -> Text:
    if rate is None:
        return Text("unknown", style="dim")
    full = round(rate * _WIDTH)
    return Text.assemble("█" * full, ("░" * (_WIDTH - full), "dim"), f" {rate:4.0%}")


def _summary(run: Run, found: Sequence[TaskStatistics], *, num_shown: int) -> str:
    num_signal = sum(task.num_signal for task in found)
    num_groups = num_signal + sum(task.num_no_signal for task in found)
    share = f"{num_signal} of {num_groups} groups had signal"
    more = f"{num_shown} of {len(found)} tasks shown; " if num_shown < len(found) else ""
    if run.config.get("curriculum") != "pass_rate":
        return f"{more}{share}"
    low, high = run.config["curriculum_low"], run.config["curriculum_high"]
    outside = sum(task.pass_rate is not None and not low <= task.pass_rate <= high for task in found)
    return f"{more}{share}; {outside} of {len(found)} tasks are outside of the curriculum ({low:g} to {high:g})"
