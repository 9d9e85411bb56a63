"""The one place where an error becomes text on standard error and an exit code.

    0 fine · 1 it failed while running · 2 what the user gave can't be used · 130 Ctrl-C

No traceback for an error that Turnmill raises on purpose; any other exception is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from turnmill.errors import Cancelled, InvalidInput, TurnmillError

EXIT_FAILED = 1
EXIT_INVALID_INPUT = 2
EXIT_INTERRUPTED = 130


class SuggestingGroup(click.Group):
    """Lists its commands in the order they were added; names the closest one, and all, when a command is unknown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises `click.UsageError` (exit code 2) for a command that does not exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            commands = [each for each in self.list_commands(ctx) if not self.commands[each].hidden]
            close = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else "."
            ctx.fail(f"No such command {name!r}{hint} Commands: {', '.join(commands)}")
        return super().resolve_command(ctx, args)


class SectionedGroup(SuggestingGroup):
    """Its help lists the commands under headings, given as the names of commands by heading."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str | None]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Hidden commands, and headings without any other, are left out."""
        width = max(map(len, self.commands))
        for title, names in self._sections.items():
            shown = [self.commands[name] for name in names if name is not None and not self.commands[name].hidden]
            if not shown:
                continue
            with formatter.section(title):
                # The same width in each section, so that the texts stand in one column.
                formatter.write_dl(
                    [(f"{each.name:{width}}", each.get_short_help_str(formatter.width - width - 6)) for each in shown]
                )


def run_cli(group: click.Group, argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the process's arguments when None) names; the exit code to end the process with."""
    try:
        code = group.main(args=None if argv is None else list(argv), prog_name="turnmill", standalone_mode=False)
    except InvalidInput as error:
        click.echo(f"Error: {error}", err=True)
        return EXIT_INVALID_INPUT
    except Cancelled:
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    except TurnmillError as error:
        click.echo(f"Error: {error}", err=True)
        return EXIT_FAILED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    # Click turns Ctrl-C inside a command into Abort.
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    # `ctx.exit(n)` arrives as the integer n, an ordinary return as whatever the command returned.
    return code if type(code) is int else 0
