"""What alerts show: commands that a shell takes, and the conversation that says most."""

import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.alerts import new_alert
from turnmill.backends.embedded import open_run
from turnmill.ports import Message, Write
from turnmill.records import (
    AlertKind,
    DeadDelivery,
    DeadSample,
    DeliveryAction,
    InvalidReason,
    Metric,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    encode,
)
from turnmill.wiring.watching.checks.dead_letters import DeadDeliveries, DeadLetters, DeadMessages, DeadSamples, Source
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.checks.rewards import CollapsedRewards
from turnmill.wiring.watching.evidence import command, failing_conversation, last_lines

REQUEST = RolloutRequest(sample_id="s", timestamp="", max_length=1, rewards={}, data={})


def sample(name: str, state: SampleState, reward: float | None, created_at: float) -> SampleRecord:
    return SampleRecord(
        run_id="r1",
        purpose=Purpose.TRAIN,
        sample_id=name,
        task_id="t",
        group_id="g",
        state=state,
        created_at=created_at,
        request=REQUEST,
        deadline=0.0,
        reward=reward,
        reason=InvalidReason.ENV_ERROR if state is SampleState.INVALID else None,
    )


async def record(root: Path, *samples: SampleRecord) -> None:
    ports = open_run(root, "r1", num_replicas=0)
    await ports.records.write([Write(key=one.key, value=encode(one), expected=0) for one in samples])
    ports.close()


async def test_of_a_run_that_failed_in_its_baseline_a_conversation_of_that_is_shown(tmp_path: Path) -> None:
    played = [
        replace(sample(f"b{n}", SampleState.REPORTED, n / 2000, 1.0), purpose=Purpose.BASELINE) for n in range(1200)
    ]
    await record(tmp_path, *played)
    assert failing_conversation(tmp_path, "r1") == played[0].key
    trained = sample("t", SampleState.TRAINED, 1.0, 1.0)
    await record(tmp_path, trained)
    assert failing_conversation(tmp_path, "r1") == trained.key


async def test_the_conversation_is_the_last_invalid_one_or_else_the_worst(tmp_path: Path) -> None:
    assert failing_conversation(tmp_path, "r1") is None
    await record(
        tmp_path,
        sample("a", SampleState.TRAINED, 1.0, 1.0),
        sample("b", SampleState.DROPPED, -1.0, 2.0),
        sample("c", SampleState.DROPPED, -1.0, 3.0),
        sample("d", SampleState.LEASED, None, 4.0),
    )
    assert failing_conversation(tmp_path, "r1") == "samples/r1/train/c"
    await record(tmp_path, sample("e", SampleState.INVALID, None, 6.0), sample("f", SampleState.INVALID, None, 5.0))
    assert failing_conversation(tmp_path, "r1") == "samples/r1/train/e"


def test_commands_name_the_deployment_from_any_folder_and_survive_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command(Path("it's a $root"), "status", "r1")
    assert shlex.split(told) == ["turnmill", "status", "r1", "--root", str(tmp_path / "it's a $root")]


def test_log_lines_are_those_of_the_roles_asked_for(tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "r1" / "logs"
    logs.mkdir(parents=True)
    for role in ("replica-0", "replica-1", "trainer"):
        (logs / f"{role}.log").write_text("".join(f"{number}\n" for number in range(30)))
    assert last_lines(tmp_path, "r1", ["replica"]) == [
        f"replica-{role}: {number}" for role in (0, 1) for number in range(20, 30)
    ]
    assert len(last_lines(tmp_path, "r1")) == 30 and last_lines(tmp_path, "r2") == []


async def test_dead_letters_of_every_kind_are_found_with_why(tmp_path: Path) -> None:
    ports = open_run(tmp_path, "r1", num_replicas=1)
    clock = [0.0]
    sources: list[Source] = [DeadMessages(ports), DeadSamples(ports.records, "r1"), DeadDeliveries(ports.runs, "r1")]
    check = DeadLetters(sources, about="run r1", command="turnmill queues r1", clock=lambda: clock[0])
    try:
        assert await check.look() == []
        dead = DeadSample(
            run_id="r1",
            purpose=Purpose.TRAIN,
            sample_id="7_1",
            num_attempts=3,
            detail="its worker died",
            dead_at=time.time(),
            request=REQUEST,
        )
        await ports.records.write([Write(key=dead.key, value=encode(dead), expected=0)])
        for run_id, kind in (
            ("r1", AlertKind.STAGE_SLOW),
            ("r1", AlertKind.DEAD_LETTERS_GROWING),
            ("r2", AlertKind.STAGE_SLOW),
        ):
            letter = DeadDelivery(
                alert=new_alert(kind, "slow", command="x", run_id=run_id),
                channel="ops",
                action=DeliveryAction.TRIGGER,
                error="HTTP 404",
                attempts=1,
                dead_at=1.0,
            )
            await ports.runs.write([Write(key=letter.key, value=encode(letter), expected=0)])
        queue = ports.generate_request[0]
        await queue.send([Message(body=b"x", group="poison", dedup_id=None)])
        for _ in range(30):
            await queue.release([one.receipt for one in await queue.lease(max_messages=1, lease_s=60)])
        clock[0] = 2.0
        (finding,) = await check.look()
        assert finding.summary == (
            "dead letters of run r1 grow: 1 in queue generate_request-0, 1 in samples, 1 in alert deliveries"
        )
        assert finding.error is not None and "group 'poison'" in finding.error
        assert "7_1, 3 attempts: its worker died" in finding.error and "stage_slow to ops: HTTP 404" in finding.error
        assert finding.conversation == "samples/r1/train/7_1"
        clock[0] = 700.0
        assert await check.look() == []
    finally:
        ports.close()


async def test_a_collapse_shows_the_conversation_of_when_it_began_and_ends_when_rewards_are_back(
    tmp_path: Path,
) -> None:
    await record(tmp_path, sample("a", SampleState.TRAINED, 0.0, 1.0))
    ports = open_run(tmp_path, "r1", num_replicas=0)

    async def write(first: int, *means: float) -> None:
        for step, mean in enumerate(means, start=first):
            values = {"num_generated": 16.0, "num_invalid": 0.0, "reward_mean": mean, "reward_min": 0.0}
            metric = Metric(run_id="r1", step=step, time=float(step), values={**values, "reward_max": 1.0})
            await ports.metrics.write(metric)

    def check() -> CollapsedRewards:
        return CollapsedRewards(tmp_path, "r1", RecentMetrics(ports, "r1"))

    try:
        await write(1, *[0.6, 0.62] * 8)
        assert await check().look() == []
        await write(17, *[0.1] * 8)
        (finding,) = await check().look()
        assert "rewards of run r1 collapsed by step 24: the mean reward fell from 0.61" in finding.summary
        assert (finding.stage, finding.conversation) == ("SubmitTraining", "samples/r1/train/a")
        await write(25, *[0.6] * 8)
        assert await check().look() == []
    finally:
        ports.close()
