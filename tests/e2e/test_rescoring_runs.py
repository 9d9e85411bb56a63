"""Conversations of a real model, rescored: the same environment gives the same rewards to the last bit."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.house import CONFIG, House, open_house
from turnmill.environment.wordle import Wordle
from turnmill.records import Purpose, SampleRecord
from turnmill.rollout.scheduler import Scheduler
from turnmill.wiring.rescoring.comparison import Verdict
from turnmill.wiring.rescoring.rescore import Rescoring, Selection, rescore

# So short that conversations fill it.
TIGHT = replace(CONFIG, max_length=48)


async def play(house: House, num_groups: int) -> list[SampleRecord]:
    """That many groups, to their ends."""
    ports = house.ports
    scheduler = Scheduler(
        ports.records, ports.rollout_request, ports.rollout_response, house.run.run_id, Purpose.TRAIN, house.config
    )
    await scheduler.start()
    try:
        size = house.config.number_generation
        wanted = [(task, f"group-{task.id}") for task in house.tasks[:num_groups] for _ in range(size)]
        waiting = set(await scheduler.request(wanted))
        while waiting:
            waiting -= {sample.sample_id for sample in await scheduler.ended()}
    finally:
        await scheduler.close()
    return await house.samples()


async def again(house: House, **env_args: Any) -> Rescoring:
    return await rescore(
        house.folder,
        house.run,
        replace(house.config, env_args=env_args),
        Selection(purposes=[Purpose.TRAIN]),
        log=house.folder / "environment.log",
        told=lambda rescored, num: None,
    )


@pytest.mark.slow
async def test_rescoring_with_the_same_environment_changes_nothing_and_with_another_what_it_must(
    tmp_path: Path,
) -> None:
    async with open_house(tmp_path, config=TIGHT, environment=Wordle()) as house:
        samples = await play(house, 6)
        ends = Counter(sample.stop_reason for sample in samples)
        # Full contexts are among them, whose last request left no record.
        assert len(samples) == 24 and ends["max_length"] > 0, ends

        same = await again(house)
        assert same.comparison.num_rescored == same.comparison.num_pairs == len(samples)
        for each in same.rescored:
            assert (each.verdict, each.change) == (Verdict.RESCORED, 0.0), each
            assert dict(each.metrics) == each.sample.metrics and each.num_calls == each.num_stored_calls
        assert (same.comparison.difference, same.comparison.low, same.comparison.high) == (0.0, 0.0, 0.0)

        # One turn is all that counts: who solved it later has not.
        short = await again(house, max_turns=1)
        for each in short.rescored:
            in_one = each.sample.metrics["turns"] == 1 and each.sample.reward == 1.0
            assert (each.verdict, each.new) == (Verdict.RESCORED, float(in_one))
            assert each.num_calls == min(1, each.num_stored_calls)

        assert await house.samples() == samples
