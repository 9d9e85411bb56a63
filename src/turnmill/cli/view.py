"""What a run shows while it goes on: a live view in a terminal, else a line for every stage and some steps."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from turnmill.cli import render
from turnmill.errors import Cancelled, InvalidInput
from turnmill.records import Metric, Run
from turnmill.wiring.reading.runs import follow

# Without a terminal, about so many steps of a run get a line.
NUM_LINES = 10
# What these say as a warning (a process started again, a slow stage) is worth interrupting the view for.
TELLING = (
    "turnmill.pipeline",
    "turnmill.wiring.watching.monitor",
    "turnmill.backends.embedded.launcher",
    "turnmill.backends.embedded.bucket",
)


class PlainConsole(Console):
    """A console whose closed pipe is an ordinary error: rich's own would end the process within the event loop."""

    def on_broken_pipe(self) -> None:
        """Called while `BrokenPipeError` is handled: let it go on."""
        raise


def say(console: Console, text: str | Text) -> None:
    """Print prose: wrapped at words in a terminal, one line a sentence for grep and logs."""
    text = Text(text) if isinstance(text, str) else text
    console.print(text, soft_wrap=not console.is_terminal or text.no_wrap is True)


def confirm(what: str, question: str, *, otherwise: str = "give --yes") -> None:
    """Have a person agree; raises `Cancelled` for one who does not, `InvalidInput` where there is no terminal."""
    if not sys.stdin.isatty():
        raise InvalidInput(f"there is no terminal to ask whether to remove {what}: {otherwise}")
    if not click.confirm(question, err=True):
        raise Cancelled("nothing was changed")


def command(text: str, *, style: str = "") -> Text:
    """A line with a command that people copy: `say` leaves its breaking to the terminal, which knows how to undo it."""
    return Text(text, style=style, no_wrap=True)


class WarningsShown(logging.Handler):
    """Warnings (not errors: those end the run and are its result) as lines of a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.addFilter(lambda record: record.levelno == logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, Text(f"warning: {record.getMessage()}", style="yellow"))

    def __enter__(self) -> "WarningsShown":
        for name in TELLING:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in TELLING:
            logging.getLogger(name).removeHandler(self)


async def show(root: Path, run_id: str, console: Console, *, ended: asyncio.Event | None = None) -> None:
    """Show a run until it is final or `ended` is set; what stays on the screen is how it ended."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            async for run, metrics in follow(root, run_id, ended=ended):
                live.update(render.live_view(run, metrics), refresh=True)
        return
    async for line in progress(root, run_id, ended=ended):
        say(console, line)


async def progress(root: Path, run_id: str, *, ended: asyncio.Event | None = None) -> AsyncIterator[str]:
    """A line for every stage and some steps of a run, until it is final or `ended` is set."""
    num_stages, num_steps = 0, 0
    async for run, metrics in follow(root, run_id, ended=ended):
        lines = [(stage.started_at, f"stage {stage.name}") for stage in run.current_stages[num_stages:]]
        lines += [(metric.time, line) for metric in metrics[num_steps:] if (line := _line(run, metric))]
        for _, line in sorted(lines):
            yield line
        num_stages, num_steps = len(run.current_stages), len(metrics)


def _line(run: Run, metric: Metric) -> str | None:
    """The line of a step, for the first, the last, some in between, and each that was evaluated."""
    max_steps = render.max_steps_of(run)
    told = metric.step in (1, max_steps) or metric.step % max(1, max_steps // NUM_LINES) == 0
    told = told or any(name in metric.values for name in ("val_solved", "val_failed"))
    return render.step_line(metric, max_steps) if told else None


async def print_steps(root: Path, run_id: str) -> None:
    """One JSON object a step until the run is final, then one with its figures."""
    num_steps = 0
    seen: tuple[Run, list[Metric]] | None = None
    async for run, metrics in follow(root, run_id):
        for metric in metrics[num_steps:]:
            click.echo(json.dumps({"step": metric.step, "time": metric.time, **metric.values}))
        num_steps, seen = len(metrics), (run, metrics)
    if seen is not None:
        click.echo(json.dumps(render.summary(*seen)))
