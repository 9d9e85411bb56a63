"""`turnmill external`: runs on AWS whose trainer and generator are somebody else's."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from turnmill.backends.embedded import disk
from turnmill.cli.deploy import require_extra
from turnmill.cli.options import EPILOG, CommandWithParameters, collect_flags, config_options
from turnmill.cli.show import json_option
from turnmill.cli.view import PlainConsole, confirm, say
from turnmill.config import load_config, parameter_names
from turnmill.config.reads import parameters_of
from turnmill.records import RunKind
from turnmill.wiring import variables
from turnmill.wiring.event_loop import run_loop

if TYPE_CHECKING:
    from turnmill.backends.aws.clients import AwsClients
    from turnmill.backends.aws.settings import AwsSettings
    from turnmill.wiring.running.external import ExternalBegun

F = TypeVar("F", bound=Callable[..., Any])
# The trainer's names of what the stack says.
_TRAINER_KEYS = {
    "rollout_request_arn": "RolloutFunctionArn",
    "rollout_response_sqs_url": "RolloutFinishedQueueUrl",
    "rollout_request_queue_url": "RolloutQueueUrl",
    "generate_request_sqs_url": "RequestQueueUrl",
    "generate_response_sqs_url": "RequestResponseQueueUrl",
}


@click.group(short_help="Runs on AWS whose trainer is somebody else's.")
def external() -> None:
    """Runs on AWS whose trainer and generator are somebody else's: Turnmill plays the environment for them."""


def deployment_options(command: F) -> F:
    """Which deployment is meant."""
    command = click.option("--region", help="AWS region. [default: AWS_REGION, or the shared configuration files]")(
        command
    )
    return click.option("--deployment", default="turnmill", show_default=True, help="Name of the deployment.")(command)


@external.command(cls=CommandWithParameters, epilog=EPILOG)
@click.argument("run_id", metavar="NAME")
@deployment_options
@click.option(
    "--caller", "callers", multiple=True, metavar="ARN", help="Role, user or account that may call the proxy."
)
@click.option(
    "--worker-env",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Gets the variables of its workers, the token among them. [default: NAME.worker.env]",
)
@click.option("--new-token", is_flag=True, help="Its workers need another token from now on.")
@click.option("--no-dependencies", is_flag=True, help="Pack no other packages: an emulator has them.")
@json_option("Print one object. Progress goes to standard error.")
@config_options(without=frozenset(parameter_names()) - parameters_of(RunKind.EXTERNAL))
def begin(
    run_id: str,
    deployment: str,
    region: str | None,
    callers: tuple[str, ...],
    worker_env: Path | None,
    new_token: bool,
    no_dependencies: bool,
    as_json: bool,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Begin the run NAME, or bring one that goes on to these parameters; NAME is the name of its stack, too.

    Idempotent: cut short, the same command completes it.
    """
    with _opened(deployment, region) as (clients, settings):
        from turnmill.wiring.running.external import begin_external

        console = PlainConsole(stderr=as_json)
        begun = run_loop(
            begin_external(
                clients,
                settings,
                run_id,
                load_config(file=config_file, environ=os.environ, flags=collect_flags(flags), kind=RunKind.EXTERNAL),
                callers=callers,
                has_new_token=new_token,
                packs_dependencies=not no_dependencies,
                tell=lambda text: say(console, text),
            )
        )
    file = worker_env or Path(f"{run_id}.worker.env")
    if begun.worker_token is not None:
        _write_secretly(file, _worker_environ(begun, begun.worker_token))
    trainer = {name: begun.outputs[output] for name, output in _TRAINER_KEYS.items()}
    if as_json:
        told = str(file) if begun.worker_token is not None else None
        click.echo(json.dumps({"run": run_id, "trainer": trainer, "outputs": dict(begun.outputs), "worker_env": told}))
        return
    _tell(console, begun, trainer, file)


def _tell(console: Console, begun: "ExternalBegun", trainer: Mapping[str, str], file: Path) -> None:
    say(console, "for the trainer:")
    for name, value in trainer.items():
        say(console, f"  {name}: {value}")
    say(console, f"proxy: {begun.outputs['ProxyFunctionUrl']}")
    if begun.worker_token is None:
        say(console, "its workers have their token; --new-token makes another one")
        return
    run_id = begun.run.run_id
    say(console, f"workers: set -a; . {shlex.quote(str(file))}; set +a")
    say(console, f"         turnmill role worker --root . --run {run_id} --name worker-0")


@external.command()
@click.argument("run_id", metavar="NAME")
@deployment_options
@click.option("--yes", is_flag=True, help="Don't ask before removing it.")
@json_option("Print one object. Progress goes to standard error.")
def end(run_id: str, deployment: str, region: str | None, yes: bool, as_json: bool) -> None:
    """End the run NAME: its queues, table and functions are removed, and all that it stored.

    What is kept is its record among the deployment's. Idempotent.
    """
    console = PlainConsole(stderr=as_json)
    with _opened(deployment, region) as (clients, settings):
        from turnmill.wiring.running.external import end_external

        if not yes:
            what = f"run {run_id} of the deployment {deployment} in {clients.region}, its conversations included"
            confirm(what, f"Remove {what}?")
        run_loop(end_external(clients, settings, run_id, tell=lambda text: say(console, text)))
    if as_json:
        click.echo(json.dumps({"run": run_id, "ended": True}))
    else:
        say(console, f"run {run_id} has ended, and nothing is left of it but its record")


@contextmanager
def _opened(deployment: str, region: str | None) -> "Iterator[tuple[AwsClients, AwsSettings]]":
    require_extra()
    from turnmill.backends.aws.clients import AwsClients
    from turnmill.backends.aws.settings import AwsSettings

    settings = AwsSettings(name=deployment, region=region)
    clients = AwsClients(settings)
    try:
        yield clients, settings
    finally:
        clients.close()


def _worker_environ(begun: "ExternalBegun", token: str) -> dict[str, str]:
    return {
        variables.PROXY_URL: begun.outputs["ProxyFunctionUrl"].rstrip("/"),
        variables.PROXY_AUTH: variables.SIGV4,
        variables.WORKER_TOKEN: token,
        variables.WORKER_CONFIG: json.dumps(begun.run.config, separators=(",", ":")),
    }


def _write_secretly(path: Path, environ: Mapping[str, str]) -> None:
    """For a shell, and for its owner only."""
    content = "".join(f"{name}={shlex.quote(value)}\n" for name, value in environ.items())
    with disk(path):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(content)
