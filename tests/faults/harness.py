"""Real runs under fire: kills of every role and other faults at random moments, and an exact account after each run.

    seed -> schedule of faults -> run -> [pause, fault, got over it]* -> end -> verdict by query -> table

    python -m tests.faults.harness --kills 200 --seed 0 [--write]

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
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults import disk
from tests.faults.faults import KILLS, OTHERS, OVER, Fault, may_die, run_folder_exists, victim_of
from tests.faults.verdict import judge
from tests.faults.victim import PARAMETERS, Defect, Victim

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "faults.md"
# Most kills of one run, and how many other faults come on a kill.
KILLS_A_RUN = 10
OTHERS_A_KILL = 0.4
# A run has to live until all of them were done.
STEPS_A_RUN, STEPS_A_FAULT = 4, 3

_WHAT_HOLDS = """Every run has a control process, a worker, two replicas and a trainer; faults come at random moments,
or between two chosen writes of a step. After each run it is checked, by query: every request ended in exactly one way,
each batch was applied once and gives the recorded weights when it is made again, steps, versions and metrics agree,
the final checkpoint holds the weights of the last batch, and no process, port, pipe or temporary file is left."""


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


def schedule(random: Random, kills: int) -> list[str]:
    """The faults of a run, in order: the kills spread evenly over the roles, the others in between."""
    names = [name for _ in range(kills // len(KILLS) + 1) for name in random.sample(list(KILLS), len(KILLS))][:kills]
    for name in random.sample(list(OTHERS) * 4, max(1, round(kills * OTHERS_A_KILL))):
        names.insert(random.randrange(len(names) + 1), name)
    return names


def attack(tally: Tally, root: Path, faults: Sequence[str], random: Random, *, max_steps: int) -> None:
    """One run with these faults, to its end and its verdict; adds to `tally` and raises `Defect`."""
    tally.num_runs += 1
    every: dict[str, Fault] = KILLS | OTHERS
    with ExitStack() as stack:
        victim = Victim(root=root, stack=stack, parameters={**PARAMETERS, "max_steps": str(max_steps)})
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
            print(f"  step {step}: {name}: {outcome} ({time.monotonic() - begun:.1f} s)", flush=True)
            if victim.has_ended:
                break
        tally.num_resumed += victim.num_resumed
        counts = judge(victim, victim.finish())
        print(f"  the account is exact: {counts}", flush=True)
        tally.requests += Counter(counts)
        tally.num_steps += max_steps


def _pause(victim: Victim, random: Random) -> None:
    """Most faults come in the middle of training, some while roles are still starting."""
    if random.random() < 0.7:
        num_steps = victim.running.num_steps()
        victim.wait(lambda: victim.running.num_steps() > num_steps)
    victim.sleep(random.uniform(0.0, 2.5))


def fire(kills: int, seed: int, folder: Path) -> Tally:
    """Runs until so many kills were survived; a defect is kept with its run, and the next run begins."""
    total, number = Tally(), 0
    while total.num_kills < kills and len(total.defects) < 5:
        random = Random(f"{seed}/{number}")
        planned = min(KILLS_A_RUN, kills - total.num_kills)
        root = folder / f"run-{number}"
        print(f"run {number}: {planned} kills planned, {total.num_kills} of {kills} made", flush=True)
        try:
            faults = schedule(random, planned)
            attack(total, root, faults, random, max_steps=STEPS_A_RUN + STEPS_A_FAULT * len(faults))
            shutil.rmtree(root)
        except Exception as defect:  # the boundary of one run: whatever it is, it is told and counted
            if not isinstance(defect, Defect):
                traceback.print_exc()
            total.defects.append(f"run {number} of seed {seed} ({root}): {defect!r}")
            print(f"DEFECT {total.defects[-1]}", file=sys.stderr, flush=True)
        number += 1
    return total


def page(tally: Tally, kills: int, seed: int, disk_outcome: str, seconds: float) -> str:
    """The tables in Markdown."""
    about = (
        f"`make faults KILLS={kills} SEED={seed}` wrote this page: {tally.num_runs} runs, {tally.num_resumed} times "
        f"resumed, {tally.num_steps} optimizer steps, {tally.num_kills} kills, {seconds / 60:.0f} minutes. "
        f"{_WHAT_HOLDS}"
    )
    rows = ["# Runs under fire, measured", "", *textwrap.wrap(about, 120)]
    rows += ["", "| fault | outcome | times |", "|---|---|---|"]
    names = [*KILLS, *OTHERS]
    ordered = sorted(tally.outcomes.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
    rows += [f"| {fault} | {outcome} | {num} |" for (fault, outcome), num in ordered]
    rows += [f"| disk full | {disk_outcome} | 1 |", "", "| how requests ended | number |", "|---|---|"]
    rows += [f"| {name} | {num} |" for name, num in sorted(tally.requests.items())]
    rows += [f"| all | {sum(tally.requests.values())} |", ""]
    rows += [f"Runs that ended otherwise than they must: {len(tally.defects)}."]
    rows += [f"- {defect.splitlines()[0]}" for defect in tally.defects]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return "\n".join([*rows, "", f"Machine: {machine}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and disturb real runs, and check what is left of them.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="turnmill-faults-"))
    tally = fire(args.kills, args.seed, folder)
    reason = disk.why_not()
    disk_outcome = f"skipped: {reason}"
    if reason is None:
        try:
            disk_outcome = disk.fill_disk(folder / "disk")
        except Defect as defect:
            disk_outcome = "defect"
            tally.defects.append(f"disk full: {defect}")
            print(f"DEFECT {tally.defects[-1]}", file=sys.stderr, flush=True)
    if not tally.defects:
        shutil.rmtree(folder)
    text = page(tally, args.kills, args.seed, disk_outcome, time.monotonic() - begun)
    print(text)
    if args.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    print(json.dumps({"kills": tally.num_kills, "runs": tally.num_runs, "defects": len(tally.defects)}))
    sys.exit(1 if tally.defects else 0)


if __name__ == "__main__":
    main()
