"""`turnmill doctor`: whether a run makes progress, and what holds it up. It reads and changes nothing."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from turnmill.cli import render
from turnmill.cli.errors import EXIT_FAILED
from turnmill.cli.show import choose_run, json_option, root_option
from turnmill.cli.view import PlainConsole, command, say
from turnmill.health.diagnosis import examine
from turnmill.health.replicas import describe
from turnmill.health.report import Diagnosis, Report, Verdict
from turnmill.health.snapshot import Snapshot
from turnmill.records import RunStatus
from turnmill.wiring.reading.queues import only_active
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.watching.examining import examine_anew

_STYLES = {Verdict.STALLED: "bold red", Verdict.FAULTY: "bold red", Verdict.ENDED_BADLY: "bold red"}
# Characters of a log line that make it the same text as the summary: at least so many, and as far as so many tell.
_SHORTEST_REPEAT, _COMPARED = 20, 100


@click.command(short_help="Say what holds a run up.")
@click.argument("run_id", metavar="[RUN]", required=False)
@root_option
@json_option("Print one object.")
@click.pass_context
def doctor(ctx: click.Context, run_id: str | None, root: Path, as_json: bool) -> None:
    """Say whether RUN makes progress, which part holds it up and what to do; without RUN the one that goes on, or else
    the next one that waits.

    Looks at the run's files and processes itself, and needs none of them: its control process may be stopped or gone.

    Exit code 0: it makes progress, waits for its turn, or ended as it should. 1: something is wrong.
    """
    runs = look_at_runs(root)
    going = [run for run in runs if run.status in (RunStatus.ACTIVE, RunStatus.INTERRUPTED)]
    if run_id is not None:
        chosen = choose_run(runs, root, run_id)
    else:
        waiting = [run for run in runs if run.status is RunStatus.QUEUED]
        about = going or waiting[:1]
        chosen = about[0] if len(about) == 1 else only_active(runs, root)
    seen = examine_anew(root, chosen.run_id)
    report = examine(seen)
    if as_json:
        click.echo(json.dumps(_as_object(seen, report)))
    else:
        console = PlainConsole()
        for text in _lines(seen, report):
            say(console, text)
    if not report.verdict.is_healthy:
        ctx.exit(EXIT_FAILED)


def _as_object(seen: Snapshot, report: Report) -> dict[str, Any]:
    return {
        "run_id": seen.run.run_id,
        "status": seen.run.status.value,
        "stage": seen.stage,
        "verdict": report.verdict.value,
        "healthy": report.verdict.is_healthy,
        "summary": report.summary,
        "role": report.diagnoses[0].role if report.diagnoses else None,
        "idle_s": seen.idle_s,
        "stall_after_s": seen.stall_after_s,
        "diagnoses": [asdict(diagnosis) for diagnosis in report.diagnoses],
        "processes": [
            {"name": view.name, "state": view.state.value, "pid": view.pid, "cores": view.cores}
            for view in seen.processes
        ],
        "replicas": [
            {
                "name": name,
                "state": status.state.value,
                "version": str(status.version),
                "next_version": None if status.next_version is None else str(status.next_version),
                "age_s": seen.at - status.updated_at,
                "error": status.error,
                "text": describe(status, seen.at),
            }
            for name, status in seen.replicas.items()
        ],
        "queues": {name: asdict(view) for name, view in seen.queues.items()},
    }


def _lines(seen: Snapshot, report: Report) -> list[Text]:
    verdict = (report.verdict.value, _STYLES.get(report.verdict, "bold green"))
    status = (seen.run.status.value, render.RUN_STYLES[seen.run.status])
    lines = [Text.assemble(("run ", "dim"), (seen.run.run_id, "bold"), " ", status, ": ", verdict)]
    # Of a run that failed, both are its error.
    first = report.summary.partition(": ")[2].partition("\n")[0]
    told_below = any(first in each.summary for each in report.diagnoses)
    if report.verdict is not Verdict.ENDED_BADLY or not told_below:
        lines.append(Text(report.summary))
    if seen.run.status is RunStatus.ACTIVE:
        lines += [Text(f"{name} {describe(status, seen.at)}", "dim") for name, status in seen.replicas.items()]
    for number, diagnosis in enumerate(report.diagnoses):
        lines += [Text(), *_diagnosis(diagnosis, is_first=number == 0)]
    return lines


def _repeats(line: str, summary: str) -> bool:
    """Whether a log line tells, behind what comes before a colon, nothing but what the summary does."""
    rest = line
    while rest := rest.partition(": ")[2]:
        if len(rest) >= _SHORTEST_REPEAT and rest[:_COMPARED] in summary:
            return True
    return False


def _diagnosis(diagnosis: Diagnosis, *, is_first: bool) -> list[Text]:
    lines = [Text.assemble((diagnosis.role, "bold red" if is_first else "bold yellow"), f": {diagnosis.summary}")]
    lines += [Text(f"  - {fact}") for fact in diagnosis.evidence]
    if diagnosis.conversation is not None:
        lines.append(Text(f"  conversation: {shlex.quote(diagnosis.conversation)}"))
    if news := [line for line in diagnosis.log_lines if not _repeats(line, diagnosis.summary)]:
        lines += [Text("  last log lines:", style="dim"), *(Text(f"    {line}", "dim") for line in news)]
    if diagnosis.commands:
        lines += [Text("  do:"), *(command(f"    {each}", style="cyan") for each in diagnosis.commands)]
    return lines
