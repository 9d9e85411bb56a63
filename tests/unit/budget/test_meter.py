"""The run's clock over attempts, and what is said when a limit is reached."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.embedded import open_run
from turnmill.budget import Breach, Meter, Spent, clocks, run_seconds, spent_by, stage_hours, used_up
from turnmill.config import Config, to_dict
from turnmill.errors import BackendUnavailable, BudgetExceeded
from turnmill.ports import Count, Message, RecordStore, RunPorts, Write
from turnmill.records import (
    Purpose,
    Run,
    RunClock,
    RunStatus,
    StageRecord,
    TrainingStatus,
    encode,
    token_count_key,
)


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RunPorts]:
    opened = open_run(tmp_path, "r1", num_replicas=1)
    yield opened
    opened.close()


def run(*, attempt: int = 1, sources: Mapping[str, str] = {}, usd_per_hour: float = 0.0, **changes: Any) -> Run:
    return Run(
        run_id="r1",
        cause="test",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config=to_dict(Config(**changes)),
        sources=dict(sources),
        data_path=None,
        attempt=attempt,
        forecast={"usd_per_hour": usd_per_hour},
    )


async def put_clock(ports: RunPorts, attempt: int, seconds: float, began_at: float = 0.0) -> None:
    clock = RunClock(run_id="r1", attempt=attempt, began_at=began_at, seconds=seconds)
    await ports.records.write([Write(key=clock.key, value=encode(clock), expected=None)])


async def count(ports: RunPorts, purpose: Purpose, replica: str, *amounts: int) -> None:
    for index, amount in enumerate(amounts):
        key = f"calls/r1/{purpose}/{replica}/{index}"
        entry = (Write(key=key, value=b"x", expected=0), Message(body=b"x", group=key, dedup_id=None))
        await ports.answers.write([entry], [Count(key=token_count_key("r1", purpose, replica), amount=amount)])


async def test_a_run_takes_the_time_of_all_its_attempts_and_not_the_time_between_them(ports: RunPorts) -> None:
    await put_clock(ports, 1, 40.0, began_at=1000.0)
    await put_clock(ports, 2, 50.0, began_at=900_000.0)
    meter = Meter(
        ports.records, run(attempt=3, max_runtime_s=91.0, training_timeout=20.0, call_timeout_s=10.0), root=Path()
    )
    await meter.start()
    assert 90.0 <= meter.run_s < 91.0 and meter.over() is None
    await asyncio.sleep(1.0)
    assert meter.over() == "max_runtime_s"
    await meter.close()
    found = await clocks(ports.records, "r1")
    assert [clock.attempt for clock in found] == [1, 2, 3] and run_seconds(found) >= 91.0


async def test_an_attempt_that_is_begun_again_under_its_number_counts_on(ports: RunPorts) -> None:
    """A control process that was killed before its data was found valid: the next one begins the run once more."""
    await put_clock(ports, 1, 40.0)
    meter = Meter(ports.records, run(attempt=1), root=Path())
    await meter.start()
    assert 40.0 <= meter.run_s < 50.0
    await meter.close()
    assert 40.0 <= run_seconds(await clocks(ports.records, "r1")) < 50.0


class Shaky:
    """A store that can't be written to while `is_away`."""

    def __init__(self, records: RecordStore) -> None:
        self.is_away = False
        # Set at the third refusal, and at the first write after that.
        self.refused, self.written = asyncio.Event(), asyncio.Event()
        self._num_refused = 0
        self._records = records
        self.get, self.scan = records.get, records.scan

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        if self.is_away:
            self._num_refused += 1
            if self._num_refused == 3:
                self.refused.set()
            raise BackendUnavailable("the disk is busy")
        applied = await self._records.write(writes)
        if self.refused.is_set():
            self.written.set()
        return applied


async def test_a_moment_without_a_store_ends_no_clock_and_loses_no_time(
    ports: RunPorts, caplog: pytest.LogCaptureFixture
) -> None:
    records = Shaky(ports.records)
    meter = Meter(records, run(), root=Path(), keep_s=0.01)
    await meter.start()
    records.is_away = True
    await records.refused.wait()
    assert meter.over() is None, "a limit that is not reached, and no error"
    missed_s = meter.run_s
    records.is_away = False
    await records.written.wait()
    assert run_seconds(await clocks(ports.records, "r1")) >= missed_s
    await meter.close()
    assert caplog.text.count("can't be written down now") == 1


async def test_what_a_run_has_used_is_the_sum_over_purposes_and_replicas(ports: RunPorts) -> None:
    await count(ports, Purpose.TRAIN, "replica-0", 5, 7)
    await count(ports, Purpose.TRAIN, "replica-1", 11)
    await count(ports, Purpose.EVAL, "replica-0", 13)
    await put_clock(ports, 1, 1800.0)
    spent = await spent_by(ports.records, run(usd_per_hour=3.0))
    assert spent == Spent(tokens={"train": 23, "eval": 13}, run_s=1800.0, usd=1.5)
    assert spent.num_tokens == 36


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"budget_tokens": 100}, "budget_tokens"),
        ({"budget_tokens": 101}, None),
        ({"budget_usd": 2.0}, "budget_usd"),
        ({"budget_usd": 2.1}, None),
        ({"max_runtime_s": 3600.0}, "max_runtime_s"),
    ],
)
def test_a_limit_is_reached_when_as_much_is_used(changes: dict[str, Any], name: str | None) -> None:
    spent = Spent(tokens={"train": 60, "eval": 40}, run_s=3600.0, usd=2.0)
    assert used_up(Config(**changes), spent) == name


def breach(name: str, *, step: int, sources: Mapping[str, str] = {}, **changes: Any) -> Breach:
    training = TrainingStatus(
        run_id="r1", state="exhausted", step=step, max_steps=10, incarnation=1, updated_at=1.0, checkpoint="/c/final"
    )
    spent = Spent(tokens={"train": 900, "eval": 134}, run_s=61.0, usd=7.0)
    made = run(sources=sources, **changes)
    return Breach(run=made, name=name, spent=spent, training=training, root=Path("/d"))


def test_a_breach_says_what_how_much_where_and_how_to_go_on() -> None:
    text = breach("budget_tokens", step=4, sources={"budget_tokens": "--budget-tokens"}, budget_tokens=1000).text
    assert text == (
        "budget_tokens = 1000 (--budget-tokens) is used up: 1,034 tokens generated (train 900, eval 134), 61 s, "
        "7.00 USD; stopped at step 4 of 10, checkpoint /c/final; go on with more: "
        "turnmill resume r1 --budget-tokens 3102 --root /d"
    )
    assert "no step is made; go on with more: turnmill resume r1 --budget-usd 14.00 --root /d" in (
        breach("budget_usd", step=0, budget_usd=6.0).text
    )


def test_a_breach_of_a_ceiling_says_that_the_deployment_has_to_raise_it() -> None:
    text = breach("budget_tokens", step=4, sources={"budget_tokens": "turnmill.toml"}, budget_tokens=1000).text
    assert (
        "it is the ceiling of this deployment: raise it in [ceilings] of turnmill.toml, then turnmill resume r1" in text
    )


async def test_the_error_holds_the_figures_as_they_are_now(ports: RunPorts) -> None:
    meter = Meter(ports.records, run(budget_tokens=10), root=Path("/d"))
    await count(ports, Purpose.BASELINE, "replica-0", 12)
    error = await meter.exceeded("budget_tokens", None)
    assert isinstance(error, BudgetExceeded) and "12 tokens generated (baseline 12)" in str(error)


def test_hours_by_stage_cover_all_attempts_and_end_with_their_control_process() -> None:
    stages = (
        StageRecord(name="A", state="done", started_at=0.0, ended_at=3600.0),
        StageRecord(name="B", state="running", started_at=3600.0),
        StageRecord(name="B", state="done", started_at=90_000.0, ended_at=91_800.0, attempt=2),
    )
    made = Run(**{**{f: getattr(run(), f) for f in Run.__dataclass_fields__}, "stages": stages})
    seen = [RunClock(run_id="r1", attempt=1, began_at=0.0, seconds=5400.0)]
    assert stage_hours(made, seen) == {"A": 1.0, "B": 1.0}
