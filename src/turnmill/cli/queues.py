"""`turnmill queues`: what lies in the queues of a run, and how fast it comes and goes. It reads and changes nothing."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from turnmill.cli import render
from turnmill.cli.show import choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole
from turnmill.records import Run
from turnmill.wiring.reading.queues import QueueStatus, only_active, read_queues, with_rates
from turnmill.wiring.reading.runs import look_at_run, look_at_runs

# Between the two readings that give the rates, and between those of --watch.
INTERVAL_S, WATCH_INTERVAL_S = 1.0, 2.0


@click.command(short_help="Show what lies in a run's queues.")
@click.argument("run_id", metavar="[RUN]", required=False)
@root_option
@click.option("--watch", is_flag=True, help="Go on until the run ends.")
@json_option("Print one object a reading.")
def queues(run_id: str | None, root: Path, watch: bool, as_json: bool) -> None:
    """Show what lies in the queues of RUN, or of the one run that is active.

    Available, in flight, delayed, age of the oldest message, messages in and out a second, dead letters. Works without
    any process of the run, and disturbs none.
    """
    console = PlainConsole()
    readings = _readings(root, run_id, watch=watch)
    if watch and console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False) as live:
            for run, found in readings:
                live.update(_view(run, found), refresh=True)
        return
    for run, found in readings:
        if as_json:
            click.echo(json.dumps(_as_object(run, found)))
        else:
            console.print(_view(run, found))


def _readings(root: Path, run_id: str | None, *, watch: bool) -> Iterator[tuple[Run, Mapping[str, QueueStatus]]]:
    """One reading, with rates where the run goes on; with `watch` one after the other until it ends."""
    runs = look_at_runs(root)
    run = only_active(runs, root) if run_id is None else choose_run(runs, root, run_id)
    now = read_queues(root, run)
    if run.status.is_final:
        yield run, now.queues
        return
    pause_s = INTERVAL_S
    while True:
        time.sleep(pause_s)
        run, before, now = look_at_run(root, run.run_id), now, read_queues(root, run)
        yield run, with_rates(before, now)
        if not watch or run.status.is_final:
            return
        pause_s = WATCH_INTERVAL_S


def _as_object(run: Run, found: Mapping[str, QueueStatus]) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "status": run.status.value,
        "time": time.time(),
        "queues": {name: asdict(status) for name, status in found.items()},
    }


def _view(run: Run, found: Mapping[str, QueueStatus]) -> Group:
    head = Text.assemble(("run ", "dim"), (run.run_id, "bold"), " ", (run.status.value, render.RUN_STYLES[run.status]))
    return Group(head, queues_table(found))


def queues_table(found: Mapping[str, QueueStatus]) -> Table:
    """One row a queue, in less than 80 columns, and one for each replica where there are several."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("queue", no_wrap=True)
    for name in ("available", "in flight", "delayed", "oldest", "in/s", "out/s", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, status in found.items():
        table.add_row(name, *_cells(status))
        if len(status.replicas) > 1:
            for index, part in enumerate(status.replicas):
                table.add_row(f"  replica {index}", *_cells(part), style="dim")
    return table


def _cells(status: QueueStatus) -> list[str | Text]:
    return [
        str(status.available),
        str(status.in_flight),
        str(status.delayed),
        _age(status.oldest_age_s),
        *("" if rate is None else f"{rate:.1f}" for rate in (status.rate_in, status.rate_out)),
        Text(str(status.dead_letters), style="red" if status.dead_letters else ""),
    ]


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 10 else render.duration(seconds)
