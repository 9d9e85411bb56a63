"""Does each variant learn? Wordle with the shipped model, a run each; judges the default, writes the table.

    python -m benchmarks.learning_table --seeds 0 1 2 --write

Bound: for the default (`group_based` advantages, `ppo` loss, all weights, on policy) the mean reward of the last 5 of
30 steps minus that of the first 5 is above 0 with its 95 % interval; the others are reported as they are. A step's
reward is over all of its valid rollouts, unfiltered. The interval of a seed is a bootstrap over steps, that of a
variant over its seeds' steps, each seed by itself (percentiles of 10 000 seeded resamples).

With `--log FILE` each run is a line of it as soon as it ended, and those that it holds already are not made again: the
whole table takes most of an hour.
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
from turnmill.cli.render import sparkline
from turnmill.wiring.reading.figures import rewards
from turnmill.wiring.reading.runs import look_at_steps

PAGE = ROOT / "docs" / "results" / "learning.md"
DEFAULT = "group_based + ppo"
STEPS = 30
ENDS = 5
RESAMPLES = 10_000
# What each variant sets beside the recipe of the model. A learning rate of its own where that of the recipe, which was
# chosen for the default, says nothing about it: an adapter of rank 8 with B = 0 moves little at first.
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "group_based_no_std + ppo": ("--advantage-method", "group_based_no_std"),
    "rloo + ppo": ("--advantage-method", "rloo"),
    "reinforce_pp_baseline + ppo": ("--advantage-method", "reinforce_pp_baseline"),
    "opo + ppo": ("--advantage-method", "opo"),
    "grpo_passk + ppo": ("--advantage-method", "grpo_passk"),
    "group_based_per_turn + ppo": ("--advantage-method", "group_based_per_turn"),
    "group_based + cispo": ("--loss-fn", "cispo"),
    "group_based + importance_sampling": ("--loss-fn", "importance_sampling"),
    "group_based + gspo": ("--loss-fn", "gspo"),
    "LoRA": ("--training-method", "RFT_MULTITURN_LORA", "--lora-rank", "8", "--lr", "5e-3", "--min-lr", "1e-3"),
    "off_policy_async": ("--rollout-strategy", "off_policy_async"),
    "LoRA, off_policy_async": (
        *("--training-method", "RFT_MULTITURN_LORA", "--lora-rank", "8", "--lr", "5e-3", "--min-lr", "1e-3"),
        *("--rollout-strategy", "off_policy_async"),
    ),
}


def run(variant: str, seed: int, root: Path) -> dict[str, Any]:
    """The figures of one training run of the demo's tasks."""
    short = ("--max-steps", str(STEPS), "--eval-rollouts", "50")
    figures = run_turnmill("demo", *short, *VARIANTS[variant], seed=seed, root=root)
    metrics = look_at_steps(root, figures["run_id"])
    kept = ("steps", "eval_before", "eval_after", "train_s", "num_generated", "load_before", "load_after")
    staleness = [metric.values.get("staleness", 0.0) for metric in metrics]
    return {
        "variant": variant,
        "seed": seed,
        "rewards": rewards(metrics),
        "staleness": max(staleness, default=0.0),
        **{name: figures[name] for name in kept},
    }


def gain(curves: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean of the last steps minus that of the first ones over all curves, and its 95 % interval."""
    rng = random.Random(0)
    ends = [(curve[:ENDS], curve[-ENDS:]) for curve in curves]
    differences = sorted(
        fmean(fmean(rng.choices(last, k=ENDS)) - fmean(rng.choices(first, k=ENDS)) for first, last in ends)
        for _ in range(RESAMPLES)
    )
    middle = fmean(fmean(last) - fmean(first) for first, last in ends)
    return middle, differences[round(0.025 * RESAMPLES)], differences[round(0.975 * RESAMPLES) - 1]


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    """The table in Markdown."""
    lines = [
        "# What each variant learns, measured",
        "",
        "`python -m benchmarks.learning_table --seeds 0 1 2 --write` wrote this page: the tasks of `turnmill demo`",
        f"(Wordle, the shipped `wordle-tiny` with its recipe), {STEPS} steps of 64 conversations, one run a seed.",
        "Rewards are means over all valid rollouts of a step, unfiltered. The recipe was chosen for the default; no",
        "variant was tuned, except that an adapter has a learning rate of its own. So the table says that each one",
        "trains, and not which one is best. Held out: share of 50 conversations that are solved, at temperature 1.",
        "",
        f"| variant | first {ENDS} | last {ENDS} | difference (95 % interval) | by seed | held out before | after |"
        " training | curve of the first seed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, rows in found.items():
        curves = [row["rewards"] for row in rows]
        middle, low, high = gain(curves)
        by_seed = ", ".join(f"{gain([curve])[0]:+.2f}" for curve in curves)
        first, last = (fmean(fmean(curve[part]) for curve in curves) for part in (slice(ENDS), slice(-ENDS, None)))
        lines.append(
            f"| {variant} | {first:.3f} | {last:.3f} | "
            f"{middle:+.3f} ({low:+.3f} to {high:+.3f}) | {by_seed} | "
            f"{fmean(row['eval_before'] for row in rows):.2f} | {fmean(row['eval_after'] for row in rows):.2f} | "
            f"{fmean(row['train_s'] for row in rows):.0f} s | `{sparkline(curves[0])}` |"
        )
    loads = [row["load_before"] for rows in found.values() for row in rows]
    return "\n".join([*lines, "", f"Machine: {machine()}, no GPU; load before a run {min(loads)} to {max(loads)}.", ""])


def problems(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What does not hold: of the default, that it learns; of the others, that they ran to their end."""
    failed = [
        f"{variant}, seed {row['seed']}: {row['steps']} of {STEPS} steps"
        for variant, rows in found.items()
        for row in rows
        if row["steps"] != STEPS
    ]
    if DEFAULT in found:
        _, low, _ = gain([row["rewards"] for row in found[DEFAULT]])
        if low <= 0:
            failed.append(f"{DEFAULT}: the interval of its gain begins at {low:+.3f}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train each variant on Wordle and judge the default.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--log", type=Path, help="file with a line a run; those that it holds are not made again")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    known: dict[tuple[str, int], dict[str, Any]] = {}
    if args.log is not None and args.log.exists():
        for line in args.log.read_text().splitlines():
            row = json.loads(line)
            known[row["variant"], row["seed"]] = row
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    for seed in args.seeds:
        for variant in args.variants:
            if (variant, seed) not in known:
                with tempfile.TemporaryDirectory() as folder:
                    known[variant, seed] = run(variant, seed, Path(folder))
                if args.log is not None:
                    with args.log.open("a") as log:
                        log.write(json.dumps(known[variant, seed]) + "\n")
            row = known[variant, seed]
            found[variant].append(row)
            middle, low, high = gain([row["rewards"]])
            print(f"{variant}, seed {seed}: {middle:+.3f} ({low:+.3f} to {high:+.3f})", flush=True)
    if args.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(found), encoding="utf-8")
    failed = problems(found)
    for problem in failed:
        print(problem, file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
