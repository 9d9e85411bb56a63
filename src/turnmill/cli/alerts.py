"""`turnmill alerts`: what was alerted about, whether it is over, and where it went."""

import json
from pathlib import Path

import click
import msgspec

from turnmill.cli import render
from turnmill.cli.show import find_run, json_option, root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.errors import InvalidInput, NotFound
from turnmill.records import Alert, AlertKind
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.watching.alarms import look_at_alerts, open_alarms

KINDS = [str(kind) for kind in AlertKind]


@click.command(short_help="List what was alerted about.")
@click.argument("run_id", metavar="[RUN]", required=False)
@root_option
@click.option("--open", "only_open", is_flag=True, help="Only what is not over.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    metavar="KIND",
    help=f"Only this kind, repeatable: {', '.join(KINDS)}.",
)
@click.option("--resolve", "resolved_id", metavar="ALERT", help="Tell everybody who was told that this one is over.")
@json_option("Print a list of objects, one an alert, evidence and deliveries included.")
def alerts(
    run_id: str | None, root: Path, only_open: bool, kinds: tuple[str, ...], resolved_id: str | None, as_json: bool
) -> None:
    """List alerts, of one run or of all, oldest first; where they went is said by turnmill.toml."""
    if resolved_id is not None:
        if run_id is not None or only_open or kinds:
            raise InvalidInput("--resolve takes one alert: leave out RUN, --open and --kind")
        found = [run_loop(_resolve(root, resolved_id))]
    else:
        if run_id is not None:
            find_run(root, run_id)
        found = [
            alert
            for alert in look_at_alerts(root, run_id)
            if (not kinds or alert.kind in kinds) and not (only_open and alert.resolved_at)
        ]
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(alert) for alert in found]))
        return
    console = PlainConsole()
    for alert in found:
        for text in render.alert_lines(alert):
            say(console, text)
    if not found:
        which = " open" if only_open else ""
        of_kind = f" of kind {' or '.join(kinds)}" if kinds else ""
        click.echo(f"no{which} alerts{of_kind} in {root}" + (f" about {run_id}" if run_id else ""))


async def _resolve(root: Path, alert_id: str) -> Alert:
    """Record that it is over and have that delivered, here or by the process that delivers."""
    known = {alert.alert_id: alert for alert in look_at_alerts(root)}
    if alert_id not in known:
        raise NotFound(f"there is no alert {alert_id!r} in {root}; `turnmill alerts --open` lists them")
    alert = known[alert_id]
    if alert.resolved_at is not None:
        raise InvalidInput(f"alert {alert_id} is over already")
    last = [one for one in known.values() if one.dedup_key == alert.dedup_key][-1]
    async with open_alarms(root) as dispatcher:
        resolved = None
        if last is alert:
            resolved = await dispatcher.resolve(alert.kind, run_id=alert.run_id, stage=alert.stage)
    if resolved is None:
        raise InvalidInput(f"alert {alert_id} has been replaced by a later one about the same: {last.alert_id}")
    return resolved
