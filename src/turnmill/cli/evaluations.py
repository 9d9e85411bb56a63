"""`turnmill evaluations`: what a run's weights did on the held-out tasks, version by version and task by task."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from turnmill.cli.render import several_text, sparkline
from turnmill.cli.show import find_run, json_option, root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.records import TaskChange
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.evaluations import StoredEvaluation, change_by_task, read_evaluations

# Tasks that are shown unless all are wanted.
_MOST_TASKS = 20


@click.command(short_help="Show what a run did on its held-out tasks.")
@click.argument("run_id", metavar="RUN")
@click.option("--all", "shows_all", is_flag=True, help="Every task, not only those that changed most.")
@root_option
@json_option("Print one object: each evaluation, and every task of it.")
def evaluations(run_id: str, shows_all: bool, root: Path, as_json: bool) -> None:
    """Show each evaluation of a run with its intervals, and how the tasks went in the last one against the first."""
    run = find_run(root, run_id)
    found: list[StoredEvaluation] = run_loop(read_evaluations(root, run.run_id))
    if as_json:
        changes = [asdict(change) for change in change_by_task(found)]
        click.echo(json.dumps({"evaluations": [_plain(one) for one in found], "tasks": changes}))
        return
    console = PlainConsole()
    if not found:
        click.echo(f"run {run_id} has played no held-out tasks: give it some with --eval-data")
        return
    console.print(_figures_table(found))
    last = found[-1]
    again = sum(one.found["num_invalid"] + one.found["num_stale"] for one in found)
    say(console, f"{last.found['num_tasks']} tasks; {again} rollouts had to be played again")
    if several := several_text(last.found):
        say(console, f"{last.name}: {several}")
    shares = [one.found["solved"] for one in found]
    if len(found) > 1:
        say(console, Text.assemble(("solved ", "dim"), (sparkline(shares), "green"), f"  {_span(found)}"))
        _print_tasks(console, change_by_task(found), found, shows_all=shows_all)


def _plain(one: StoredEvaluation) -> dict[str, Any]:
    return {"name": one.name, "step": one.step, "at": one.at, **one.found}


def _span(found: Sequence[StoredEvaluation]) -> str:
    return f"{found[0].found['solved']:.3f} ({found[0].name}) → {found[-1].found['solved']:.3f} ({found[-1].name})"


def _figures_table(found: Sequence[StoredEvaluation]) -> Table:
    table = Table(box=SIMPLE)
    for name in ("evaluation", "version", "solved (95 % interval)", "reward", "rollouts"):
        table.add_column(name, justify="left" if name == "evaluation" else "right", no_wrap=True)
    for one in found:
        figures = one.found
        table.add_row(
            Text(one.name if figures["temperature"] else f"{one.name} (greedy)"),
            figures["version"],
            f"{figures['solved']:.3f} ({figures['solved_low']:.3f} to {figures['solved_high']:.3f})",
            f"{figures['reward_mean']:.3f}",
            str(figures["num_valid"]),
        )
    return table


def _print_tasks(
    console: PlainConsole, changes: Sequence[TaskChange], found: Sequence[StoredEvaluation], *, shows_all: bool
) -> None:
    shown = changes if shows_all else _most_changed(changes)
    table = Table(box=SIMPLE, title=f"tasks, {found[0].name} → {found[-1].name}", title_justify="left")
    table.add_column("task")
    for name in ("solved", "mean reward"):
        table.add_column(name, justify="right")
    for change in shown:
        table.add_row(
            Text(change.task_id, style="red" if change.gain("reward") < 0 else ""),
            f"{change.solved_before}/{change.num_before} → {change.solved_after}/{change.num_after}",
            f"{change.reward_before:.3f} → {change.reward_after:.3f}",
        )
    console.print(table)
    if left := len(changes) - len(shown):
        say(console, f"and {left} tasks that changed less; --all shows every one")


def _most_changed(changes: Sequence[TaskChange]) -> list[TaskChange]:
    """The ones that lost most and the ones that gained most."""
    if len(changes) <= _MOST_TASKS:
        return list(changes)
    half = _MOST_TASKS // 2
    return [*changes[:half], *changes[-half:]]
