"""Run every benchmark and write what came of it: a JSON file and a page of the documentation.

    python -m benchmarks.run_all [--quick] [--only routing engine ...]

Each benchmark is a process of its own, one after the other. With `--only`, what the files hold of the others, measured
in the same form, stays. A benchmark that fails is named in both files and makes the
exit code 1; a peer that is missing is named as skipped and does not. A promised ratio that was measured on a quiet
machine and does not hold is told at the end, and makes the exit code 1 with `--strict`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import QUIET_ENV, ROOT, busy, load, machine

NAMES = ("routing", "engine", "training", "async_steps", "queues", "memory", "end_to_end_trl", "aws_clients")
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"
PAGE = ROOT / "docs" / "results" / "benchmarks.md"
# A run of one benchmark that takes longer hangs.
LONGEST_S = {True: 600.0, False: 3600.0}

Line = dict[str, Any]


def run(name: str, *, quick: bool) -> tuple[list[Line], str | None]:
    """The lines of one benchmark, and what went wrong."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    lines: list[Line] = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **QUIET_ENV}, start_new_session=True
    )
    assert process.stdout is not None
    # With everything that it started, peers included.
    watchdog = threading.Timer(LONGEST_S[quick], os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        for text in process.stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
            if text.startswith("{"):
                lines.append(json.loads(text))
        code = process.wait()
    finally:
        watchdog.cancel()
        process.stdout.close()
    return lines, f"{name} ended with exit code {code}" if code else None


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    ratios = [line for line in result["lines"] if line["kind"] == "ratio"]
    skipped = [line for line in result["lines"] if line["kind"] == "skipped"]
    form = "quick" if result["quick"] else "full"
    only = result.get("only") or []
    which = f"; the rows of {', '.join(only)}, the others are of earlier runs" if only else ""
    rows = [
        "# Turnmill beside others, measured",
        "",
        f"Written by `python -m benchmarks.run_all{' --quick' if result['quick'] else ''}` ({form} form, "
        f"{result['finished']}{which}). Machine: {result['machine']}, no GPU.",
        "",
        "Pairs are interleaved (A B A B); figures are medians, a ratio is the median of the rounds' ratios. Load: the",
        "one-minute load average before and after, our own work included; others: the mean share of the cores that",
        "other processes used between measurements. **Rows marked † were taken on a busy machine and are no results.**",
        "",
        "| benchmark | claim | ours | peer | ratio | promised | load | others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in ratios:
        promised = line["bound"] or "–"
        if line["holds"] is not None and line["quiet"]:
            promised += " ✓" if line["holds"] else " **✗**"
        rows.append(
            f"| {line['benchmark']} | {line['claim']}{'' if line['quiet'] else ' †'} "
            f"| {line['ours']:g} {line['unit']} ({line['ours_name']}) | {line['peer']:g} ({line['peer_name']}) "
            f"| {line['ratio']:g} | {promised} | {line['load_before']:g} → {line['load_after']:g} "
            f"| {100 * line['others_busy']:.0f} % |"
        )
    rows += ["", *_other_figures(result["lines"])]
    if skipped or result["failures"]:
        rows += ["## Not measured", ""]
        rows += [f"- {line['benchmark']}: {line['what']}: {line['why']}" for line in skipped]
        rows += [f"- {failure}" for failure in result["failures"]]
        rows.append("")
    return "\n".join(rows)


def _other_figures(lines: list[Line]) -> list[str]:
    """Figures that no ratio shows: turns by depth, and seconds to a reward."""
    depth = [line for line in lines if line["kind"] == "measurement" and "quarter" in line["unit"]]
    target = [line for line in lines if line["kind"] == "measurement" and "reward_at_end" in line]
    rows: list[str] = []
    if depth:
        rows += ["## Cost of a turn by depth", "", "| conversations | ms a turn, first to last quarter |", "|---|---|"]
        rows += [f"| {line['case']} | {' · '.join(f'{value:g}' for value in line['value'])} |" for line in depth]
        rows.append("")
    if target:
        rows += [f"## {target[0]['case'].capitalize()}", "", "| subject | seed | seconds | reward at the end |"]
        rows.append("|---|---|---|---|")
        for line in target:
            seconds = "not reached" if line["value"] is None else f"{line['value']:g}"
            rows.append(f"| {line['subject']} | {line['round']} | {seconds} | {line['reward_at_end']:g} |")
        rows.append("")
    return rows


def kept_lines(results: Path, *, besides: Sequence[str], quick: bool) -> list[Line]:
    """What an earlier run in the same form measured of the benchmarks that are not to be run now."""
    if not results.exists():
        return []
    before = json.loads(results.read_text(encoding="utf-8"))
    return [line for line in before["lines"] if before["quick"] == quick and line["benchmark"] not in besides]


def not_met(lines: list[Line]) -> list[str]:
    """The promised ratios that do not hold, of those that were measured on a quiet machine."""
    return [
        f"not met: {line['benchmark']}, {line['claim']}: {line['ratio']:.3g}, promised {line['bound']}"
        for line in lines
        if line["kind"] == "ratio" and line["quiet"] and line["holds"] is False
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every benchmark and write the results.")
    parser.add_argument("--quick", action="store_true", help="short forms: minutes instead of an hour")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--strict", action="store_true", help="fail where a promised ratio does not hold")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    lines: list[Line] = []
    failures: list[str] = []
    kept = kept_lines(args.results, besides=args.only, quick=args.quick)
    load_before, busy_before = load(), busy(2.0)
    for name in args.only:
        found, failure = run(name, quick=args.quick)
        lines += found
        if failure:
            failures.append(failure)
    result = {
        "quick": args.quick,
        "finished": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(),
        "load_before": load_before,
        "load_after": load(),
        "others_busy_before": busy_before,
        "failures": failures,
        # Empty where all lines are of this run.
        "only": args.only if kept else [],
        "lines": sorted([*kept, *lines], key=lambda line: NAMES.index(line["benchmark"])),
    }
    for path, text in ((args.results, json.dumps(result, indent=1) + "\n"), (args.page, page(result))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"written: {args.results}, {args.page}")
    unmet = not_met(lines)
    for text in [*failures, *unmet]:
        print(text, file=sys.stderr)
    sys.exit(1 if failures or (args.strict and unmet) else 0)


if __name__ == "__main__":
    main()
