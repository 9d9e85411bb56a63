"""Does memory stay flat while conversations come and go?

    python -m benchmarks.memory [--quick]

Resident memory of proxy, worker and replica (instant engine, so that what grows is ours and not a model's) from the
1 000th conversation to the 10 000th, 64 at once, six turns each.
"""

import tempfile
from pathlib import Path

from benchmarks.common import Claim, Conditions, allow_many_files, arguments, emit, emit_ratio, load
from benchmarks.house import Player, instant_config, open_house
from turnmill.wiring.event_loop import run_loop

NAME = "memory"
CONCURRENT = 64
TURNS = 6


def resident_mib(pid: int) -> float:
    """Resident set of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no resident memory")


async def measure(root: Path, first: int, last: int) -> dict[str, list[float]]:
    """Resident memory by process, after `first` conversations and after each further tenth until `last`."""
    found: dict[str, list[float]] = {}
    async with open_house(root, instant_config(concurrent=CONCURRENT, turns=TURNS)) as house, Player(house) as player:
        played = 0
        for until in [first + (last - first) * tenth // 10 for tenth in range(11)]:
            before = load()
            seconds, _ = await player.play(until - played, window=2 * CONCURRENT)
            rate = (until - played) * TURNS / seconds
            played = until
            for name, pid in house.pids.items():
                found.setdefault(name, []).append(resident_mib(pid))
            emit(
                kind="measurement",
                benchmark=NAME,
                subject="turnmill",
                case=f"after {played} conversations",
                value={name: round(values[-1], 1) for name, values in found.items()},
                unit="MiB resident",
                turns_per_s=round(rate),
                load_before=before,
                load_after=load(),
            )
    return found


def main() -> None:
    args = arguments("Does memory stay flat?").parse_args()
    allow_many_files()
    first, last = (500, 2000) if args.quick else (1000, 10000)
    met = Conditions()
    met.take()
    with tempfile.TemporaryDirectory() as folder:
        found = run_loop(measure(Path(folder), first, last))
    met.take()
    for name, values in found.items():
        claim = Claim(
            benchmark=NAME,
            text=f"resident memory of {name}",
            unit="MiB",
            ours=f"at conversation {last}",
            peer=f"at conversation {first}",
            at_most=1.05,
        )
        emit_ratio(claim, [values[-1]], [values[0]], met)


if __name__ == "__main__":
    main()
