"""`turnmill chat`: talk to the model that was trained, in the terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text

from turnmill.cli.serve import step_option
from turnmill.cli.show import root_option
from turnmill.cli.view import PlainConsole, say
from turnmill.errors import GenerationFailed, printable
from turnmill.wiring.chatting import ChatSession
from turnmill.wiring.serving import find_model

_HELP = "/reset begins anew · /system TEXT sets the system message and begins anew · /quit or Ctrl-D ends"


@click.command(short_help="Talk to a trained model.")
@click.argument("target", metavar="RUN|MODEL")
@step_option
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--prompt", metavar="TEXT", help="Say this, print the answer, and end.")
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), help="That of the training by default; 0 is greedy.")
@click.option("--seed", type=int, help="The same words get the same answers.")
@root_option
def chat(
    target: str,
    step: int | None,
    system: str | None,
    prompt: str | None,
    temperature: float | None,
    seed: int | None,
    root: Path,
) -> None:
    """Talk to a run's final checkpoint, one of its steps, a shipped model or a folder with a Hugging Face model.

    Ctrl-C stops an answer, Ctrl-D ends. Without a terminal each line of the input is one message.
    """
    model = find_model(root, target, step)
    session = ChatSession(model, temperature=temperature, seed=seed)
    session.reset(system)
    if prompt is not None:
        _answer(session, prompt)
        return
    console = PlainConsole(stderr=True)
    if sys.stdin.isatty():
        say(console, Text(f"{model.name}: {_HELP}", style="dim"))
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset" or line.startswith("/system "):
            session.reset(session.system if line == "/reset" else line.removeprefix("/system ").strip())
            say(console, Text("a new conversation begins", style="dim"))
        elif line.startswith("/"):
            say(console, Text(_HELP, style="dim"))
        else:
            _reply(session, line, console)


def _reply(session: ChatSession, line: str, console: PlainConsole) -> None:
    """In a terminal a message that can't be answered is told, and the next one may be; a script must see it fail."""
    try:
        _answer(session, line)
    except GenerationFailed as error:
        if not sys.stdin.isatty():
            raise
        say(console, Text(str(error), style="red"))


def _lines() -> Iterator[str]:
    """What is typed or piped, without empty lines; Ctrl-C at the prompt gives a new one."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        # Editing and history of the line.
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            click.echo()
            continue
        if not is_terminal and not line:
            return
        if line.strip():
            yield line.strip()


def _answer(session: ChatSession, text: str) -> None:
    """Print the answer as it comes."""
    with _interruptible() as stopped:
        for part in session.answer(text, lambda: bool(stopped)):
            sys.stdout.write(_shown(part))
            sys.stdout.flush()
    sys.stdout.write(" [stopped]\n" if stopped else "\n")
    sys.stdout.flush()


def _shown(part: str) -> str:
    """A model may write anything, but nothing that a terminal acts on."""
    if not sys.stdout.isatty():
        return part
    return "".join(char if char in "\n\t" else printable(char) for char in part)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C does not break into the engine's work: it is noted, in the list, and looked at between two tokens."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
