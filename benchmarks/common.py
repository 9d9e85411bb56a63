"""What all benchmarks share: one JSON line a measurement, the ratio of interleaved pairs, the load beside each figure.

rounds x subjects (A B A B) -> measurement lines -> median of the ratios of each round -> one ratio line
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
# The peers' own virtual environment; `make bench-peers` makes it.
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
# One thread a process, and no look at a model hub: what the launcher and the Makefile set for the roles.
QUIET_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

# Figures that were taken while others used more of the cores than this, on average, are no results.
QUIET_SHARE = 0.1


def load() -> float:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def busy(seconds: float = 0.5) -> float:
    """Share of all cores that others use: measured while this process sleeps.

    The load average alone can't tell: it remembers a minute of our own work.
    """
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    spent = [late - early for early, late in zip(before, after, strict=True)]
    # The fourth and fifth field count idle time.
    return round(1 - (spent[3] + spent[4]) / max(1, sum(spent)), 2)


def _cpu_times() -> list[int]:
    """Ticks of all cores by kind (user, nice, system, idle, waiting for the disk, ...)."""
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def machine() -> str:
    """The machine in a few words."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="short form, below a minute on an idle machine")
    return parser


def emit(**values: Any) -> None:
    """One JSON line on standard output."""
    print(json.dumps(values), flush=True)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the form: ours is at least (or at most) `bound` times the peer's."""

    benchmark: str
    text: str
    unit: str
    # Which subjects are compared.
    ours: str
    peer: str
    # None where nothing is promised.
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, ratio: float) -> bool | None:
        """Whether the ratio is within the bound; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    @property
    def bound(self) -> str:
        low = "" if self.at_least is None else f">= {self.at_least:g}"
        return low or ("" if self.at_most is None else f"<= {self.at_most:g}")


@dataclass(kw_only=True)
class Conditions:
    """What else the machine did; taken before and after each measurement, while nothing of ours runs."""

    loads: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def take(self) -> None:
        self.loads.append(load())
        self.busy.append(busy())


def emit_ratio(claim: Claim, ours: Sequence[float], peers: Sequence[float], met: Conditions) -> None:
    """The claim's line: medians, and the median of the ratios of each round's pair."""
    ratio = median(our / peer for our, peer in zip(ours, peers, strict=True))
    emit(
        kind="ratio",
        benchmark=claim.benchmark,
        claim=claim.text,
        unit=claim.unit,
        ours=_rounded(median(ours)),
        ours_name=claim.ours,
        peer=_rounded(median(peers)),
        peer_name=claim.peer,
        ratio=_rounded(ratio),
        bound=claim.bound,
        holds=claim.holds(ratio),
        rounds=len(ours),
        load_before=met.loads[0],
        load_after=met.loads[-1],
        others_busy=round(fmean(met.busy), 3),
        quiet=fmean(met.busy) <= QUIET_SHARE,
        machine=machine(),
    )


def emit_skip(benchmark: str, what: str, why: str) -> None:
    """Say visibly what was not measured."""
    emit(kind="skipped", benchmark=benchmark, what=what, why=why)


def interleave(
    benchmark: str, case: str, unit: str, subjects: Mapping[str, Callable[[], float]], *, rounds: int
) -> tuple[dict[str, list[float]], Conditions]:
    """Measure the subjects one after the other, `rounds` times; the figures by subject, and the conditions met."""
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    met = Conditions()
    met.take()
    for number in range(rounds):
        for name, measure in subjects.items():
            value = measure()
            figures[name].append(value)
            met.take()
            emit(
                kind="measurement",
                benchmark=benchmark,
                subject=name,
                case=case,
                value=_rounded(value),
                unit=unit,
                round=number,
                load_before=met.loads[-2],
                load_after=met.loads[-1],
                others_busy=max(met.busy[-2:]),
            )
    return figures, met


def run_peer(script: str, *args: str, timeout_s: float = 600.0) -> Any:
    """Run a script of `peers/` in the peers' environment; the value of its last line of JSON."""
    done = subprocess.run(
        [str(PEER_PYTHON), str(PEERS / script), *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **QUIET_ENV},
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def has_peers() -> bool:
    """Whether the peers' environment is there."""
    return PEER_PYTHON.exists()


def allow_many_files() -> None:
    """Raise the limit of open files to what is allowed: hundreds of connections at both ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
