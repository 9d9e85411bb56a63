"""`turnmill logs`: the logs of a run's roles as one. It reads and changes nothing."""

import errno
import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.text import Text

from turnmill.cli.show import choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole
from turnmill.errors import InvalidInput
from turnmill.pipeline.stages import stages_of
from turnmill.records import Run, RunKind
from turnmill.wiring.reading.logs import LogRecord, MergedLogs, matches, roles_of
from turnmill.wiring.reading.runs import look_at_run, look_at_runs

INTERVAL_S = 0.3
_STDOUT = 1
# The run's record is read less often than the logs: it is a file that others write.
NUM_READS_A_LOOK = 4
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}


@click.command(short_help="Show the logs of a run's roles, merged.")
@click.argument("run_id", metavar="RUN")
@root_option
@click.option("--role", "roles", multiple=True, metavar="NAME", help="Only this one; `replica` is all replicas.")
@click.option("--stage", metavar="NAME", help="Only what was logged while this stage went on.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Begin with the last so many entries.")
@json_option("Print one object an entry.")
def logs(
    run_id: str,
    root: Path,
    roles: tuple[str, ...],
    stage: str | None,
    follow: bool,
    lines: int | None,
    as_json: bool,
) -> None:
    """Show the logs of all roles of RUN in the order of time, each entry with its role in front.

    A traceback stays with its entry. Times are local; with --json they are seconds since 1970.
    """
    run = choose_run(look_at_runs(root), root, run_id)
    folder = root / "runs" / run_id / "logs"
    known = sorted({*roles_of(folder), *_expected_roles(run)})
    _check_roles(roles, known)
    name = None if stage is None else _stage_name(run, stage, follow=follow)
    write = _writer(run_id, [role for role in known if matches(role, roles)], as_json=as_json)
    merged = MergedLogs(folder, roles)
    try:
        first: Iterator[LogRecord] | deque[LogRecord] = _within(
            run, name, merged.read(pause=True, to_the_end=not follow)
        )
        if lines is not None:
            first = deque(first, maxlen=lines)
        num_entries = _write_all(first, write)
        if follow:
            _follow(root, run, name, merged, write)
        elif not num_entries:
            click.echo(f"nothing was logged yet in {folder}" if not roles_of(folder) else "no such entries", err=True)
    finally:
        merged.close()


def _follow(root: Path, run: Run, stage: str | None, merged: MergedLogs, write: Callable[[LogRecord], None]) -> None:
    """Until the run has ended and its logs are silent."""
    is_final, num_reads = run.status.is_final, 0
    while True:
        found = list(merged.read())
        num_reads += 1
        if not is_final or found:
            if stage is not None or num_reads % NUM_READS_A_LOOK == 0:
                # After the logs: what is in them is of a stage that this record knows.
                run = look_at_run(root, run.run_id)
                is_final = run.status.is_final
            _write_all(_within(run, stage, found), write)
        elif is_final:
            _write_all(_within(run, stage, merged.read(to_the_end=True)), write)
            return
        _check_reader()
        time.sleep(INTERVAL_S)


def _check_reader() -> None:
    """Raises `BrokenPipeError` when nobody reads standard output any more: a silent log would never find out."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _write_all(records: Iterator[LogRecord] | Sequence[LogRecord], write: Callable[[LogRecord], None]) -> int:
    number = 0
    for record in records:
        write(record)
        number += 1
    return number


# ---------------------------------------------------------------- what is shown


def _expected_roles(run: Run) -> list[str]:
    """Roles that a run of this kind has, whether or not they began."""
    replicas = [f"replica-{index}" for index in range(int(run.config.get("generation_replicas", 1)))]
    return ["control", *replicas, "worker-0", *(["trainer"] if run.kind is RunKind.TRAIN else [])]


def _check_roles(names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if not any(matches(role, [name]) for role in known)]
    if unknown:
        raise InvalidInput(f"this run has no role {', '.join(map(repr, unknown))}; roles: {', '.join(known)}")


def _stage_name(run: Run, stage: str, *, follow: bool) -> str:
    """The name of a stage that began, or (to follow) that will; capitals do not matter."""
    begun = list(dict.fromkeys(record.name for record in run.stages))
    awaited = [each.name for each in stages_of(run.kind)] if follow and not run.status.is_final else []
    names = {name.lower(): name for name in [*begun, *awaited]}
    if stage.lower() not in names:
        there = f"stages: {', '.join(names.values())}" if names else "none has begun"
        raise InvalidInput(f"run {run.run_id} has no stage {stage!r}; {there}")
    return names[stage.lower()]


def _within(run: Run, stage: str | None, records: Iterator[LogRecord] | Sequence[LogRecord]) -> Iterator[LogRecord]:
    """Those that were logged while the stage went on, in any attempt of the run."""
    if stage is None:
        yield from records
        return
    spans = [
        # Logs tell milliseconds, cut off.
        (math.floor(each.started_at * 1000) / 1000, _end_of(run, each.ended_at))
        for each in run.stages
        if each.name == stage
    ]
    for record in records:
        if record.time is not None and any(start <= record.time <= end for start, end in spans):
            yield record


def _end_of(run: Run, ended_at: float | None) -> float:
    """A stage without an end goes on, or went on until the run ended."""
    if ended_at is not None:
        return ended_at
    return run.ended_at if run.status.is_final and run.ended_at is not None else math.inf


# ---------------------------------------------------------------- how it is shown


def _writer(run_id: str, roles: Sequence[str], *, as_json: bool) -> Callable[[LogRecord], None]:
    if as_json:
        return lambda record: click.echo(json.dumps(_as_object(run_id, record)))
    console = PlainConsole()
    width = max(map(len, roles), default=0)
    colours = {role: COLOURS[index % len(COLOURS)] for index, role in enumerate(roles)}

    def write(record: LogRecord) -> None:
        for text in _texts(record, width, colours.get(record.role, "white")):
            if console.is_terminal:
                console.print(text, soft_wrap=True)
            else:
                click.echo(text.plain)

    return write


def _texts(record: LogRecord, width: int, colour: str) -> list[Text]:
    """Its lines, each with the role in front."""
    style = LEVEL_STYLES.get(record.level, "")
    role = (f"{record.role:{width}}  ", colour)
    own, *more = record.lines
    if record.level:
        at = "" if record.time is None else datetime.fromtimestamp(record.time).isoformat(" ", timespec="milliseconds")
        about = f" [{record.at}]" if record.at else ""
        head = Text.assemble(
            role, (f"{at} ", "dim"), (record.level, style), f" {record.logger}: ", _printable(own), about
        )
    else:
        head = Text.assemble(role, (_printable(own), "dim"))
    return [head, *(Text.assemble(role, (_printable(line), style or "dim")) for line in more)]


def _printable(line: str) -> str:
    """Without the characters that a terminal acts on; tabs stay."""
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line)


def _as_object(run_id: str, record: LogRecord) -> dict[str, object]:
    fields = {
        "time": record.time,
        "utc": None
        if record.time is None
        else datetime.fromtimestamp(record.time, UTC).isoformat(timespec="milliseconds"),
        "run": run_id,
        "role": record.role,
        "level": record.level or None,
        "logger": record.logger or None,
        "at": record.at,
        "message": "\n".join(record.lines),
    }
    return {key: value for key, value in fields.items() if value is not None}
