"""`turnmill retry`: a run that came to nothing, once more from its beginning."""

import json
from pathlib import Path

import click

from turnmill.cli.options import CommandWithParameters, collect_flags, config_options
from turnmill.cli.run import figures_option, in_foreground
from turnmill.cli.show import at_root, find_run, root_option
from turnmill.errors import Conflict, InvalidInput
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.running.control import execute
from turnmill.wiring.running.retrying import Retry, claim, plan, queue


@click.command(cls=CommandWithParameters, short_help="Do a run that came to nothing once more.")
@click.argument("run_id", metavar="RUN")
@root_option
@figures_option
@config_options()
def retry(run_id: str, config_file: Path | None, root: Path, as_json: bool, **flags: object) -> None:
    """Do a run that failed or was cancelled once more from its beginning, as a run of its own.

    It has the same data and the same parameters, but for those that are given here. The run of an upload is queued for
    `turnmill up`; any other one runs in the foreground. `turnmill resume` instead goes on with the same run.
    """
    run = find_run(root, run_id)
    order = plan(root, run, file=config_file, flags=collect_flags(flags))
    again: Retry = run_loop(claim(root, run, order))
    new_id = again.origin.run_id
    try:
        if run.upload is None:
            in_foreground(
                root,
                lambda cancel, created: execute(root, order, cancel=cancel, created=created, origin=again.origin),
                as_json,
            )
            return
        run_loop(queue(root, again))
    except Conflict as error:
        raise InvalidInput(f"run {run_id} is being retried as {new_id} by another process") from error
    command = f"turnmill status {new_id}{at_root(root)}"
    text = f"run {run_id} is retried as {new_id}, which waits for `turnmill up`"
    click.echo(json.dumps({"run_id": new_id, "retry_of": run_id}) if as_json else f"{text}; `{command}`")
