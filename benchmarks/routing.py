"""How fast is a turn routed, when the model answers at once?

    python -m benchmarks.routing [--quick]

Ours is the real path: worker -> HTTP -> proxy -> queue -> replica -> call record -> queue -> proxy -> worker, with
secrets, leases, sample records and reports, each role a process; only the engine is replaced. Beside it, in the same
run: a bare aiohttp client against an aiohttp stub, and a verifiers `MultiTurnEnv` with its own client against it.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks import stub
from benchmarks.common import (
    Claim,
    Conditions,
    allow_many_files,
    arguments,
    emit,
    emit_ratio,
    emit_skip,
    has_peers,
    interleave,
    run_peer,
)
from benchmarks.house import Player, instant_config, open_house
from turnmill.ports import RecordStore
from turnmill.records import Call, Purpose, SampleRecord, call_prefix, decode
from turnmill.wiring.event_loop import run_loop

NAME = "routing"
TURNS = 6
# Conversations before the clock starts: connections, imports, first pages of the files.
WARM_UP = 64
OURS, BARE, VERIFIERS = "turnmill", "bare aiohttp", "verifiers"


def measure_ours(concurrent: int, total: int) -> float:
    """Turns a second of a deployment that is started for it."""

    async def measure(root: Path) -> float:
        config = instant_config(concurrent=concurrent, turns=TURNS)
        async with open_house(root, config) as house, Player(house) as player:
            await player.play(max(WARM_UP, concurrent), window=2 * concurrent)
            seconds, ended = await player.play(total, window=2 * concurrent)
            return sum(sample.metrics["turns"] for sample in ended) / seconds

    with tempfile.TemporaryDirectory() as folder:
        return run_loop(measure(Path(folder)))


def measure_bare(url: str, concurrent: int, total: int) -> float:
    """Turns a second of the bare client."""
    run_loop(stub.play(url, total=WARM_UP, concurrent=WARM_UP, turns=2))
    return run_loop(stub.play(url, total=total, concurrent=concurrent, turns=TURNS))


def measure_verifiers(url: str, concurrent: int, total: int) -> float:
    """Turns a second of verifiers."""
    args = {"url": url, "concurrent": concurrent, "total": total, "turns": TURNS}
    figures = run_peer("verifiers_turns.py", *(f"--{name}={value}" for name, value in args.items()))
    return float(figures["turns_per_s"])


def compare(args: argparse.Namespace, url: str) -> None:
    """Throughput at 64 and 512 conversations at once, against both peers."""
    rounds = 3 if args.quick else 5
    medians: dict[int, list[float]] = {}
    all_met = Conditions()
    for concurrent in (64, 512):
        # Over fewer, the first and the last of them weigh too much: those are not played at once with as many others.
        total = max(256, concurrent) * (4 if args.quick else 8)
        subjects: dict[str, Callable[[], float]] = {
            OURS: partial(measure_ours, concurrent, total),
            # Many more: at its speed a few would be over in a fraction of a second.
            BARE: partial(measure_bare, url, concurrent, 8 * total),
        }
        if has_peers() and concurrent == 64:
            subjects[VERIFIERS] = partial(measure_verifiers, url, concurrent, 64 if args.quick else 256)
        case = f"{concurrent} conversations x {TURNS} turns"
        figures, met = interleave(NAME, case, "turns/s", subjects, rounds=rounds)
        medians[concurrent] = figures[OURS]
        all_met.loads += met.loads
        all_met.busy += met.busy
        bounds = {BARE: 0.3 if concurrent == 64 else None, VERIFIERS: 10.0}
        for peer in subjects:
            if peer != OURS:
                claim = Claim(benchmark=NAME, text=case, unit="turns/s", ours=OURS, peer=peer, at_least=bounds[peer])
                emit_ratio(claim, figures[OURS], figures[peer], met)
    if not has_peers():
        emit_skip(NAME, VERIFIERS, "no .venv-peers: run `make bench-peers`")
    claim = Claim(
        benchmark=NAME,
        text="512 conversations at once against 64",
        unit="turns/s",
        ours="turnmill, 512",
        peer="turnmill, 64",
        at_least=0.8,
    )
    emit_ratio(claim, medians[512], medians[64], all_met)


# ---------------------------------------------------------------- cost per turn


def measure_depth(turns: int, concurrent: int) -> list[float]:
    """Seconds from one call to the next, as the call records tell, mean by quarter of the conversation."""

    async def measure(root: Path) -> list[float]:
        config = instant_config(concurrent=concurrent, turns=turns)
        async with open_house(root, config) as house, Player(house) as player:
            await player.play(concurrent, window=concurrent)
            _, ended = await player.play(concurrent, window=concurrent)
            return await quarters(house.ports.records, ended)

    with tempfile.TemporaryDirectory() as folder:
        return run_loop(measure(Path(folder)))


async def quarters(records: RecordStore, samples: list[SampleRecord]) -> list[float]:
    """Mean gap between consecutive calls in each quarter of the turns."""
    gaps: list[list[float]] = [[], [], [], []]
    for sample in samples:
        stored = await records.scan(call_prefix(sample.run_id, Purpose.TRAIN, sample.sample_id))
        times = sorted(decode(item.value, Call).created_at for item in stored)
        for index, (before, after) in enumerate(pairwise(times)):
            gaps[4 * index // (len(times) - 1)].append(after - before)
    return [fmean(quarter) for quarter in gaps]


def cost_per_turn(args: argparse.Namespace) -> None:
    """Is a late turn as cheap as an early one?"""
    rounds = 1 if args.quick else 3
    first: list[float] = []
    last: list[float] = []
    met = Conditions()
    met.take()
    for number in range(rounds):
        for turns in (8, 32, 128):
            found = measure_depth(turns, 16)
            met.take()
            emit(
                kind="measurement",
                benchmark=NAME,
                subject=OURS,
                case=f"{turns} turns, 16 conversations",
                value=[round(1000 * quarter, 3) for quarter in found],
                unit="ms/turn by quarter of the conversation",
                round=number,
                load_before=met.loads[-2],
                load_after=met.loads[-1],
                others_busy=max(met.busy[-2:]),
            )
            if turns == 128:
                first.append(1000 * found[0])
                last.append(1000 * found[3])
    claim = Claim(
        benchmark=NAME,
        text="last quarter of 128 turns against the first",
        unit="ms/turn",
        ours="turns 97-128",
        peer="turns 1-32",
        at_most=1.2,
    )
    emit_ratio(claim, last, first, met)


def main() -> None:
    args = arguments("How fast is a turn routed?").parse_args()
    allow_many_files()
    with stub.stub_server() as url:
        compare(args, url)
    cost_per_turn(args)


if __name__ == "__main__":
    main()
