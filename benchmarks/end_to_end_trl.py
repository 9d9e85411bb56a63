"""How many conversations are trained a second, and how long until the mean reward is 0.6, beside TRL?

    python -m benchmarks.end_to_end_trl [--quick]

The same model, words, prompt, marks, loss, optimizer and schedule on the same cores, 64 conversations a step.
Throughput: six full turns on both sides, the largest share of right places as the reward (every group has signal), no
refill; from the end of the second step to the end of the last. TRL runs once with one and once with two torch threads,
plainly and with a KV cache kept across turns; the faster thread count counts. Time to 0.6: the demo's own stop rule and
reward, our defaults (refill on) against TRL (which has none), mean of ten steps, start-up excluded on both sides.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import (
    QUIET_ENV,
    ROOT,
    Claim,
    arguments,
    emit,
    emit_ratio,
    emit_skip,
    has_peers,
    interleave,
    load,
    run_peer,
)
from benchmarks.house import FULL_TURNS
from turnmill import assets
from turnmill.config import load_config, to_dict
from turnmill.records import Metric, decode

NAME = "end_to_end_trl"
MODEL = "wordle-tiny"
TARGET = 0.6
WINDOW = 10
OURS, PLAIN, CACHED = "turnmill", "TRL", "TRL, KV cache kept"


def our_flags(steps: int, seed: int) -> dict[str, object]:
    """What differs from the recipe for a run of full turns without refill."""
    return {"base_model": MODEL, "max_steps": steps, "max_refill_rounds": 0, "seed": seed}


def read_metrics(root: Path) -> list[Metric]:
    """The metrics of the one run below `root`."""
    (path,) = (root / "runs").glob("*/metrics.jsonl")
    return [decode(line, Metric) for line in path.read_bytes().splitlines()]


def measure_ours(steps: int) -> float:
    """Trained conversations a second of the shipped roles, the worker's environment replaced by one of full turns."""
    config = load_config(recipe=assets.model_folder(MODEL) / "recipe.toml", flags=our_flags(steps, 0)).config
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
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
        metrics = read_metrics(root)
    if len(metrics) != steps or any(metric.values["turns_mean"] != 6 for metric in metrics):
        raise RuntimeError(f"{len(metrics)} of {steps} steps, or a conversation without six turns")
    first = min(2, steps - 1)
    where = ("generate_s", "wait_s", "train_s", "publish_s")
    emit(
        kind="detail",
        benchmark=NAME,
        subject=OURS,
        seconds_per_step={name: round(fmean(m.values[name] for m in metrics[first:]), 3) for name in where},
        trained_per_step=fmean(m.values["num_trained"] for m in metrics[first:]),
    )
    trained = sum(metric.values["num_trained"] for metric in metrics[first:])
    return trained / (metrics[-1].time - metrics[first - 1].time)


def run_trl(*flags: str) -> dict[str, Any]:
    """The summary of a TRL run."""
    model, data = assets.model_folder(MODEL), assets.wordle_data("train")
    figures: dict[str, Any] = run_peer("trl_wordle.py", "--model", str(model), "--data", str(data), *flags)
    return figures


def measure_trl(steps: int, threads: int, *flags: str) -> float:
    """Trained conversations a second of TRL."""
    figures = run_trl("--full-turns", "--steps", str(steps), "--threads", str(threads), *flags)
    if figures["turns_per_conversation"] != 6:
        raise RuntimeError(f"{figures['turns_per_conversation']} turns a conversation instead of 6")
    return float(figures["conversations_per_s"])


def throughput(args: argparse.Namespace) -> None:
    steps = 8 if args.quick else 40
    thread_counts = (2,) if args.quick else (1, 2)
    subjects: dict[str, Callable[[], float]] = {OURS: partial(measure_ours, steps)}
    for threads in thread_counts:
        subjects[f"{PLAIN}, {threads} threads"] = partial(measure_trl, steps, threads)
        subjects[f"{CACHED}, {threads} threads"] = partial(measure_trl, steps, threads, "--kv-cache")
    case = "64 conversations x 6 full turns a step, no refill"
    figures, loads = interleave(NAME, case, "trained conversations/s", subjects, rounds=1 if args.quick else 3)
    for variant, bound in ((PLAIN, 1.2), (CACHED, 1.0)):
        names = [f"{variant}, {threads} threads" for threads in thread_counts]
        best = max(names, key=lambda name: fmean(figures[name]))
        claim = Claim(benchmark=NAME, text=case, unit="trained conversations/s", ours=OURS, peer=best, at_least=bound)
        emit_ratio(claim, figures[OURS], figures[best], loads)


# ---------------------------------------------------------------- time to a reward


def seconds_to_target(metrics: list[Metric]) -> float | None:
    """Seconds from the first step's begin until the mean reward of the last ten steps is the target."""
    first = metrics[0]
    begun = first.time - sum(first.values[name] for name in ("generate_s", "train_s", "publish_s"))
    for end in range(WINDOW, len(metrics) + 1):
        if fmean(metric.values["reward_mean"] for metric in metrics[end - WINDOW : end]) >= TARGET:
            return metrics[end - 1].time - begun
    return None


def ours_to_target(seed: int, max_steps: int) -> tuple[float | None, float]:
    """Seconds to the target or None, and the mean reward at the end, of `turnmill run`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "turnmill", "run", "--data", str(assets.wordle_data("train"))]
        flags = ["--root", folder, "--seed", str(seed), "--max-steps", str(max_steps), "--json"]
        subprocess.run(
            [*command, *flags],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **QUIET_ENV},
        )
        metrics = read_metrics(Path(folder))
    return seconds_to_target(metrics), fmean(metric.values["reward_mean"] for metric in metrics[-WINDOW:])


def trl_to_target(seed: int, max_steps: int, *flags: str) -> tuple[float | None, float]:
    """The same of TRL."""
    options = ("--target", str(TARGET), "--steps", str(max_steps), "--threads", "2", "--seed", str(seed))
    figures = run_trl(*options, *flags)
    return figures["seconds_to_target"], figures["reward_last"]


def time_to_target(max_steps: int, seeds: int) -> None:
    """Seconds to the target by subject and seed; a peer that does not reach it is stated with the reward it reached."""
    subjects: dict[str, Callable[[int], tuple[float | None, float]]] = {
        OURS: partial(ours_to_target, max_steps=max_steps),
        PLAIN: lambda seed: trl_to_target(seed, 3 * max_steps),
        CACHED: lambda seed: trl_to_target(seed, 3 * max_steps, "--kv-cache"),
    }
    case = f"time to mean reward {TARGET} over {WINDOW} steps"
    found: dict[str, list[float | None]] = {name: [] for name in subjects}
    loads = [load()]
    for seed in range(seeds):
        for name, measure in subjects.items():
            before = load()
            seconds, reward = measure(seed)
            found[name].append(seconds)
            loads.append(load())
            emit(
                kind="measurement",
                benchmark=NAME,
                subject=name,
                case=case,
                value=None if seconds is None else round(seconds, 1),
                unit="s",
                reward_at_end=round(reward, 3),
                round=seed,
                load_before=before,
                load_after=loads[-1],
            )
    for peer in (PLAIN, CACHED):
        ours = [seconds for seconds in found[OURS] if seconds is not None]
        peers = [seconds for seconds in found[peer] if seconds is not None]
        if len(ours) == len(peers) == seeds:
            claim = Claim(benchmark=NAME, text=case, unit="s", ours=OURS, peer=peer, at_most=1.0)
            emit_ratio(claim, ours, peers, loads)
        else:
            emit_skip(NAME, f"ratio: {case}, {peer}", f"reached by ours {len(ours)}, peer {len(peers)} of {seeds}")


def main() -> None:
    args = arguments("How many conversations are trained a second, beside TRL?").parse_args()
    if not has_peers():
        emit_skip(NAME, "everything", "no .venv-peers: run `make bench-peers`")
        return
    throughput(args)
    if args.quick:
        emit_skip(NAME, f"time to mean reward {TARGET}", "takes minutes: measured in the full form only")
    else:
        time_to_target(max_steps=100, seeds=3)


if __name__ == "__main__":
    main()
