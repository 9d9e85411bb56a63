"""How a run is told to end, and that nothing makes it deaf."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import open_root_records
from turnmill.errors import BackendUnavailable
from turnmill.pipeline.engine import RunRecord
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import Run, RunStatus, cancel_key
from turnmill.wiring.reading.runs import began
from turnmill.wiring.running.cancelling import cancel, cancellable


class Busy:
    """A record store that can't be read the first few times."""

    def __init__(self, store: RecordStore, num_times: int) -> None:
        self._store = store
        self.num_left = num_times
        self.has_failed = asyncio.Event()

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        if self.num_left > 0:
            self.num_left -= 1
            self.has_failed.set()
            raise BackendUnavailable("busy")
        return await self._store.get(keys)

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        return await self._store.write(writes)

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        return await self._store.scan(prefix, after=after, limit=limit)


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    records = open_root_records(tmp_path)
    yield Busy(records, 1)
    records.close()


async def test_a_wish_is_heard_although_the_records_could_not_be_read_for_a_moment(busy: Busy) -> None:
    async with asyncio.timeout(30), cancellable(busy, "r1", asyncio.Event(), RunStatus.QUEUED) as cancel:
        await busy.has_failed.wait()
        await busy.write([Write(key=cancel_key("r1"), value=b"{}", expected=None)])
        await cancel.event.wait()
    assert cancel.status() is RunStatus.CANCELLED


async def test_ctrl_c_is_heard_although_the_records_can_not_be_read(busy: Busy) -> None:
    busy.num_left, stop = 1_000_000, asyncio.Event()
    async with asyncio.timeout(30), cancellable(busy, "r1", stop, RunStatus.QUEUED) as cancel:
        await busy.has_failed.wait()
        stop.set()
        await cancel.event.wait()
    assert cancel.status() is RunStatus.QUEUED


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"status": RunStatus.QUEUED}, id="up was stopped"),
        pytest.param({"pid_began": 0}, id="its control process was killed"),
    ],
)
async def test_a_run_that_its_process_left_before_it_saw_the_wish_is_cancelled_all_the_same(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Else it would go on with the next start, and whoever cancelled it would wait or believe that it has ended."""
    runs = open_root_records(tmp_path)
    run = Run(
        run_id="r1",
        cause="c",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config={},
        sources={},
        data_path=None,
        pid=os.getpid(),
        pid_began=began(os.getpid()),
    )
    record = await RunRecord.create(runs, run)
    left: list[asyncio.Task[None]] = []

    def asked() -> None:
        left.append(asyncio.create_task(record.save(replace(run, **changes))))

    async with asyncio.timeout(30):
        ended = await cancel(tmp_path, "r1", asked=asked)
    await left[0]
    assert ended.status is RunStatus.CANCELLED
    assert (await RunRecord.open(runs, "r1")).run.status is RunStatus.CANCELLED
    runs.close()
