"""How many conversations are trained a second with rollouts and steps at the same time, beside one after the other?

    python -m benchmarks.async_steps [--quick]

The same run twice, of the shipped roles: Wordle with the shipped model, 64 conversations a step, all six turns played,
the mean share of right places as the reward (nearly every group has signal), no refill, a tiny learning rate, so that
the work of a step stays what it was. Once as it is, and once with an environment that takes 200 ms a turn. What counts
are conversations that were trained, from the end of the third step to the end of the last; beside the rates, how old
they were and where the time went.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.common import QUIET_ENV, ROOT, Claim, arguments, emit, emit_ratio, interleave
from benchmarks.end_to_end_trl import LR, MODEL, read_metrics
from benchmarks.house import FULL_TURNS
from turnmill import assets
from turnmill.config import load_config, to_dict

NAME = "async_steps"
ASYNC, SYNC = "off_policy_async", "on_policy_sync"
# Steps before the figures: the first one has no step to run beside, and the pipe fills.
FIRST = 3
AGE_TOLERANCE = 3


def measure(strategy: str, pause_s: float, steps: int) -> float:
    """Trained conversations a second of one run."""
    flags = {
        "rollout_strategy": strategy,
        "age_tolerance": AGE_TOLERANCE,
        "env_args": {"pause_s": pause_s},
        "max_new_tokens": 8,
        "max_steps": steps,
        "max_refill_rounds": 0,
        "max_concurrent_rollouts": 64 * (AGE_TOLERANCE + 1),
        "generation_slots": 64 * (AGE_TOLERANCE + 1),
        "lr": LR,
        "min_lr": LR,
    }
    config = load_config(recipe=assets.model_folder(MODEL) / "recipe.toml", flags=flags).config
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.house", "control", "--root", folder),
                *("--config", json.dumps(to_dict(config)), "--data", str(assets.wordle_data("train"))),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **QUIET_ENV, FULL_TURNS: "1"},
        )
        if done.returncode:
            raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
        metrics = read_metrics(Path(folder))
    if len(metrics) != steps or any(metric.values["turns_mean"] != 6 for metric in metrics):
        raise RuntimeError(f"{len(metrics)} of {steps} steps, or a conversation without six turns")
    if max(metric.values["staleness_max"] for metric in metrics) > (AGE_TOLERANCE if strategy == ASYNC else 0):
        raise RuntimeError("a token was trained that is too old")
    measured = metrics[FIRST:]
    shown = ("generate_s", "wait_s", "train_s", "publish_s", "early_share", "staleness_mean", "staleness_max")
    emit(
        kind="detail",
        benchmark=NAME,
        subject=strategy,
        pause_s=pause_s,
        per_step={name: round(fmean(metric.values[name] for metric in measured), 3) for name in shown},
        trained_per_step=round(fmean(metric.values["num_trained"] for metric in measured), 1),
        audit_max=max(metric.values["audit_max"] for metric in measured),
    )
    return sum(m.values["num_trained"] for m in measured) / (metrics[-1].time - metrics[FIRST - 1].time)


def main() -> None:
    args = arguments("Rollouts and steps at the same time, beside one after the other").parse_args()
    # Without pauses a step takes a quarter of a second, and single runs scatter by 8 %.
    cases = ((0.0, 1.15, 16, 5), (0.2, 1.3, 8, 1)) if args.quick else ((0.0, 1.15, 32, 7), (0.2, 1.3, 16, 3))
    for pause_s, bound, steps, rounds in cases:
        text = "Wordle, 64 conversations x 6 turns a step" + (f", {pause_s * 1000:.0f} ms a turn" if pause_s else "")
        subjects = {strategy: partial(measure, strategy, pause_s, steps) for strategy in (ASYNC, SYNC)}
        figures, met = interleave(NAME, text, "trained conversations/s", subjects, rounds=rounds)
        claim = Claim(benchmark=NAME, text=text, unit="trained conversations/s", ours=ASYNC, peer=SYNC, at_least=bound)
        emit_ratio(claim, figures[ASYNC], figures[SYNC], met)


if __name__ == "__main__":
    main()
