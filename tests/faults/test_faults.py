"""The short form of the fault harness: ten kills over all roles, the other faults, a disk that fills up or is slow."""

from pathlib import Path
from random import Random

import pytest

from tests.faults import disk, shim
from tests.faults.faults import KILLS, OF_THE_MACHINE, OVER
from tests.faults.harness import Tally, attack, schedule

# Ten kills in all.
SERIES = (
    ("kill worker-0", "kill replica-0", "kill trainer"),
    ("kill control", "kill trainer between writes", "kill replica-1"),
    ("kill trainer", "kill control"),
    ("kill worker-0", "kill trainer between writes"),
)
DISTURBANCES = (
    ("pause worker-0", "doubled message", "old weights", "late message"),
    ("pause replica-0", "SQLite busy", "doubled message", "pause trainer"),
)
CLOCK_AND_DISK = ("clock an hour back", "slow disk", "clock an hour forward", "kill control")
needs_shim = pytest.mark.skipif(shim.why_not() is not None, reason=shim.why_not() or "")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("faults", SERIES, ids=lambda faults: "-".join(name.split()[1] for name in faults))
def test_a_run_whose_roles_are_killed_ends_with_an_exact_account(tmp_path: Path, faults: tuple[str, ...]) -> None:
    tally = Tally()
    attack(tally, tmp_path / "root", faults, Random(" ".join(faults)), max_steps=4 + 4 * len(faults))
    assert tally.num_kills == len(faults), tally.outcomes
    assert not any(outcome == OVER for _, outcome in tally.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("faults", DISTURBANCES, ids=lambda faults: faults[0].replace(" ", "-"))
def test_a_run_that_is_disturbed_ends_with_an_exact_account(tmp_path: Path, faults: tuple[str, ...]) -> None:
    attack(Tally(), tmp_path / "root", faults, Random(" ".join(faults)), max_steps=4 + 4 * len(faults))


@needs_shim
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_clock_is_set_and_whose_disk_is_slow_for_a_while_ends_with_an_exact_account(tmp_path: Path) -> None:
    tally, built = Tally(), shim.build(tmp_path / "shim")
    attack(tally, tmp_path / "root", CLOCK_AND_DISK, Random(0), max_steps=16, under=built)
    assert sum(tally.outcomes.values()) == len(CLOCK_AND_DISK), tally.outcomes
    assert min(built.num_moved_clocks, built.num_slow_writes) > 0


@needs_shim
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_a_slow_disk_ends_with_an_exact_account(tmp_path: Path) -> None:
    assert "exact account" in disk.slow_disk(tmp_path / "disk")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(disk.why_not() is not None, reason=disk.why_not() or "")
def test_a_full_disk_ends_a_run_clearly_and_space_brings_it_to_its_end(tmp_path: Path) -> None:
    assert "resumed" in disk.fill_disk(tmp_path / "disk")


def test_a_schedule_depends_on_its_seed_alone_and_kills_every_role() -> None:
    assert schedule(Random(7), 20, has_shim=True) == schedule(Random(7), 20, has_shim=True)
    assert schedule(Random(7), 20, has_shim=True) != schedule(Random(8), 20, has_shim=True)
    planned = schedule(Random(7), 20, has_shim=False)
    assert [planned.count(name) >= 3 for name in KILLS] == [True] * len(KILLS)
    assert sum(name in KILLS for name in planned) == 20
    assert not set(planned) & set(OF_THE_MACHINE)
