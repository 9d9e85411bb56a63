"""`turnmill up` and `turnmill upload`: tasks that are put into a folder train by themselves."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click

from turnmill.backends.embedded import open_bucket
from turnmill.backends.embedded.bucket import HELD_OUT_SUFFIX, SIDECAR_SUFFIX, beside
from turnmill.cli import render
from turnmill.cli.narrator import Narrator
from turnmill.cli.options import EPILOG, CommandWithParameters, collect_flags, config_options, unsafe_env_option
from turnmill.cli.run import control_log, data_file, on_signals
from turnmill.cli.show import at_root, find_run, json_option, root_option
from turnmill.cli.view import PlainConsole, WarningsShown, say
from turnmill.wiring.backend import check_uploads
from turnmill.wiring.deployment import Deployment, Layers, News
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.mirroring import mirrored
from turnmill.wiring.running.cancelling import cancel as cancel_run
from turnmill.wiring.variables import log_format


@click.command(cls=CommandWithParameters, epilog=EPILOG, short_help="Train on whatever is uploaded.")
@click.option(
    "--max-parallel-runs", type=click.IntRange(1, 64), default=1, show_default=True, help="Runs at the same time."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Of the API, on 127.0.0.1."
)
@unsafe_env_option
@root_option
@json_option("Print one object for each thing that happens.")
@config_options()
def up(max_parallel_runs: int, port: int, config_file: Path | None, root: Path, as_json: bool, **flags: object) -> None:
    """Watch ROOT/bucket/training-data and train on each .jsonl file that is put there, until Ctrl-C.

    Parameters given here hold for all uploads; NAME.config.toml beside NAME.jsonl, put there first, overrides them for
    that upload, and NAME.eval.jsonl, put there first as well, holds its held-out tasks. Runs that are stopped or killed
    go on when the command is started again. The API and /metrics are where ROOT/control.json says, for those who have
    the token in ROOT/control.token.
    """
    log_format()  # a bad one is refused before anything is served
    check_uploads(root)
    layers = Layers(file=config_file, environ=os.environ, flags=collect_flags(flags))
    run_loop(_serve(root, layers, max_parallel_runs, port, as_json))


async def _serve(root: Path, layers: Layers, max_parallel_runs: int, port: int, as_json: bool) -> None:
    # A web framework that no other command needs.
    from turnmill.control_api.access import TOKEN_FILE
    from turnmill.control_api.server import serve_api

    console = PlainConsole(stderr=as_json)
    stop = asyncio.Event()
    closed: list[BrokenPipeError] = []
    narrator = None if as_json else Narrator(root, console)

    def tell(news: News) -> None:
        try:
            if narrator is None:
                summary = render.summary(news.run, []) if news.run else None
                click.echo(json.dumps({"text": news.text, "run": summary}))
            else:
                narrator.tell(news)
        except BrokenPipeError as error:
            # Nobody listens any more. It is no failure of the run that this is about: all ends in order first.
            closed.append(error)
            stop.set()

    deployment = Deployment(root, layers, max_parallel_runs=max_parallel_runs, tell=tell)

    @asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        async with mirrored(root) as start_mirror, serve_api(root, port=port) as url:
            start_mirror(None)
            say(console, f"the API is at {url}; its token is in {root / TOKEN_FILE}")
            yield

    def ready() -> None:
        say(console, f"put .jsonl files into {deployment.folder} (Ctrl-C ends this; runs go on next time)")

    stopping = "stopping: the processes of all runs are ended"
    with on_signals(stop, console, stopping), control_log(root / "logs" / "control.log"), WarningsShown(console):
        try:
            await deployment.up(stop, ready, beside=beside)
        finally:
            if narrator is not None:
                await narrator.close()
    if closed:
        raise closed[0]


@click.command(short_help="Put a file of tasks where `turnmill up` finds it.")
@click.argument("file", type=data_file)
@click.option("--name", metavar="KEY", help="Name in the bucket, with folders if wanted; the file's name by default.")
@click.option("--config", "sidecar", type=data_file, metavar="FILE", help="Parameters for this upload alone (.toml).")
@click.option(
    "--eval-data", "held_out", type=data_file, metavar="FILE", help="Held-out tasks (.jsonl), played by both models."
)
@root_option
@json_option("Print one object: where the file lies.")
def upload(
    file: Path, name: str | None, sidecar: Path | None, held_out: Path | None, root: Path, as_json: bool
) -> None:
    """Copy FILE into the deployment's bucket, whole or not at all; a run is made of it if `turnmill up` runs or when it
    is started."""
    check_uploads(root)
    target = open_bucket(root).put(file, name or file.name, sidecar=sidecar, held_out=held_out)
    for suffix, given in ((SIDECAR_SUFFIX, sidecar), (HELD_OUT_SUFFIX, held_out)):
        left = beside(target, suffix)
        if given is None and left is not None and left.exists():
            click.echo(f"warning: {left} was there before, and comes with it", err=True)
    if as_json:
        click.echo(json.dumps({"uploaded": str(target)}))
        return
    click.echo(f"uploaded {target}; `turnmill runs{at_root(root)}` shows the run that it becomes")


@click.command(short_help="End a run early.")
@click.argument("run_id", metavar="RUN")
@root_option
@json_option("Print one object once it has ended: the run and its status.")
def cancel(run_id: str, root: Path, as_json: bool) -> None:
    """End a run early, whichever process has it; its records stay, and `turnmill resume` could go on with it."""
    find_run(root, run_id)

    def asked() -> None:
        click.echo(f"run {run_id} is told to end; its processes end and what is done stays", err=True)

    run = run_loop(cancel_run(root, run_id, asked=asked))
    click.echo(
        json.dumps({"run_id": run_id, "status": run.status}) if as_json else f"run {run_id} is {run.status.value}"
    )
