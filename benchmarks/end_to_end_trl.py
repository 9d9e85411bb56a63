"""How many conversations are trained a second, and how long until the mean reward is 0.6, beside TRL?

    python -m benchmarks.end_to_end_trl [--quick]

The same model, words, prompt, marks, loss, optimizer and schedule on the same cores, 64 conversations a step.
Throughput: six full turns on both sides, the largest share of right places as the reward (every group has signal), no
refill, a tiny learning rate; from the end of the second step to the end of the last. TRL runs plainly and with a KV
cache kept across turns, each with one and with two torch threads (--quick: two), and the faster thread count counts.
Time to 0.6: the demo's own stop rule and reward, our defaults (refill on) against TRL (which has none), mean of ten
steps, start-up excluded on both sides.
"""

import argparse
import json
import os
import shutil
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
    Conditions,
    arguments,
    emit,
    emit_ratio,
    emit_skip,
    has_peers,
    interleave,
    run_peer,
)
from benchmarks.house import FULL_TURNS
from turnmill import assets
from turnmill.config import load_config, to_dict
from turnmill.records import Metric, decode

NAME = "end_to_end_trl"
MODEL = "wordle-tiny"
TARGET = 0.6
# For throughput: so small that the policy, and with it the work of a step, stays what it was.
LR = 1e-6
WINDOW = 10
OURS, PLAIN, CACHED = "turnmill", "TRL", "TRL, KV cache kept"


def deeper(folder: Path) -> Path:
    """wordle-tiny with six more layers whose outputs are zero: the very same policy at 3.5 times the parameters."""
    from transformers import LlamaForCausalLM

    source = assets.model_folder(MODEL)
    shallow = LlamaForCausalLM.from_pretrained(source, dtype="float32", local_files_only=True)
    config = shallow.config.__class__.from_dict({**shallow.config.to_dict(), "num_hidden_layers": 8})
    model = LlamaForCausalLM(config)
    model.load_state_dict(shallow.state_dict(), strict=False)
    for layer in model.model.layers[shallow.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def read_metrics(root: Path) -> list[Metric]:
    """The metrics of the one run below `root`."""
    (path,) = (root / "runs").glob("*/metrics.jsonl")
    return [decode(line, Metric) for line in path.read_bytes().splitlines()]


def measure_ours(model: str, steps: int) -> float:
    """Trained conversations a second of the shipped roles, the worker's environment replaced by one of full turns."""
    flags = {"base_model": model, "max_steps": steps, "max_refill_rounds": 0, "lr": LR, "min_lr": LR}
    config = load_config(recipe=assets.model_folder(MODEL) / "recipe.toml", flags=flags).config
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


def run_trl(model: str, *flags: str) -> dict[str, Any]:
    """The summary of a TRL run."""
    folder, data = assets.model_folder(model), assets.wordle_data("train")
    figures: dict[str, Any] = run_peer("trl_wordle.py", "--model", str(folder), "--data", str(data), *flags)
    return figures


def measure_trl(model: str, steps: int, threads: int, *flags: str) -> float:
    """Trained conversations a second of TRL."""
    rates = ("--lr", str(LR), "--min-lr", str(LR))
    figures = run_trl(model, "--full-turns", "--steps", str(steps), "--threads", str(threads), *rates, *flags)
    if figures["turns_per_conversation"] != 6:
        raise RuntimeError(f"{figures['turns_per_conversation']} turns a conversation instead of 6")
    return float(figures["conversations_per_s"])


def throughput(name: str, model: str, args: argparse.Namespace) -> None:
    steps = 6 if args.quick else 40
    thread_counts = (2,) if args.quick else (1, 2)
    subjects: dict[str, Callable[[], float]] = {OURS: partial(measure_ours, model, steps)}
    for threads in thread_counts:
        subjects[f"{PLAIN}, {threads} threads"] = partial(measure_trl, model, steps, threads)
        subjects[f"{CACHED}, {threads} threads"] = partial(measure_trl, model, steps, threads, "--kv-cache")
    case = f"{name}, 64 conversations x 6 full turns a step"
    figures, met = interleave(NAME, case, "trained conversations/s", subjects, rounds=1 if args.quick else 3)
    for variant, bound in ((PLAIN, 1.2), (CACHED, 1.0)):
        names = [f"{variant}, {threads} threads" for threads in thread_counts]
        best = max(names, key=lambda name: fmean(figures[name]))
        claim = Claim(benchmark=NAME, text=case, unit="trained conversations/s", ours=OURS, peer=best, at_least=bound)
        emit_ratio(claim, figures[OURS], figures[best], met)


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
        done = subprocess.run([*command, *flags], capture_output=True, text=True, env={**os.environ, **QUIET_ENV})
        if done.returncode:
            raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
        metrics = read_metrics(Path(folder))
    return seconds_to_target(metrics), fmean(metric.values["reward_mean"] for metric in metrics[-WINDOW:])


def trl_to_target(seed: int, max_steps: int, *flags: str) -> tuple[float | None, float]:
    """The same of TRL."""
    options = ("--target", str(TARGET), "--steps", str(max_steps), "--threads", "2", "--seed", str(seed))
    figures = run_trl(MODEL, *options, *flags)
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
    met = Conditions()
    met.take()
    for seed in range(seeds):
        for name, measure in subjects.items():
            seconds, reward = measure(seed)
            found[name].append(seconds)
            met.take()
            emit(
                kind="measurement",
                benchmark=NAME,
                subject=name,
                case=case,
                value=None if seconds is None else round(seconds, 1),
                unit="s",
                reward_at_end=round(reward, 3),
                round=seed,
                load_before=met.loads[-2],
                load_after=met.loads[-1],
                others_busy=max(met.busy[-2:]),
            )
    for peer in (PLAIN, CACHED):
        ours = [seconds for seconds in found[OURS] if seconds is not None]
        peers = [seconds for seconds in found[peer] if seconds is not None]
        if len(ours) == len(peers) == seeds:
            claim = Claim(benchmark=NAME, text=case, unit="s", ours=OURS, peer=peer, at_most=1.0)
            emit_ratio(claim, ours, peers, met)
        else:
            emit_skip(NAME, f"ratio: {case}, {peer}", f"reached by ours {len(ours)}, peer {len(peers)} of {seeds}")


def main() -> None:
    args = arguments("How many conversations are trained a second, beside TRL?").parse_args()
    if not has_peers():
        emit_skip(NAME, "everything", "no .venv-peers: run `make bench-peers`")
        return
    throughput("wordle-tiny (0.29 M)", MODEL, args)
    with tempfile.TemporaryDirectory() as folder:
        throughput("the same policy in 8 layers (1.01 M)", str(deeper(Path(folder))), args)
    if args.quick:
        emit_skip(NAME, f"time to mean reward {TARGET}", "takes minutes: measured in the full form only")
    else:
        time_to_target(max_steps=100, seeds=3)


if __name__ == "__main__":
    main()
