"""One list of all that was given up, and what redriving each kind does: exactly, and once."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill.alerts import Feed, new_alert
from turnmill.backends.embedded import open_quarantine, open_root_records, open_run
from turnmill.conversation.history import checked_sample, dead_sample, failed_by_infra
from turnmill.errors import InvalidInput, NotFound
from turnmill.ports import Message, RunPorts, Write
from turnmill.records import (
    AlertKind,
    Batch,
    DeadDelivery,
    Delivery,
    DeliveryAction,
    DeliveryState,
    DropReason,
    InvalidReason,
    Purpose,
    RolloutRequest,
    Run,
    RunStatus,
    SampleRecord,
    SampleState,
    StageRecord,
    Upload,
    decode,
    encode,
)
from turnmill.wiring.reading.dead_letters import Letter, LetterKind, choose_letter, look_at_letters, purge, redrive
from turnmill.wiring.running.redriving import give_up_redriven


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RunPorts]:
    ports = open_run(tmp_path, "r1", num_replicas=1)
    await record(ports)
    yield ports
    ports.close()


async def record(ports: RunPorts, **changes: Any) -> None:
    """The run, which nobody has: without a pid it is as active as its record says."""
    run = Run(
        run_id="r1",
        cause="test",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config={"generation_replicas": 1},
        sources={},
        data_path=None,
    )
    run = replace(run, **changes)
    await ports.runs.write([Write(key=run.key, value=encode(run), expected=None)])


async def add_dead(ports: RunPorts, sample_id: str = "task_0", purpose: Purpose = Purpose.TRAIN) -> SampleRecord:
    """A sample that three attempts did not end, and its letter."""
    request = RolloutRequest(
        sample_id=sample_id,
        timestamp="2026-01-01T00:00:00+00:00",
        max_length=100,
        rewards={"range": [0.0, 1.0]},
        data={"prompt": "p"},
        run_id="r1",
        purpose=purpose,
    )
    sample = SampleRecord(
        run_id="r1",
        purpose=purpose,
        sample_id=sample_id,
        task_id="task",
        group_id="group",
        state=SampleState.LEASED,
        created_at=1.0,
        request=request,
        deadline=2.0,
        attempt=3,
    )
    sample = failed_by_infra(sample, "three workers died")
    await ports.records.write([Write(key=sample.key, value=encode(sample), expected=None), dead_sample(sample)])
    return sample


async def read(ports: RunPorts, sample: SampleRecord) -> SampleRecord:
    (stored,) = await ports.records.get([sample.key])
    assert stored is not None
    return checked_sample(stored)


async def change(ports: RunPorts, sample: SampleRecord, **changes: Any) -> None:
    changed = replace(await read(ports, sample), **changes)
    await ports.records.write([Write(key=sample.key, value=encode(changed), expected=None)])


async def leased(ports: RunPorts) -> list[str]:
    messages = await ports.rollout_request.lease(max_messages=10, lease_s=30)
    return [decode(message.body, RolloutRequest).sample_id for message in messages]


def one(root: Path, kind: LetterKind) -> Letter:
    (letter,) = look_at_letters(root, kind=kind)
    return letter


# ---------------------------------------------------------------- rollouts


async def test_a_redriven_rollout_waits_for_a_new_attempt_and_its_letter_is_gone(
    tmp_path: Path, ports: RunPorts
) -> None:
    sample = await add_dead(ports)
    letter = one(tmp_path, LetterKind.ROLLOUT)
    assert (letter.letter_id, letter.attempts, letter.error) == (
        "rollout/r1/train/task_0",
        3,
        "three workers died",
    )
    assert letter.versions["code"] and letter.input["data"] == {"prompt": "p"}
    await redrive(tmp_path, letter)
    again = await read(ports, sample)
    assert (again.state, again.attempt, again.redriven_after) == (SampleState.REQUESTED, 3, 3)
    assert again.reason is None and again.detail is None
    assert await leased(ports) == ["task_0"]
    assert look_at_letters(tmp_path) == []


async def test_a_redrive_that_was_killed_before_its_message_is_done_by_the_next_one(
    tmp_path: Path, ports: RunPorts
) -> None:
    sample = await add_dead(ports)
    letter = one(tmp_path, LetterKind.ROLLOUT)
    await change(ports, sample, state=SampleState.REQUESTED, redriven_after=3, reason=None)
    await redrive(tmp_path, letter)
    await redrive(tmp_path, letter)
    assert await leased(ports) == ["task_0"]
    assert (await read(ports, sample)).redriven_after == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"status": RunStatus.SUCCEEDED},
        {"status": RunStatus.FAILED},
        {"stages": (StageRecord(name="Teardown", state="running", started_at=1.0),)},
    ],
)
async def test_a_rollout_is_redriven_in_an_active_run_only(
    tmp_path: Path, ports: RunPorts, changes: dict[str, Any]
) -> None:
    sample = await add_dead(ports)
    await record(ports, **changes)
    with pytest.raises(InvalidInput, match="only while its run is active"):
        await redrive(tmp_path, one(tmp_path, LetterKind.ROLLOUT))
    assert (await read(ports, sample)).state is SampleState.INVALID
    assert await leased(ports) == []


@pytest.mark.parametrize("state", [SampleState.REQUESTED, SampleState.LEASED, SampleState.REPORTED])
async def test_what_was_redriven_is_dropped_as_surplus_when_its_run_ends(
    tmp_path: Path, ports: RunPorts, state: SampleState
) -> None:
    sample, other = await add_dead(ports), await add_dead(ports, "task_1")
    await redrive(tmp_path, look_at_letters(tmp_path)[0])
    await change(ports, sample, state=state)
    assert await give_up_redriven(ports.records, "r1") == 1
    ended = await read(ports, sample)
    assert (ended.state, ended.drop_reason) == (SampleState.DROPPED, DropReason.SURPLUS)
    assert (await read(ports, other)).state is SampleState.INVALID
    assert await give_up_redriven(ports.records, "r1") == 0


async def test_a_redriven_sample_that_its_group_still_awaited_stays_in_its_batch(
    tmp_path: Path, ports: RunPorts
) -> None:
    sample = await add_dead(ports)
    await redrive(tmp_path, one(tmp_path, LetterKind.ROLLOUT))
    # Recorded, and its trainer was killed before the sample said so.
    await change(ports, sample, state=SampleState.REPORTED)
    batch = Batch(run_id="r1", step=1, groups=(("task_0",),))
    await ports.records.write([Write(key=batch.key, value=encode(batch), expected=0)])
    assert await give_up_redriven(ports.records, "r1") == 0
    assert (await read(ports, sample)).state is SampleState.REPORTED


async def test_of_an_evaluation_a_redriven_sample_may_stay_reported(tmp_path: Path, ports: RunPorts) -> None:
    sample, other = await add_dead(ports, purpose=Purpose.EVAL), await add_dead(ports, "task_1", Purpose.EVAL)
    for letter in look_at_letters(tmp_path):
        await redrive(tmp_path, letter)
    await change(ports, sample, state=SampleState.REPORTED)
    assert await give_up_redriven(ports.records, "r1") == 1
    assert (await read(ports, sample)).state is SampleState.REPORTED
    assert (await read(ports, other)).state is SampleState.DROPPED


async def test_a_sample_that_was_not_given_up_is_not_redriven(tmp_path: Path, ports: RunPorts) -> None:
    sample = await add_dead(ports)
    await change(ports, sample, reason=InvalidReason.ENV_ERROR)
    with pytest.raises(InvalidInput, match="not given up"):
        await redrive(tmp_path, one(tmp_path, LetterKind.ROLLOUT))


async def test_a_purged_rollout_stays_invalid(tmp_path: Path, ports: RunPorts) -> None:
    sample = await add_dead(ports)
    await purge(tmp_path, one(tmp_path, LetterKind.ROLLOUT))
    assert look_at_letters(tmp_path) == [] and (await read(ports, sample)).state is SampleState.INVALID


# ---------------------------------------------------------------- messages


async def bury_messages(ports: RunPorts, *bodies: bytes) -> None:
    queue = ports.generate_request[0]
    await queue.send([Message(body=body, group=str(body), dedup_id=None) for body in bodies])
    for _ in range(21):
        leased = await queue.lease(max_messages=10, lease_s=30)
        await queue.release([item.receipt for item in leased])


async def test_one_message_is_redriven_or_purged_and_the_others_stay(tmp_path: Path, ports: RunPorts) -> None:
    await bury_messages(ports, b'{"n": 1}', b"\xff", b"three")
    first, second, third = look_at_letters(tmp_path, run_id="r1", kind=LetterKind.MESSAGE)
    assert first.letter_id.startswith("message/r1/generate_request-0/")
    assert (first.input["body"], first.attempts) == ({"n": 1}, 20)
    json.dumps([letter.as_object() for letter in (first, second, third)])
    await redrive(tmp_path, second)
    await purge(tmp_path, third)
    assert look_at_letters(tmp_path) == [first]
    (back,) = await ports.generate_request[0].lease(max_messages=10, lease_s=30)
    assert (back.body, back.num_receives) == (b"\xff", 1)
    for act in (redrive, purge):
        with pytest.raises(NotFound, match="is gone"):
            await act(tmp_path, second)


# ---------------------------------------------------------------- deliveries


async def test_a_delivery_is_put_back_for_whoever_delivers(tmp_path: Path) -> None:
    records = open_root_records(tmp_path)
    feed = Feed(records)
    alert = new_alert(AlertKind.RUN_FAILED, "r1 failed", command="c", run_id="r1")
    alert = replace(alert, deliveries=(Delivery(channel="hook", state=DeliveryState.DEAD, attempts=5),))
    await feed.add(alert)
    await feed.bury(
        DeadDelivery(
            alert=alert, channel="hook", action=DeliveryAction.TRIGGER, error="HTTP 500", attempts=5, dead_at=9.0
        )
    )
    letter = one(tmp_path, LetterKind.DELIVERY)
    assert (letter.run_id, letter.attempts, letter.input["channel"]) == ("r1", 5, "hook")
    await redrive(tmp_path, letter)
    assert (await feed.get(alert.alert_id)).deliveries[0].state is DeliveryState.PENDING
    assert look_at_letters(tmp_path) == []
    assert [alert_id for alert_id, _ in await feed.handed_over()] == [alert.alert_id]
    records.close()


# ---------------------------------------------------------------- the list


async def test_letters_are_listed_by_run_and_kind_and_an_unknown_one_is_refused(
    tmp_path: Path, ports: RunPorts
) -> None:
    await add_dead(ports)
    await bury_messages(ports, b"m")
    await record(ports, run_id="r2")
    assert [letter.kind for letter in look_at_letters(tmp_path)] == [LetterKind.ROLLOUT, LetterKind.MESSAGE]
    assert look_at_letters(tmp_path, run_id="r2") == []
    assert len(look_at_letters(tmp_path, run_id="r1", kind=LetterKind.MESSAGE)) == 1
    with pytest.raises(NotFound, match="turnmill dlq list"):
        choose_letter(look_at_letters(tmp_path), "rollout/r1/train/task_9")


def test_looking_at_a_deployment_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    assert look_at_letters(tmp_path / "root") == []
    assert not (tmp_path / "root").exists()


# ---------------------------------------------------------------- quarantine


def upload(root: Path, key: str, data: bytes, sidecar: bytes | None = None) -> Upload:
    path = root / "bucket" / "training-data" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if sidecar is not None:
        path.with_name(path.name.removesuffix(".jsonl") + ".config.toml").write_bytes(sidecar)
    status = path.stat()
    version = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
    return Upload(bucket="bucket", key=key, version=version, num_bytes=len(data))


def test_an_upload_that_was_changed_meanwhile_stays_and_its_copy_is_held(tmp_path: Path) -> None:
    held, copy = open_quarantine(tmp_path), tmp_path / "copy"
    copy.write_bytes(b"old")
    old = upload(tmp_path, "team/a.jsonl", b"old", b"lr = 1")
    new = upload(tmp_path, "team/a.jsonl", b"newer")
    folder = held.folder_of(held.hold("r1", old, copy, {"report.json": b"{}"}))
    assert (folder / "a.jsonl").read_bytes() == b"old"
    path = tmp_path / "bucket" / "training-data" / new.key
    assert path.read_bytes() == b"newer" and path.with_name("a.config.toml").exists()


def test_the_same_key_is_held_as_often_as_it_is_refused(tmp_path: Path) -> None:
    held, copy = open_quarantine(tmp_path), tmp_path / "copy"
    copy.write_bytes(b"bad")
    for number in range(3):
        held.hold(f"r{number}", upload(tmp_path, "a.jsonl", b"%d" % number), copy, {})
    folders = [held.folder_of(f"quarantine/r{number}") for number in range(3)]
    assert [(folder / "a.jsonl").read_bytes() for folder in folders] == [b"0", b"1", b"2"]


def test_what_is_put_back_is_a_new_version_with_its_sidecar_and_only_where_the_key_is_free(tmp_path: Path) -> None:
    held = open_quarantine(tmp_path)
    first = upload(tmp_path, "team/a.jsonl", b"bad", b"lr = 1")
    place = held.hold("r1", first, tmp_path / "copy", {})
    path = tmp_path / "bucket" / "training-data" / "team" / "a.jsonl"
    assert not path.exists()
    upload(tmp_path, "team/a.jsonl", b"another")
    with pytest.raises(InvalidInput, match="is there already"):
        held.put_back(place, "team/a.jsonl")
    path.unlink()
    time.sleep(0.01)
    held.put_back(place, "team/a.jsonl")
    status = path.stat()
    assert path.read_bytes() == b"bad" and status.st_nlink == 1
    assert f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}" != first.version
    assert path.with_name("a.config.toml").read_bytes() == b"lr = 1"
    assert not held.folder_of(place).exists()
    with pytest.raises(InvalidInput, match="not there any more"):
        held.put_back(place, "team/a.jsonl")
