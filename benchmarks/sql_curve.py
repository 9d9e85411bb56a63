"""Does the tool-calling example learn? Run `turnmill run --env sql-agent` once a seed, judge it, write docs' table.

    python -m benchmarks.sql_curve --seeds 0 1 2

Bounds (all seeds): the mean reward of the last 10 steps is at least 0.15 above that of the first 10, the 95 % interval
of the difference is above 0, in at most 150 steps. A step's reward is over all of its valid rollouts, unfiltered; the
interval is a bootstrap over steps (percentiles of 10 000 seeded resamples of both tens).
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import ROOT, machine
from benchmarks.demo_curve import run_turnmill
from turnmill.wiring.reading.figures import rewards
from turnmill.wiring.reading.runs import look_at_steps

PAGE = ROOT / "docs" / "results" / "sql-agent.md"
DATA = ROOT / "custom-environments" / "sql-agent" / "data"
ENDS = 10
MAX_STEPS = 150
LEAST_GAIN = 0.15
RESAMPLES = 10_000


def run_seed(seed: int, root: Path) -> dict[str, Any]:
    """The figures of one training run."""
    command = ("run", "--env", "sql-agent", "--base-model", "sql-tiny", "--data", str(DATA / "train.jsonl"))
    figures = run_turnmill(*command, "--eval-data", str(DATA / "eval.jsonl"), seed=seed, root=root)
    return {**figures, **gain(rewards(look_at_steps(root, figures["run_id"])))}


def gain(values: Sequence[float]) -> dict[str, Any]:
    """Means of the first and last steps, their difference and its 95 % interval."""
    first, last = values[:ENDS], values[-ENDS:]
    rng = random.Random(0)
    differences = sorted(
        fmean(rng.choices(last, k=len(last))) - fmean(rng.choices(first, k=len(first))) for _ in range(RESAMPLES)
    )
    return {
        "reward_first10": fmean(first),
        "reward_last10": fmean(last),
        "gain": fmean(last) - fmean(first),
        "gain_low": differences[round(0.025 * RESAMPLES)],
        "gain_high": differences[round(0.975 * RESAMPLES) - 1],
    }


def problems(figures: dict[str, Any]) -> list[str]:
    """Which bounds do not hold."""
    bounds = {
        f"gain >= {LEAST_GAIN}": figures["gain"] >= LEAST_GAIN,
        "interval above 0": figures["gain_low"] > 0,
        f"steps <= {MAX_STEPS}": figures["steps"] <= MAX_STEPS,
    }
    return [f"seed {figures['seed']}: not {bound}" for bound, holds in bounds.items() if not holds]


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "# The SQL agent, measured",
        "",
        "`python -m benchmarks.sql_curve --seeds 0 1 2 --write` wrote this page: `turnmill run --env sql-agent` with",
        "the shipped `sql-tiny`, its recipe and the tasks of `custom-environments/sql-agent`, once a seed. Rewards are",
        "means over all valid rollouts of a step, unfiltered; the interval is a bootstrap over steps. Solved: share of",
        "the held-out conversations with the right answer, at temperature 1.",
        "",
        "| seed | reward, first 10 | reward, last 10 | difference (95 % interval) | held-out solved before | after |"
        " steps | rollouts | training | load before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['seed']} | {r['reward_first10']:.3f} | {r['reward_last10']:.3f} | "
        f"{r['gain']:+.3f} ({r['gain_low']:+.3f} to {r['gain_high']:+.3f}) | {r['eval_before']:.3f} | "
        f"{r['eval_after']:.3f} | {r['steps']} | {r['num_generated']} | {r['train_s']:.0f} s | {r['load_before']} |"
        for r in rows
    ]
    return "\n".join([*lines, "", f"Machine: {machine()}, no GPU.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the SQL agent and judge its figures.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            rows.append(run_seed(seed, Path(folder) / str(seed)))
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
