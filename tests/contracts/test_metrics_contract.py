"""What every metric sink keeps."""

import asyncio

import pytest

from turnmill.errors import InvalidInput
from turnmill.ports import MetricSink
from turnmill.records import Metric


def metric(step: int, value: float, *, run_id: str = "run") -> Metric:
    return Metric(run_id=run_id, step=step, time=1.5, values={"reward": value})


async def test_metrics_are_read_by_step_and_the_last_one_of_a_step_wins(metrics: MetricSink) -> None:
    assert await metrics.read("run") == []
    for item in (metric(2, 0.2), metric(1, 0.1), metric(2, 0.3), metric(1, 9.0, run_id="other")):
        await metrics.write(item)
    assert await metrics.read("run") == [metric(1, 0.1), metric(2, 0.3)]
    assert await metrics.read("other") == [metric(1, 9.0, run_id="other")]


async def test_concurrent_writes_are_all_kept(metrics: MetricSink) -> None:
    await asyncio.gather(*(metrics.write(metric(step, float(step))) for step in range(100)))
    assert await metrics.read("run") == [metric(step, float(step)) for step in range(100)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_value_that_is_no_number_is_refused_by_name(metrics: MetricSink, value: float) -> None:
    with pytest.raises(InvalidInput, match="'reward' of step 7"):
        await metrics.write(metric(7, value))
