"""Who is told of rollouts that were given up, and how often."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from turnmill.alerts.feed import Feed
from turnmill.backends.aws.rollout_alarm import DEDUP_WINDOW_S, RolloutAlarm
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.errors import DeliveryFailed
from turnmill.records import (
    Alert,
    DeliveryAction,
    DeliveryState,
    InvalidReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
)


@dataclass
class Channel:
    """A channel to people that may be away."""

    name: str = "sns"
    is_away: bool = False
    sent: list[Alert] = field(default_factory=list)

    async def send(self, alert: Alert) -> None:
        if self.is_away:
            raise DeliveryFailed("nobody is there")
        self.sent.append(alert)

    async def resolve(self, alert: Alert) -> None:
        raise AssertionError("nothing is resolved")


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SqliteRecordStore]:
    store = SqliteRecordStore(tmp_path)
    yield store
    store.close()


def given_up(number: int, *, detail: str = "the environment raised KeyError") -> SampleRecord:
    """A sample of an external run that ended without a reward."""
    request = RolloutRequest(
        sample_id=f"t-{number}_0~1",
        timestamp="2026-01-01T00:00:00+00:00",
        max_length=100,
        rewards={"range": [0.0, 1.0]},
        data={},
        run_id="run",
    )
    return SampleRecord(
        run_id="run",
        purpose=Purpose.TRAIN,
        sample_id=request.sample_id,
        wire_id=f"t-{number}_0",
        task_id=f"t-{number}_0",
        group_id=f"t-{number}_0",
        state=SampleState.INVALID,
        created_at=0.0,
        request=request,
        deadline=0.0,
        attempt=3,
        reason=InvalidReason.ENV_ERROR,
        detail=detail,
    )


async def alerts_in(records: SqliteRecordStore) -> list[Alert]:
    return [alert async for alert in Feed(records).alerts()]


async def test_it_is_told_under_the_trainers_id_with_reason_and_evidence(records: SqliteRecordStore) -> None:
    channel = Channel()
    await RolloutAlarm(records, channel).tell(given_up(0))
    (told,) = channel.sent
    assert told.summary == "rollout t-0_0 of run run was given up after 3 attempts: env_error"
    assert (told.error, told.conversation) == ("the environment raised KeyError", given_up(0).key)
    (alert,) = await alerts_in(records)
    delivery = alert.delivery("sns", DeliveryAction.TRIGGER)
    assert delivery is not None and (delivery.state, delivery.attempts) == (DeliveryState.DELIVERED, 1)


async def test_the_next_ones_of_the_run_are_counted_for_an_hour(records: SqliteRecordStore) -> None:
    channel = Channel()
    alarm = RolloutAlarm(records, channel)
    for number in range(4):
        await alarm.tell(given_up(number))
    assert len(channel.sent) == 1
    (alert,) = await alerts_in(records)
    assert alert.num_repeats == 3

    # As it is an hour later.
    await Feed(records).update(alert.alert_id, lambda it: replace(it, created_at=it.created_at - DEDUP_WINDOW_S))
    await alarm.tell(given_up(4))
    assert [told.num_earlier for told in channel.sent] == [0, 3]


async def test_an_alert_that_did_not_get_through_is_tried_with_the_next_rollout(records: SqliteRecordStore) -> None:
    channel = Channel(is_away=True)
    alarm = RolloutAlarm(records, channel)
    await alarm.tell(given_up(0))
    (alert,) = await alerts_in(records)
    delivery = alert.delivery("sns", DeliveryAction.TRIGGER)
    assert delivery is not None
    assert (delivery.state, delivery.last_error) == (DeliveryState.PENDING, "nobody is there")

    channel.is_away = False
    await alarm.tell(given_up(1))
    assert [told.alert_id for told in channel.sent] == [alert.alert_id]


async def test_what_is_told_holds_no_chat_secret(records: SqliteRecordStore) -> None:
    channel = Channel()
    await RolloutAlarm(records, channel).tell(given_up(0, detail="POST /a/0123456789abcdef0123/v1/chat failed"))
    assert channel.sent[0].error == "POST /a/***/v1/chat failed"


async def test_of_several_processes_that_give_rollouts_up_at_once_one_tells_and_the_others_are_counted(
    records: SqliteRecordStore,
) -> None:
    channel = Channel()
    alarms = [RolloutAlarm(records, channel) for _ in range(8)]
    await asyncio.gather(*(alarm.tell(given_up(number)) for number, alarm in enumerate(alarms)))
    assert len(channel.sent) == 1
    [alert] = await alerts_in(records)
    assert alert.num_repeats == 7
