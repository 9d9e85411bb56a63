"""`turnmill cleanup`: what will be removed is shown and asked about, then it goes, and what remains is shown."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnmill.cli.errors import EXIT_FAILED
from turnmill.cli.show import json_option, root_option
from turnmill.cli.view import PlainConsole, confirm, say
from turnmill.errors import InvalidInput
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.running.cleanup import Remains, clean_up
from turnmill.wiring.running.cleanup_plan import Item, Plan, plan_for_all, plan_for_run

_UNITS = ("B", "kB", "MB", "GB", "TB")


@click.command(short_help="End a run and remove all that is left of it.")
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--all", "is_all", is_flag=True, help="The whole deployment instead of one run.")
@click.option("--retain-data", is_flag=True, help="Keep the data: whatever lies in the bucket. All else goes.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@root_option
@json_option("Print one object: what was removed, kept and remains. Progress goes to standard error.")
def cleanup(
    run_id: str | None, is_all: bool, retain_data: bool, dry_run: bool, yes: bool, root: Path, as_json: bool
) -> None:
    """End RUN, whatever state it is in, and remove its processes, queues, records, weights, checkpoints and logs.

    Its data goes with it (the upload it was made of, and the model that was published) unless --retain-data is given.
    What was not published is lost either way. Cut short, the same command completes it.
    """
    if (run_id is None) is not is_all:
        raise InvalidInput("name one run, or give --all for the whole deployment; `turnmill runs` lists the runs")
    plan = (
        plan_for_all(root, retain_data=retain_data)
        if run_id is None
        else plan_for_run(root, run_id, retain_data=retain_data)
    )
    console = PlainConsole(stderr=as_json)
    if not plan.is_empty or not as_json:
        console.print(_table(plan))
    if dry_run or plan.is_empty:
        if as_json:
            click.echo(json.dumps({**_as_object(plan), "dry_run": dry_run, "remains": None}))
        else:
            say(console, "nothing was changed" if dry_run else f"there is nothing to remove in {root}")
        return
    if not yes:
        _confirm(plan)
    remains = run_loop(clean_up(plan, retain_data=retain_data, tell=lambda text: say(console, text)))
    if as_json:
        click.echo(json.dumps({**_as_object(plan), "dry_run": False, "remains": asdict(remains)}))
    else:
        for line in _lines(plan, remains):
            say(console, line)
    if not remains.is_clean:
        raise SystemExit(EXIT_FAILED)


def _confirm(plan: Plan) -> None:
    what = f"run {plan.run_id}" if plan.run_id else f"the deployment {plan.root}"
    confirm("this", f"End and remove {what}?", otherwise="give --yes, or --dry-run to only look")


def _table(plan: Plan) -> Table:
    title = Text(f"in {plan.root}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("files", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for run in plan.runs:
        table.add_row("end" if not run.status.is_final else "remove", "run", "", "", f"{run.run_id} ({run.status})")
    for one in plan.processes:
        ports = f", port {', '.join(map(str, one.ports))}" if one.ports else ""
        table.add_row("end", "process", "", "", f"{one.name} (pid {one.pid}{ports})")
    if plan.elsewhere is not None:
        table.add_row("remove", "queues, records, blobs", "", "", plan.elsewhere)
    for action, items, style in (("remove", plan.removed, ""), ("keep", plan.retained, "green")):
        for item in items:
            where = Text(str(item.path.relative_to(plan.root)))
            table.add_row(action, item.what, str(item.num_files), size(item.num_bytes), where, style=style)
    total = plan.removed
    table.add_section()
    table.add_row("remove", "in all", str(sum(i.num_files for i in total)), size(sum(i.num_bytes for i in total)), "")
    return table


def size(num_bytes: int) -> str:
    """`812 B`, `4.1 MB`."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _lines(plan: Plan, remains: Remains) -> list[str]:
    """What remains, class by class: a class that was looked for and is empty is named too."""
    lines = ["what remains:"]
    for name, found in asdict(remains).items():
        lines.append(f"  {name.replace('_', ' ')}: {', '.join(map(str, found)) or 'none'}")
    lines += [f"  kept: {item.what}: {item.path}" for item in plan.retained]
    return lines


def _as_object(plan: Plan) -> dict[str, Any]:
    return {
        "root": str(plan.root),
        "runs": [run.run_id for run in plan.runs],
        "processes": [{"name": one.name, "pid": one.pid, "ports": list(one.ports)} for one in plan.processes],
        "removed": [_item(item) for item in plan.removed],
        "elsewhere": plan.elsewhere,
        "retained": [_item(item) for item in plan.retained],
    }


def _item(item: Item) -> dict[str, Any]:
    return {**asdict(item), "path": str(item.path)}
