"""Real runs under fire: kills of every role and other faults at random moments, and an exact account after each run.

    seed -> schedules of faults -> runs, two at a time: [pause, fault, got over it]* -> end -> verdict by query -> table

    python -m tests.faults.harness --kills 200 --seed 0 [--jobs 2] [--write]

The seed decides which faults come in which order, after which pauses; what the run does at that moment is up to the
machine. Exit code 1 when anything that must hold did not.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults import disk, shim
from tests.faults.faults import KILLS, OF_THE_MACHINE, OTHERS, OVER, Fault, may_die, run_folder_exists, victim_of
from tests.faults.shim import Shim
from tests.faults.verdict import judge
from tests.faults.victim import PARAMETERS, Defect, Victim

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "faults.md"
# Most kills of one run, and how many other faults come on a kill.
KILLS_A_RUN = 12
OTHERS_A_KILL = 0.4
# A run has to live until all of them were done.
STEPS_A_RUN, STEPS_A_FAULT = 3, 2
# After so many defects the rest would tell nothing new.
MOST_DEFECTS = 5

_WHAT_HOLDS = """Every run has a control process, a worker, two replicas and a trainer; faults come at random moments,
or between two chosen writes of a step. After each run it is checked, by query: every request ended in exactly one way,
each batch was applied once and gives the recorded weights when it is made again, steps, versions and metrics agree,
the final checkpoint holds the weights of the last batch, and no process, port, pipe or temporary file is left."""
# One verdict at a time: it makes the run's steps again, and torch has one source of chance and one number of threads.
_JUDGING = threading.Lock()


@dataclass
class Tally:
    """What was done, and what came of it."""

    # (fault, outcome) -> how often.
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    # How requests ended, over all runs.
    requests: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    num_steps: int = 0
    num_resumed: int = 0
    defects: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(num for (fault, _), num in self.outcomes.items() if fault in KILLS)

    def add(self, other: "Tally") -> None:
        self.outcomes += other.outcomes
        self.requests += other.requests
        self.num_runs += other.num_runs
        self.num_steps += other.num_steps
        self.num_resumed += other.num_resumed
        self.defects += other.defects


def schedule(random: Random, kills: int, *, has_shim: bool) -> list[str]:
    """The faults of a run, in order: the kills spread evenly over the roles, the others in between."""
    names = [name for _ in range(kills // len(KILLS) + 1) for name in random.sample(list(KILLS), len(KILLS))][:kills]
    others = [*OTHERS, *OF_THE_MACHINE] if has_shim else [*OTHERS]
    for name in random.sample(others * 4, max(1, round(kills * OTHERS_A_KILL))):
        names.insert(random.randrange(len(names) + 1), name)
    return names


def attack(
    tally: Tally,
    root: Path,
    faults: Sequence[str],
    random: Random,
    *,
    max_steps: int,
    under: Shim | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """One run with these faults, to its end and its verdict; adds to `tally` and raises `Defect`."""
    tally.num_runs += 1
    every: dict[str, Fault] = KILLS | OTHERS | OF_THE_MACHINE
    with ExitStack() as stack:
        victim = Victim(root=root, stack=stack, parameters={**PARAMETERS, "max_steps": str(max_steps)}, shim=under)
        victim.start()
        victim.wait(lambda: run_folder_exists(root))
        for name in faults:
            _pause(victim, random)
            role = victim_of(name)
            if role is not None and not may_die(victim, role):
                continue
            begun = time.monotonic()
            outcome = every[name](victim, random)
            if outcome != OVER:
                tally.outcomes[name, outcome] += 1
            step = victim.running.num_steps()
            tell(f"step {step}: {name}: {outcome} ({time.monotonic() - begun:.1f} s)")
            if victim.has_ended:
                break
        tally.num_resumed += victim.num_resumed
        figures = victim.finish()
        with _JUDGING:
            counts = judge(victim, figures)
        tell(f"the account is exact: {counts}")
        tally.requests += Counter(counts)
        tally.num_steps += max_steps


def _pause(victim: Victim, random: Random) -> None:
    """Most faults come in the middle of training, some while roles are still starting."""
    if random.random() < 0.7:
        victim.await_steps(1)
    victim.sleep(random.uniform(0.0, 1.5))


def fire(kills: int, seed: int, folder: Path, *, jobs: int) -> Tally:
    """Runs, `jobs` at a time, until so many kills were survived; a defect is kept with its run, the others go on."""
    total, changing = Tally(), threading.Lock()
    has_shim = shim.why_not() is None

    def run(number: int, planned: int) -> None:
        with changing:
            if len(total.defects) >= MOST_DEFECTS:
                return
        one = _run(seed, number, planned, folder, has_shim=has_shim)
        with changing:
            total.add(one)
            print(f"{total.num_kills} of {kills} kills made, {len(total.defects)} defects", flush=True)

    number = 0
    while total.num_kills < kills and len(total.defects) < MOST_DEFECTS:
        sizes = _shares(kills - total.num_kills, jobs)
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(run, number + i, planned) for i, planned in enumerate(sizes)]:
                done.result()
        number += len(sizes)
    return total


def _shares(kills: int, jobs: int) -> list[int]:
    """So many kills on few runs, about the same number on each, and none of them alone at the end."""
    rounds = -(-kills // (KILLS_A_RUN * jobs))
    num = min(kills, rounds * jobs)
    return [kills // num + (i < kills % num) for i in range(num)]


def _run(seed: int, number: int, planned: int, folder: Path, *, has_shim: bool) -> Tally:
    """One run and its tally; the folder of one that ended otherwise than it must is kept."""
    tally, random, begun = Tally(), Random(f"{seed}/{number}"), time.monotonic()
    root = folder / f"run-{number}"

    def tell(text: str) -> None:
        print(f"  run {number}, {time.monotonic() - begun:.0f} s: {text}", flush=True)

    tell(f"{planned} kills planned")
    try:
        faults = schedule(random, planned, has_shim=has_shim)
        under = shim.build(folder / f"shim-{number}") if has_shim else None
        max_steps = STEPS_A_RUN + STEPS_A_FAULT * len(faults)
        attack(tally, root, faults, random, max_steps=max_steps, under=under, tell=tell)
        shutil.rmtree(root)
    except Exception as defect:  # the boundary of one run: whatever it is, it is told and counted
        if not isinstance(defect, Defect):
            traceback.print_exc()
        tally.defects.append(f"run {number} of seed {seed} ({root}): {defect!r}")
        print(f"DEFECT {tally.defects[-1]}", file=sys.stderr, flush=True)
    return tally


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run whose machine is disturbed from its beginning to its end, and how it went."""

    name: str
    outcome: str
    # 0: it was skipped.
    times: int


def whole_runs(tally: Tally, folder: Path) -> list[Whole]:
    """The faults that a run has to itself; defects go into `tally`."""
    found = []
    tries: list[tuple[str, str | None, Callable[[Path], str]]] = [
        ("disk full", disk.why_not(), disk.fill_disk),
        ("slow disk from start to end", shim.why_not(), disk.slow_disk),
    ]
    for name, reason, act in tries:
        outcome = f"skipped: {reason}"
        if reason is None:
            try:
                outcome = act(folder / name.replace(" ", "-"))
            except Defect as defect:
                outcome = "defect"
                tally.defects.append(f"{name}: {defect}")
                print(f"DEFECT {tally.defects[-1]}", file=sys.stderr, flush=True)
        print(f"{name}: {outcome}", flush=True)
        found.append(Whole(name=name, outcome=outcome, times=int(reason is None)))
    return found


def page(tally: Tally, command: str, whole: Sequence[Whole], *, seconds_a_kill: float, load: float) -> str:
    """The tables in Markdown; `load` is what others did on this machine when it began."""
    about = (
        f"`{command}` wrote this page: {tally.num_runs} runs, {tally.num_resumed} times resumed, {tally.num_steps} "
        f"optimizer steps, {tally.num_kills} kills, one every {seconds_a_kill:.1f} s. {_WHAT_HOLDS}"
    )
    rows = ["# Runs under fire, measured", "", *textwrap.wrap(about, 120)]
    by_victim = Counter[str]()
    for (fault, _), num in tally.outcomes.items():
        if fault in KILLS:
            by_victim[str(victim_of(fault))] += num
    rows += ["", "| killed | times |", "|---|---|"]
    rows += [f"| {name} | {num} |" for name, num in sorted(by_victim.items())]
    rows += [f"| all | {tally.num_kills} |", "", "| fault | outcome | times |", "|---|---|---|"]
    names = [*KILLS, *OTHERS, *OF_THE_MACHINE]
    ordered = sorted(tally.outcomes.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
    rows += [f"| {fault} | {outcome} | {num} |" for (fault, outcome), num in ordered]
    if reason := shim.why_not():
        rows += [f"| {name} | skipped: {reason} | 0 |" for name in OF_THE_MACHINE]
    rows += [f"| {run.name} | {run.outcome} | {run.times} |" for run in whole]
    rows += ["", "| how requests ended | number |", "|---|---|"]
    rows += [f"| {name} | {num} |" for name, num in sorted(tally.requests.items())]
    rows += [f"| all | {sum(tally.requests.values())} |", ""]
    rows += [f"Runs that ended otherwise than they must: {len(tally.defects)}."]
    rows += [f"- {defect.splitlines()[0]}" for defect in tally.defects]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return "\n".join([*rows, "", f"Machine: {machine}; load average {load:.1f} before the first run.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and disturb real runs, and check what is left of them.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    begun, load = time.monotonic(), os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="turnmill-faults-"))
    tally = fire(args.kills, args.seed, folder, jobs=args.jobs)
    seconds_a_kill = (time.monotonic() - begun) / max(1, tally.num_kills)
    whole = whole_runs(tally, folder)
    if not tally.defects:
        shutil.rmtree(folder)
    command = f"make faults KILLS={args.kills} SEED={args.seed}"
    text = page(tally, command, whole, seconds_a_kill=seconds_a_kill, load=load)
    print(text)
    if args.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    figures = {"kills": tally.num_kills, "runs": tally.num_runs, "defects": len(tally.defects)}
    print(json.dumps({**figures, "seconds_a_kill": round(seconds_a_kill, 1)}))
    sys.exit(1 if tally.defects else 0)


if __name__ == "__main__":
    main()
