"""Does the demo learn? Run `turnmill demo` once a seed, judge each figure, and write the table that docs quote.

    python benchmarks/demo_curve.py --seeds 0 1 2

Bounds (all seeds): mean reward over all valid rollouts below 0.10 at the first step and at least 0.70 over the last 10;
held-out solve rate below 0.10 before and at least 0.40 after; training part at most 4 minutes on 2 idle cores. The load
of the machine is recorded beside them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "wordle-demo.md"
MAX_TRAIN_S = 240.0


def run_turnmill(*command: str, seed: int, root: Path) -> dict[str, Any]:
    """The JSON line of a command that trains, with the machine's load before and after."""
    before = os.getloadavg()[0]
    line = [sys.executable, "-m", "turnmill", *command, "--json", "--seed", str(seed), "--root", str(root)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "load_before": round(before, 2), "load_after": round(os.getloadavg()[0], 2)}


def problems(figures: dict[str, Any]) -> list[str]:
    """Which bounds do not hold."""
    bounds = {
        "reward_first < 0.10": figures["reward_first"] < 0.10,
        "reward_last10 >= 0.70": figures["reward_last10"] >= 0.70,
        "eval_before < 0.10": figures["eval_before"] < 0.10,
        "eval_after >= 0.40": figures["eval_after"] >= 0.40,
        "steps <= 100": figures["steps"] <= 100,
        f"train_s <= {MAX_TRAIN_S:.0f}": figures["train_s"] <= MAX_TRAIN_S,
    }
    return [f"seed {figures['seed']}: not {bound}" for bound, holds in bounds.items() if not holds]


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "# The Wordle demo, measured",
        "",
        "`python benchmarks/demo_curve.py --seeds 0 1 2 --write` wrote this page: `turnmill demo` once a seed, 64",
        "conversations a step, the shipped words. Rewards are means over all valid rollouts of a step, unfiltered;",
        "the held-out solve rate is over 300 conversations (50 words, 6 each) at temperature 1.",
        "",
        "| seed | reward, step 1 | reward, last 10 | held-out before | held-out after | steps | rollouts | training |"
        " load before |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['seed']} | {r['reward_first']:.3f} | {r['reward_last10']:.3f} | {r['eval_before']:.3f} | "
        f"{r['eval_after']:.3f} | {r['steps']} | {r['num_generated']} | {r['train_s']:.0f} s | {r['load_before']} |"
        for r in rows
    ]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"Machine: {machine}, no GPU.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo and judge its figures.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            rows.append(run_turnmill("demo", seed=seed, root=Path(folder) / str(seed)))
            print(json.dumps(rows[-1]), flush=True)
    if args.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(rows), encoding="utf-8")
    failed = [problem for row in rows for problem in problems(row)]
    for problem in failed:
        print(problem, file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
