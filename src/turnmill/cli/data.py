"""`turnmill data`: look at a data file before a run does."""

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnmill.cli.errors import EXIT_INVALID_INPUT, SuggestingGroup
from turnmill.intake.dataset import DISTINCT_LIMIT, Report, validate


@click.group(cls=SuggestingGroup)
def data() -> None:
    """Check data files."""


@data.command("validate", short_help="Check every row of a .jsonl file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--max-problems", type=click.IntRange(min=1), default=100, show_default=True, help="Problems to list.")
@click.pass_context
def validate_command(ctx: click.Context, file: Path, as_json: bool, max_problems: int) -> None:
    """Check every row of FILE (.jsonl): exit code 0 if all can be used, 2 if not."""
    report = validate(file, max_problems=max_problems)
    if as_json:
        click.echo(msgspec.json.encode({"ok": report.ok, **msgspec.to_builtins(report)}))
    else:
        _print(report)
    if not report.ok:
        ctx.exit(EXIT_INVALID_INPUT)


def _print(report: Report) -> None:
    console = Console()
    if report.ok:
        console.print(_good(report), highlight=False, soft_wrap=True)
    elif console.is_terminal:
        console.print(_table(report))
        if report.num_problems > len(report.problems):
            console.print(
                f"and {report.num_problems - len(report.problems)} more (--max-problems lists them)", highlight=False
            )
    else:
        # One problem a line, for grep and editors.
        click.echo(report.summary(max_lines=len(report.problems)))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _good(report: Report) -> Text:
    stats = report.stats
    answers = f", {_count(stats.distinct_answers, 'answer')}" if "answer" in stats.keys else ""
    return Text.assemble(
        ("valid: ", "bold green"),
        f"{report.path}: {_plural(report.num_rows, 'row')}, {_count(stats.distinct_prompts, 'prompt')}{answers}, "
        f"{stats.num_bytes} bytes, SHA-256 {report.digest[:16]}…",
    )


def _count(number: int, noun: str) -> str:
    if number >= DISTINCT_LIMIT:
        return f"{number} or more different {noun}s"
    return _plural(number, f"different {noun}")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _table(report: Report) -> Table:
    table = Table(title=Text(f"{report.path}: {_plural(report.num_problems, 'problem')}"), title_justify="left")
    table.add_column("where", no_wrap=True)
    table.add_column("field", overflow="fold")
    table.add_column("rule", no_wrap=True)
    table.add_column("message", overflow="fold")
    name = Path(report.path).name
    for problem in report.problems:
        where = ":".join([name, *(str(part) for part in (problem.line, problem.column) if part is not None)])
        table.add_row(Text(where), Text(problem.field or ""), Text(problem.rule), Text(problem.message))
    return table
