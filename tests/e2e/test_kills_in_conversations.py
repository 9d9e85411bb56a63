"""The worker is killed at each turn of its conversations: what the next one says is trained, and nothing else is."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.house import MODEL, TOKEN, House, open_house
from tests.e2e.mortal_worker import FIRST_OWN, MORTAL, NUM_TURNS
from tests.e2e.one_go import in_one_go
from turnmill import failpoints
from turnmill.conversation.history import read_calls
from turnmill.generation.renderer import Renderer
from turnmill.records import Call, Purpose, SampleRecord
from turnmill.training.samples import rows_of

# Those that have something to lose: a first question that nobody asked leaves nothing behind.
POINTS = [
    f"{point}-{turn}" for turn in range(NUM_TURNS) for point in ("asking", "answered") if (point, turn) > ("asking", 0)
]


@asynccontextmanager
async def mortal_worker(house: House, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.mortal_worker", house.sessions.base_url, TOKEN, str(folder)),
        env={**os.environ, failpoints.VARIABLE: str(folder / "armed")},
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def heard(folder: Path) -> dict[str, list[tuple[int, list[dict[str, Any]]]]]:
    """Who has heard what in the conversations that came to their end, by sample: several, where a report was lost."""
    found: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            found.setdefault(told["sample_id"], []).append((told["pid"], told["messages"]))
    return found


@pytest.mark.slow
async def test_workers_killed_at_each_turn_leave_no_call_of_a_dead_branch_in_any_batch(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    (folder / "armed").mkdir(parents=True)
    async with open_house(tmp_path / "house", replace(MORTAL, max_attempts=20), has_worker=False) as house:
        training = asyncio.create_task(house.train())
        for point in POINTS:
            (folder / "armed" / point).touch()
            async with mortal_worker(house, folder) as process:
                assert await process.wait() == -signal.SIGKILL, point
        async with mortal_worker(house, folder) as last:
            await training
        by_id = {sample.sample_id: sample for sample in await house.samples()}
        batched = [by_id[sample_id] for batch in await house.batches() for sample_id in batch.sample_ids]
        recorded = [await calls_of(house, sample) for sample in batched]
    assert len(batched) == 16
    renderer, told, num_dead = Renderer(MODEL), heard(folder), 0
    for sample, calls in zip(batched, recorded, strict=True):
        live = [call for call in calls if call.call_id in sample.calls]
        num_dead += len(calls) - len(live)
        said = [message for call in live for message in (*call.messages, call.reply)]
        assert (last.pid, said) in told[sample.sample_id], "what the worker that reported has heard"
        assert len(live) == NUM_TURNS and [call.parent for call in live[1:]] == [call.call_id for call in live[:-1]]
        assert {call.attempt for call in live[FIRST_OWN:]} == {sample.attempt}
        (row,) = rows_of(sample, live)
        assert row.token_ids == in_one_go(renderer, live)
        assert row.num_trained == sum(call.num_sampled for call in live)
    # Each kill behind the first question of its own left one call at least in each of the samples that were played.
    assert num_dead >= 8
    assert max(sample.attempt for sample in batched) > len(POINTS)


async def calls_of(house: House, sample: SampleRecord) -> list[Call]:
    return await read_calls(house.ports.records, house.run.run_id, Purpose.TRAIN, sample.sample_id)
