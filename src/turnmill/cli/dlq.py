"""`turnmill dlq`: what was given up, why, and another try at it."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from turnmill.cli import render
from turnmill.cli.errors import SuggestingGroup
from turnmill.cli.show import at_root, find_run, json_option, root_option
from turnmill.cli.view import PlainConsole, command, say
from turnmill.errors import InvalidInput, NotFound, TurnmillError, printable
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.dead_letters import Letter, LetterKind, choose_letter, look_at_letters
from turnmill.wiring.reading.dead_letters import purge as purge_letter
from turnmill.wiring.reading.dead_letters import redrive as redrive_letter

F = TypeVar("F", bound=Callable[..., Any])


def filter_options(command: F) -> F:
    """Which letters are meant."""
    kinds = click.Choice([kind.value for kind in LetterKind])
    command = click.option("--kind", type=kinds, help="Only letters of this kind.")(command)
    return click.option("--run", "run_id", metavar="RUN", help="Only letters about this run.")(command)


def choice_options(command: F) -> F:
    """One letter by its id, or all that the filters leave."""
    command = click.option("--all", "is_all", is_flag=True, help="All letters, or all that --run and --kind leave.")(
        filter_options(command)
    )
    return click.argument("letter_id", metavar="[ID]", required=False)(command)


@click.group(cls=SuggestingGroup, short_help="List, redrive or purge what was given up.")
def dlq() -> None:
    """Dead letters: uploads that can't be trained, rollouts that no attempt ended, messages received too often, and
    alerts that a channel did not take."""


@dlq.command("list")
@filter_options
@root_option
@json_option("Print a list of objects, one a letter.")
def list_letters(run_id: str | None, kind: str | None, root: Path, as_json: bool) -> None:
    """List dead letters, oldest first. It reads and changes nothing."""
    found = _look(root, run_id, kind)
    if as_json:
        click.echo(json.dumps([letter.as_object() for letter in found]))
    elif found:
        PlainConsole().print(_table(found))
    else:
        click.echo(f"no dead letters in {root}")


@dlq.command()
@click.argument("letter_id", metavar="ID")
@root_option
@json_option("Print one object.")
def show(letter_id: str, root: Path, as_json: bool) -> None:
    """Show one dead letter: input, error, attempts, versions."""
    letter = choose_letter(look_at_letters(root), letter_id)
    if as_json:
        click.echo(json.dumps(letter.as_object()))
        return
    console = PlainConsole()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.dead_at))
    say(console, Text(letter.letter_id, style="bold"))
    say(console, f"given up {when} after {_attempts(letter)}")
    if letter.run_id is not None:
        say(console, f"run: {letter.run_id}")
    say(console, Text(f"error: {letter.error}", style="red"))
    for name, value in letter.input.items():
        say(console, f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    for name, version in letter.versions.items():
        say(console, f"version of {name}: {version}")
    say(console, command(f"next: turnmill dlq redrive {letter.letter_id}{at_root(root)}"))


@dlq.command()
@choice_options
@root_option
@json_option("Print one object a letter.")
def redrive(
    letter_id: str | None, is_all: bool, run_id: str | None, kind: str | None, root: Path, as_json: bool
) -> None:
    """Try once more what was given up.

    An upload is put back under its key, corrected or not; a rollout is played anew, without replay, in an active run
    only; a message goes back to its queue, never received; an alert is delivered again.
    """
    refused: list[TurnmillError] = []
    letters = _choose(root, letter_id, is_all, run_id, kind)
    for letter in letters:
        try:
            said = run_loop(redrive_letter(root, letter))
        except TurnmillError as error:
            # One that can't be redriven must not keep the others back.
            if not is_all:
                raise
            refused.append(error)
            said = f"not redriven: {error}"
        if as_json:
            click.echo(json.dumps({"letter_id": letter.letter_id, "text": said}))
        else:
            click.echo(f"{letter.letter_id}: {said}")
    if is_all and not letters and not as_json:
        click.echo(f"no dead letters in {root}")
    if refused:
        raise InvalidInput(f"{len(refused)} of {len(letters)} dead letters were not redriven: {refused[0]}")


@dlq.command(short_help="Remove dead letters for good, and what is held for them.")
@choice_options
@root_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option("Print one object a letter that was removed.")
def purge(
    letter_id: str | None, is_all: bool, run_id: str | None, kind: str | None, root: Path, yes: bool, as_json: bool
) -> None:
    """Remove dead letters for good, with the files that are held in quarantine for them."""
    letters = _choose(root, letter_id, is_all, run_id, kind)
    if not letters and not as_json:
        click.echo(f"no dead letters in {root}")
    for letter in letters:
        click.echo(f"{'removing' if yes else 'to be removed'}: {_described(letter)}", err=True)
    if letters and not yes:
        if not sys.stdin.isatty():
            raise InvalidInput("nobody can be asked here: give --yes to remove them")
        click.confirm(f"remove {len(letters)} for good?", abort=True, err=True)
    num_removed = 0
    for letter in letters:
        try:
            run_loop(purge_letter(root, letter))
        except NotFound:
            # Somebody else redrove or purged it meanwhile: the others are to go all the same.
            if not is_all:
                raise
            continue
        num_removed += 1
        if as_json:
            click.echo(json.dumps({"letter_id": letter.letter_id}))
    if letters and not as_json:
        click.echo(f"removed {num_removed}")


def _look(root: Path, run_id: str | None, kind: str | None) -> list[Letter]:
    if run_id is not None:
        find_run(root, run_id)
    return look_at_letters(root, run_id=run_id, kind=LetterKind(kind) if kind else None)


def _choose(root: Path, letter_id: str | None, is_all: bool, run_id: str | None, kind: str | None) -> list[Letter]:
    if (letter_id is None) != is_all:
        raise InvalidInput("give the ID of a dead letter (`turnmill dlq list`), or --all, and not both")
    found = _look(root, run_id, kind)
    return found if letter_id is None else [choose_letter(found, letter_id)]


def _described(letter: Letter) -> str:
    held = letter.input.get("held_in") if letter.kind is LetterKind.TRIGGER else None
    return letter.letter_id + (f", and {held} with {letter.input['key']}" if held else "")


def _attempts(letter: Letter) -> str:
    return "1 attempt" if letter.attempts == 1 else f"{letter.attempts} attempts"


def _table(letters: list[Letter]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    # An id is for copying: it is never cut.
    table.add_column("id", no_wrap=True)
    for name in ("age", "attempts", "error"):
        table.add_column(name, overflow="fold", justify="right" if name != "error" else "left")
    for letter in letters:
        age = render.duration(max(0.0, time.time() - letter.dead_at))
        error = printable(" ".join(letter.error.split()), limit=120)
        table.add_row(letter.letter_id, age, str(letter.attempts), error)
    return table
