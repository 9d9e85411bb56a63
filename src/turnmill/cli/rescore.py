"""`turnmill rescore`: what the conversations of a run would have earned in an environment that was changed since."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnmill.backends.embedded.files import write_atomically
from turnmill.cli.errors import EXIT_FAILED
from turnmill.cli.options import CommandWithParameters, collect_flags, config_options, unsafe_env_option
from turnmill.cli.show import at_root, choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole, command, say
from turnmill.config import ENVIRONMENT_PARAMETERS, load_config, parameter_names
from turnmill.errors import InvalidInput, printable
from turnmill.records import Purpose
from turnmill.wiring.environments import logged
from turnmill.wiring.event_loop import run_loop
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.rescoring.comparison import Comparison, Rescored, TaskRewards, Verdict
from turnmill.wiring.rescoring.rescore import CHANGEABLE, Rescoring, Selection, config_of, rescore

_EPILOG = (
    "A parameter comes from the last of: the run, --config, a variable TURNMILL_NAME, the command line. Who names "
    "another environment gets none of the run's arguments with it."
)
_ALL = "all"
_STEPS = re.compile(r"(\d{1,9})?(:)?(\d{1,9})?")
_LAST_STEP = 10**9
# Most rows of each table, and of those that could not be scored; `--json` has all of them.
_MOST_TASKS, _MOST_FAILED = 20, 5
# Characters of one reason that are shown.
_MOST_TEXT = 600
# Without a terminal, a line each time that this share is done.
_TOLD_SHARE = 0.1


@click.command("rescore", cls=CommandWithParameters, epilog=_EPILOG, short_help="Score a run's conversations anew.")
@click.argument("run_id", metavar="RUN")
@click.option(
    "--purpose",
    type=click.Choice([*(purpose.value for purpose in Purpose), _ALL]),
    default=Purpose.TRAIN.value,
    show_default=True,
    help="Only rollouts for this.",
)
@click.option("--steps", metavar="A:B", help="Only rollouts of these optimizer steps, both included.")
@click.option("--sample", "sample_ids", multiple=True, metavar="ROLLOUT", help="Only this rollout; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the last N conversations of those.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the JSON here.")
@unsafe_env_option
@root_option
@json_option("Print the result as one object; all else goes to standard error.")
@config_options(without=frozenset(parameter_names()) - {*ENVIRONMENT_PARAMETERS, *CHANGEABLE})
def rescore_command(
    run_id: str,
    purpose: str,
    steps: str | None,
    sample_ids: tuple[str, ...],
    limit: int | None,
    output: Path | None,
    config_file: Path | None,
    root: Path,
    as_json: bool,
    **flags: object,
) -> None:
    """Play the stored conversations of RUN through its environment as it is now, or another one, and compare rewards.

    What is not said about the environment is as it was for the run. Nothing is sampled: the model's answers are those
    that were stored, and a conversation in which the environment asks for anything else is told to have diverged.
    The run is only read, and may go on meanwhile. Exit code 1: none of the conversations could be rescored.
    """
    run = choose_run(look_at_runs(root), root, run_id)
    selection = Selection(
        purposes=list(Purpose) if purpose == _ALL else [Purpose(purpose)],
        steps=None if steps is None else _steps(steps),
        sample_ids=sample_ids,
        limit=limit,
    )
    if output is not None and not output.absolute().parent.is_dir():
        raise InvalidInput(f"--output {output}: there is no folder {output.absolute().parent}")
    config = config_of(run, load_config(file=config_file, environ=os.environ, flags=collect_flags(flags)))
    with _work() as (log, told):
        found = run_loop(rescore(root, run, config, selection, log=log, told=told))
    content = json.dumps(found.as_object())
    if output is not None:
        _write(output, content)
    if as_json:
        click.echo(content)
    else:
        _show(found, root)
    if not found.comparison.num_rescored:
        click.get_current_context().exit(EXIT_FAILED)


def _steps(text: str) -> tuple[int, int]:
    """`A:B`, with either left out for no bound, or one step."""
    found = _STEPS.fullmatch(text)
    if found is None or not (found[1] or found[3]):
        raise InvalidInput(f"--steps {printable(text)}: must be A:B, A:, :B or one step")
    first = int(found[1] or 0)
    last = int(found[3]) if found[3] else _LAST_STEP if found[2] else first
    if first > last:
        raise InvalidInput(f"--steps {printable(text)}: the first step is behind the last one")
    return first, last


@contextmanager
def _work() -> Iterator[tuple[Path, Callable[[Rescored, int], None]]]:
    """A file for what is logged meanwhile, and whom to tell of each conversation."""
    console = Console(stderr=True)
    counts = dict.fromkeys(Verdict, 0)
    told_at = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="turnmill-rescore-") as folder,
        logged(Path(folder) / "log"),
        console.status(Text("loading the environment")) as status,
    ):

        def told(rescored: Rescored, num: int) -> None:
            nonlocal told_at
            counts[rescored.verdict] += 1
            done = sum(counts.values())
            line = f"{done} of {num}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
            status.update(Text(line))
            if not console.is_terminal and (done == num or done / num >= told_at + _TOLD_SHARE):
                told_at = done / num
                click.echo(line, err=True)

        yield Path(folder) / "log", told


def _write(path: Path, content: str) -> None:
    try:
        write_atomically(path, content.encode() + b"\n")
    except OSError as error:
        raise InvalidInput(f"--output {path}: can't be written: {error.strerror}") from error


# ---------------------------------------------------------------- what is shown


def _show(found: Rescoring, root: Path) -> None:
    console, comparison = PlainConsole(), found.comparison
    for line in _lines(found):
        say(console, line)
    tasks = sorted(
        (task for task in comparison.tasks if task.new != task.old),
        key=lambda task: (-abs(task.new - task.old), task.task_id),
    )
    if tasks:
        console.print(_tasks_table(tasks[:_MOST_TASKS]))
        rest = f"; of them the {_MOST_TASKS} that changed most" if len(tasks) > _MOST_TASKS else ""
        say(console, Text(f"{len(tasks)} of {len(comparison.tasks)} tasks changed{rest}", style="dim"))
    changed = {each.sample.sample_id: each for each in found.rescored if each.change}
    if comparison.most_changed:
        console.print(_samples_table([changed[sample_id] for sample_id in comparison.most_changed]))
        first = comparison.most_changed[0]
        first = printable(first, limit=_MOST_TEXT)
        say(console, command(f"read one: turnmill conversations {found.run_id} {first}{at_root(root)}"))
    for verdict in (Verdict.DIVERGED, Verdict.INVALID):
        _show_failed(console, [each for each in found.rescored if each.verdict is verdict], verdict)


def _lines(found: Rescoring) -> Iterator[str]:
    comparison, environment = found.comparison, found.environment
    arguments = f" {json.dumps(environment.env_args)}" if environment.env_args else ""
    rest = [f"{comparison.num_diverged} diverged"] if comparison.num_diverged else []
    rest += [f"{num} invalid ({reason})" for reason, num in comparison.invalid.items()]
    yield (
        f"rescored {comparison.num_rescored} of {comparison.num_played} conversations of run {found.run_id} with "
        f"{environment.env_id}{arguments}" + (f"; {', '.join(rest)}" if rest else "")
    )
    if found.num_left_out:
        yield f"left out: {found.num_left_out} rollouts without a conversation that was brought to an end"
    if comparison.num_repaired:
        yield f"{comparison.num_repaired} that had no reward have one now; the figures below are of the others"
    if not comparison.num_pairs:
        yield "no conversation has a reward then and now: there is nothing to compare"
        return
    yield _reward_line(comparison)
    yield (
        f"passes (reward at least {comparison.success_threshold:g}): {_share(comparison.old_pass_rate)} → "
        f"{_share(comparison.new_pass_rate)}"
    )
    signal = comparison.signal
    if signal.num:
        incomplete = f"; {signal.num_incomplete} were not rescored as a whole" if signal.num_incomplete else ""
        yield (
            f"groups with signal: {signal.old} → {signal.new} of {signal.num} "
            f"({signal.gained} gained it, {signal.lost} lost it){incomplete}"
        )


def _reward_line(comparison: Comparison) -> str:
    interval = ""
    if comparison.low is not None and comparison.high is not None:
        interval = f" (95 % interval {comparison.low:+.4f} to {comparison.high:+.4f})"
    alike = "" if comparison.correlation is None else f"; correlation {comparison.correlation:.3f}"
    return (
        f"reward: {comparison.old_mean:.4f} → {comparison.new_mean:.4f}, difference {comparison.difference:+.4f}"
        f"{interval}; {comparison.num_changed} of {comparison.num_pairs} changed{alike}"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _tasks_table(tasks: Sequence[TaskRewards]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("task", overflow="fold")
    for name in ("rollouts", "old", "new", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in tasks:
        table.add_row(
            printable(task.task_id), str(task.num), f"{task.old:.3f}", f"{task.new:.3f}", f"{task.new - task.old:+.3f}"
        )
    return table


def _samples_table(samples: Sequence[Rescored]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, title="changed most", title_justify="left")
    table.add_column("rollout", overflow="fold")
    for name in ("old", "new", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in samples:
        table.add_row(printable(each.sample.sample_id), f"{each.old:.3f}", f"{each.new:.3f}", f"{each.change:+.3f}")
    return table


def _show_failed(console: Console, failed: Sequence[Rescored], verdict: Verdict) -> None:
    for each in failed[:_MOST_FAILED]:
        where = f"turn {each.turn}: " if each.turn is not None else f"{each.reason}: " if each.reason else ""
        text = printable(f"{verdict} {each.sample.sample_id}: {where}{each.detail}", limit=_MOST_TEXT)
        say(console, Text(text, style="yellow"))
    if len(failed) > _MOST_FAILED:
        say(console, Text(f"and {len(failed) - _MOST_FAILED} more {verdict}; --json has all", style="dim"))
