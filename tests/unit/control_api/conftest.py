"""A deployment's records without any process of it, and its interface served over real HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from turnmill.backends.embedded import open_root_records, open_run
from turnmill.config import Config, to_dict
from turnmill.control_api.access import token_of
from turnmill.control_api.server import serve_api
from turnmill.ports import Write
from turnmill.records import (
    Metric,
    Purpose,
    RolloutRequest,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    StageRecord,
    TrainingStatus,
    encode,
    training_key,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    json: Any


class Client:
    """Asks with the token, unless told otherwise; paths are sent as they are."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session = session
        self.url = url
        self.token = token

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        data: Any = None,
        token: str | None = None,
        is_anonymous: bool = False,
    ) -> Answer:
        given = {} if is_anonymous else {"Authorization": f"Bearer {token or self.token}"}
        url = URL(self.url + path, encoded=True)
        async with self._session.request(method, url, headers={**given, **(headers or {})}, data=data) as response:
            body = await response.read()
            is_json = response.content_type == "application/json"
            value = await response.json() if is_json and body else None
            return Answer(status=response.status, headers=dict(response.headers), body=body, json=value)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path)


@asynccontextmanager
async def served(root: Path, **options: Any) -> AsyncIterator[Client]:
    async with serve_api(root, **options) as url, aiohttp.ClientSession() as session:
        yield Client(session, url, token_of(root))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with served(tmp_path) as found:
        yield found


def made_run(run_id: str = "one", **changes: Any) -> Run:
    run = Run(
        run_id=run_id,
        cause=f"cause of {run_id}",
        upload=f"{run_id}.jsonl",
        status=RunStatus.ACTIVE,
        created_at=time.time(),
        config=to_dict(replace(Config(), max_steps=3)),
        sources={},
        data_path=None,
        worker_token_hash="a hash",
        stages=(
            StageRecord(name="ValidateData", state="done", started_at=time.time() - 9, ended_at=time.time() - 8),
            StageRecord(name="SubmitTraining", state="running", started_at=time.time() - 7),
        ),
    )
    return replace(run, **changes)


async def store(root: Path, *runs: Run) -> None:
    records = open_root_records(root)
    await records.write([Write(key=run.key, value=encode(run), expected=None) for run in runs])
    records.close()


async def play(root: Path, run: Run, *, num_steps: int, samples: dict[SampleState, int]) -> None:
    """Steps with metrics, one beyond the trainer's that does not count, and samples."""
    ports = open_run(root, run.run_id, num_replicas=1)
    try:
        for step in range(1, num_steps + 2):
            values = {"num_generated": 8.0, "num_invalid": 1.0, "response_length_mean": 2.5}
            values |= {"reward_mean": step / 10, "solved": step / 20}
            await ports.metrics.write(Metric(run_id=run.run_id, step=step, time=100.0 + step, values=values))
        status = TrainingStatus(
            run_id=run.run_id, state="running", step=num_steps, max_steps=3, incarnation=2, updated_at=1.0
        )
        await ports.records.write([Write(key=training_key(run.run_id), value=encode(status), expected=None)])
        made = [
            made_sample(run.run_id, f"{state}-{index}", state) for state in samples for index in range(samples[state])
        ]
        await ports.records.write([Write(key=item.key, value=encode(item), expected=0) for item in made])
    finally:
        ports.close()


def made_sample(run_id: str, sample_id: str, state: SampleState, purpose: Purpose = Purpose.TRAIN) -> SampleRecord:
    request = RolloutRequest(
        sample_id=sample_id, timestamp="", max_length=10, rewards={"range": [0.0, 1.0]}, data={}, run_id=run_id
    )
    return SampleRecord(
        run_id=run_id,
        purpose=purpose,
        sample_id=sample_id,
        task_id="t",
        group_id="g",
        state=state,
        created_at=1.0,
        request=request,
        deadline=2.0,
    )


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """All files with their size and time, but those of the interface itself."""
    found = {path: path.stat() for path in root.rglob("*") if not path.name.startswith("control.")}
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found.items() if path.is_file()}


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become so within 20 s")
