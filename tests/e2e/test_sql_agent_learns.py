"""The tool-calling example learns: whole runs with the shipped tiny model, judged by the bounds of the benchmark."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.sql_curve import problems, run_seed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_the_sql_agent_learns(seed: int, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    figures = run_seed(seed, tmp_path)
    record_property(
        "figure",
        f"sql-agent, seed {seed}: reward {figures['reward_first10']:.3f} in the first ten steps, "
        f"{figures['reward_last10']:.3f} in the last ten of {figures['steps']}, {figures['gain']:+.3f} "
        f"(95 % interval {figures['gain_low']:+.3f} to {figures['gain_high']:+.3f})",
    )
    assert problems(figures) == []
