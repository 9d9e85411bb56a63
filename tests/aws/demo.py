"""`make demo-aws`: Wordle is trained through AWS services alone, on an emulator, and what came of it is checked.

    emulator <- counting proxy <- turnmill deploy, turnmill run --backend aws --local-compute, turnmill cleanup

It ends with the figures, and with exit code 1 if one of these does not hold: the accounting of the run is exact, the
mean reward of the last steps is above that of the first ones by more than chance, the reward that CloudWatch would show
is the one that was recorded, nothing is left after the cleanup.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from tests.aws.emulator import environ_of, running_emulator
from tests.aws.service_proxy import RunningProxy, running_proxy
from tests.e2e.accounts import check_accounting
from tests.e2e.processes import read_records
from turnmill import assets
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.emf import NAMESPACE, REWARD_MEAN
from turnmill.backends.aws.metrics import read_emf
from turnmill.backends.aws.settings import AwsSettings
from turnmill.records import Metric, Purpose, SampleRecord, decode, sample_prefix
from turnmill.wiring.backend import backend_of

NAME = "demo"
NUM_STEPS, BATCH = 24, 32
# Steps at each end that are compared.
ENDS = 5
# Two-sided 95 % quantiles of Student's t, by degrees of freedom: two ends of five steps have 4 to 8.
_STUDENT_T = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that has to hold."""

    holds: bool
    text: str


def main() -> int:
    """Run it all; 0 if everything holds."""
    with tempfile.TemporaryDirectory(prefix="turnmill-demo-aws-") as folder:
        checks = list(_demo(Path(folder)))
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'} {check.text}")
    return 0 if all(check.holds for check in checks) else 1


def _demo(folder: Path) -> Iterator[Check]:
    root = folder / "root"
    with (
        running_emulator(folder / "emulator") as emulator,
        running_proxy(emulator.url, folder / "proxy") as proxy,
        _environment(environ_of(proxy.url)),
    ):
        _turnmill("deploy", "--name", NAME)
        root.mkdir()
        (root / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{NAME}"\n')
        before = _counted(proxy)
        figures = _train(root)
        requests = _counted(proxy) - before
        yield _accounting(root, figures)
        metrics = backend_of(root).reader(figures["run_id"]).metrics()
        yield _learned(metrics)
        yield _emitted(figures["run_id"], metrics)
        yield _spent(root, figures, metrics, requests)
        yield from _removed(root, figures["run_id"])


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _turnmill(*arguments: str, capture: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", *arguments], stdout=subprocess.PIPE if capture else None, text=True
    )
    if done.returncode:
        raise SystemExit(f"turnmill {' '.join(arguments)} ended with exit code {done.returncode}")
    return done.stdout or ""


def _train(root: Path) -> dict[str, Any]:
    print(f"training: {NUM_STEPS} steps of {BATCH} conversations")
    arguments = ["--backend", "aws", "--local-compute", "--root", str(root), "--json"]
    parameters = ["--max-steps", str(NUM_STEPS), "--global-batch-size", str(BATCH)]
    data = ["--data", str(assets.wordle_data("train"))]
    out = _turnmill("run", *arguments, *data, *parameters, capture=True)
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def _counted(proxy: RunningProxy) -> Counter[str]:
    # It writes them down once a second.
    time.sleep(1.5)
    return proxy.counts().requests


# ---------------------------------------------------------------- what has to hold


def _accounting(root: Path, figures: dict[str, Any]) -> Check:
    samples, batches = read_records(root, figures["run_id"])
    try:
        check_accounting(root, figures)
    except AssertionError as error:
        return Check(holds=False, text=f"accounting is not exact: {error}")
    is_whole = figures["steps"] == NUM_STEPS and all(len(batch.sample_ids) == BATCH for batch in batches)
    return Check(
        holds=is_whole,
        text=f"accounting exact: {len(samples)} samples, {len(batches)} batches of {BATCH}, each applied once",
    )


def _learned(metrics: Sequence[Metric]) -> Check:
    rewards = [metric.values[REWARD_MEAN] for metric in metrics]
    difference, spread = welch(rewards[:ENDS], rewards[-ENDS:])
    return Check(
        holds=difference - spread > 0,
        text=f"mean reward of the last {ENDS} steps is {difference:+.3f} above that of the first {ENDS} "
        f"(95 % interval {difference - spread:+.3f} to {difference + spread:+.3f})",
    )


def welch(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The difference of two means, and half the width of its 95 % interval where the variances differ (Welch, 1947)."""
    errors = [variance(values) / len(values) for values in (before, after)]
    degrees = sum(errors) ** 2 / sum(
        error**2 / (len(values) - 1) for error, values in zip(errors, (before, after), strict=True)
    )
    return fmean(after) - fmean(before), _STUDENT_T[math.floor(degrees)] * math.sqrt(sum(errors))


def _emitted(run_id: str, metrics: Sequence[Metric]) -> Check:
    settings = AwsSettings(name=NAME)
    clients = AwsClients(settings)
    try:
        points = asyncio.run(read_emf(clients, settings.log_group, run_id))
    finally:
        clients.close()
    # A step that was written twice was written with the same values.
    emitted = {
        point.properties["step"]: point.value
        for point in points
        if (point.namespace, point.name) == (NAMESPACE, REWARD_MEAN)
    }
    recorded = {metric.step: metric.values[REWARD_MEAN] for metric in metrics}
    return Check(
        holds=emitted == recorded,
        text=f"metric {REWARD_MEAN} read back from {settings.log_group}: {len(emitted)} steps, as recorded",
    )


def _spent(root: Path, figures: dict[str, Any], metrics: Sequence[Metric], requests: Counter[str]) -> Check:
    """Stated; nothing to fail but to have counted none."""
    run_id, reader = figures["run_id"], backend_of(root).reader(figures["run_id"])
    stored = [item for purpose in Purpose for item in reader.records(sample_prefix(run_id, purpose), limit=-1)]
    num_rollouts = len(stored)
    num_turns = sum(len(decode(item.value, SampleRecord).calls) for item in stored)
    by_service = Counter[str]()
    for operation, number in requests.items():
        by_service[operation.partition(".")[0]] += number
    total = sum(by_service.values())
    step_s = (metrics[-1].time - metrics[0].time) / (len(metrics) - 1)
    parts = ", ".join(f"{service} {number}" for service, number in by_service.most_common())
    return Check(
        holds=total > 0,
        text=f"{step_s:.1f} s a step; {num_turns} turns of {num_rollouts} rollouts, {total} requests ({parts}): "
        f"{total / num_turns:.2f} a turn",
    )


def _removed(root: Path, run_id: str) -> Iterator[Check]:
    out = _turnmill("cleanup", run_id, "--yes", "--json", "--root", str(root), capture=True)
    remains = json.loads(out.splitlines()[-1])["remains"]
    yield Check(holds=not any(remains.values()), text=f"nothing is left of the run: {remains}")
    _turnmill("deploy", "--name", NAME, "--delete", "--yes")


if __name__ == "__main__":
    raise SystemExit(main())
