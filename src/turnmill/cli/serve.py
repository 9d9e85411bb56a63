"""`turnmill serve`: the API of OpenAI for the model that was trained."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from turnmill.cli.show import root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.errors import InvalidInput
from turnmill.telemetry import configure_logging
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.serving import Address, ServedModel, find_model, serve_model
from turnmill.wiring.variables import log_format

TOKEN_VARIABLE = "TURNMILL_SERVE_TOKEN"
DEFAULT_PORT = 8000
_LOCAL = ("127.0.0.1", "localhost", "::1")

step_option = click.option("--step", type=click.IntRange(min=0), metavar="N", help="The run's checkpoint of this step.")


@click.command(short_help="Serve a trained model over OpenAI's API.")
@click.argument("target", metavar="RUN|MODEL")
@step_option
@click.option("--host", default=_LOCAL[0], show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"File with the bearer token that clients must show (or {TOKEN_VARIABLE}); needed beyond this machine.",
)
@click.option("--slots", type=click.IntRange(1, 1024), default=16, show_default=True, help="Answers at the same time.")
@root_option
def serve(target: str, step: int | None, host: str, port: int, token_file: Path | None, slots: int, root: Path) -> None:
    """Serve a run's final checkpoint, one of its steps, a shipped model or a folder with a Hugging Face model.

    Chat completions and completions as OpenAI has them, streamed or not, until Ctrl-C; what is being answered then is
    answered first, unless Ctrl-C comes again. Messages are rendered as they were in training.
    """
    model = find_model(root, target, step)
    address = Address(host=host, port=port, token=_token(token_file))
    if host not in _LOCAL and address.token is None:
        raise InvalidInput(
            f"--host {host} lets other machines in: set a token, in {TOKEN_VARIABLE} or with --token-file FILE"
        )
    configure_logging("serve", form=log_format())
    run_loop(_serve(model, address, slots))


async def _serve(model: ServedModel, address: Address, num_slots: int) -> None:
    console = PlainConsole()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def ready(url: str) -> None:
        say(console, f"serving {model.name} at {url} (Ctrl-C ends this)")

    with _on_signals(stop, hurry):
        say(console, f"loading {model.folder}")
        await serve_model(model, address, num_slots=num_slots, stop=stop, hurry=hurry, ready=ready)


@contextmanager
def _on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM stops, the second one cuts what is still being answered."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _token(file: Path | None) -> str | None:
    """Never an argument of the command: those are seen by everybody on the machine."""
    if file is None:
        token, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
        if token is None:
            return None
    else:
        where = f"--token-file {file}"
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{where} can't be read: {error}") from error
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput(f"{where} must hold one token: printable ASCII without spaces")
    return token
