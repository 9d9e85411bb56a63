"""Recorded first, then delivered: once where all goes well, at least once where it does not, and never silently not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.alerts.receivers import Receiver, Said, pagerduty, receiver
from turnmill import failpoints
from turnmill.alerts import Channel, Dispatcher, Feed, Policy, Redactor, new_alert
from turnmill.alerts.pagerduty import PagerDutyChannel
from turnmill.alerts.policy import Limiter
from turnmill.alerts.webhook import WebhookChannel
from turnmill.backends.embedded import open_root_records
from turnmill.errors import DeliveryFailed, InvalidInput, NotFound
from turnmill.records import Alert, AlertKind, Delivery, DeliveryAction, DeliveryState, Severity

SECRET = "a-secret-of-the-receiver"
QUICK = Policy(first_pause_s=0.01, most_pause_s=0.02, max_attempts=3, timeout_s=5.0)
CHILD = Path(__file__).with_name("alert_child.py")


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    records = open_root_records(tmp_path)
    yield Feed(records)
    records.close()


@asynccontextmanager
async def dispatching(
    feed: Feed, *channels: Channel, policy: Policy = QUICK, redactor: Redactor | None = None
) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(feed, list(channels), policy=policy, redactor=redactor or Redactor())
    await dispatcher.start()
    try:
        yield dispatcher
        assert await dispatcher.drain(20)
    finally:
        await dispatcher.close(0)


def hook(url: str, name: str = "hook", **limits: object) -> Channel:
    return Channel(notifier=WebhookChannel(name=name, url=url, secret=SECRET), **limits)  # type: ignore[arg-type]


def failed(run_id: str = "r1", stage: str = "Train", now: float | None = None) -> Alert:
    return new_alert(
        AlertKind.RUN_FAILED, f"{run_id} failed", command="turnmill doctor", run_id=run_id, stage=stage, now=now
    )


async def recorded(feed: Feed) -> list[Alert]:
    return [alert async for alert in feed.alerts()]


async def test_an_alert_is_delivered_to_every_channel_and_recorded_so(feed: Feed) -> None:
    with receiver() as one, receiver() as other:
        async with dispatching(feed, hook(one.url, "one"), hook(other.url, "other")) as dispatcher:
            alert = await dispatcher.raise_alert(failed())
        assert [got.json["alert"]["alert_id"] for got in one.received + other.received] == [alert.alert_id] * 2
    [kept] = await recorded(feed)
    assert [(one.channel, one.state, one.attempts) for one in kept.deliveries] == [
        ("one", DeliveryState.DELIVERED, 1),
        ("other", DeliveryState.DELIVERED, 1),
    ]
    assert all(one.delivered_at is not None for one in kept.deliveries)


async def test_the_same_alert_is_counted_within_the_window_and_sent_after_it(feed: Feed) -> None:
    now = time.time()
    with receiver() as there:
        async with dispatching(feed, hook(there.url)) as dispatcher:
            first = await dispatcher.raise_alert(failed(now=now))
            again = await asyncio.gather(*[dispatcher.raise_alert(failed(now=now + 60)) for _ in range(20)])
            assert {alert.alert_id for alert in again} == {first.alert_id}
            await dispatcher.raise_alert(failed(stage="Publish", now=now))
            await dispatcher.raise_alert(failed(run_id="r2", now=now))
        async with dispatching(feed, hook(there.url)) as dispatcher:
            await dispatcher.raise_alert(failed(now=now + 3599))
            later = await dispatcher.raise_alert(failed(now=now + 3601))
        assert len(there.received) == 4 and there.received[3].json["alert"]["num_earlier"] == 21
    assert (await feed.get(first.alert_id)).num_repeats == 21 and later.num_earlier == 21


async def test_equal_alerts_at_the_same_time_are_one(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url)) as dispatcher:
            await asyncio.gather(*[dispatcher.raise_alert(failed()) for _ in range(50)])
        assert len(there.received) == 1
    [alert] = await recorded(feed)
    assert alert.num_repeats == 49


async def test_a_failure_that_passes_is_repeated(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=500), Said(status=429)]
        async with dispatching(feed, hook(there.url)) as dispatcher:
            await dispatcher.raise_alert(failed())
        assert len({got.json["alert"]["alert_id"] for got in there.received}) == 1 and len(there.received) == 3
    [alert] = await recorded(feed)
    assert (alert.deliveries[0].state, alert.deliveries[0].attempts) == (DeliveryState.DELIVERED, 3)
    assert await feed.dead_letters() == []


async def test_retry_after_is_waited_for(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=429, headers={"Retry-After": "1"})]
        async with dispatching(feed, hook(there.url)) as dispatcher:
            began = time.monotonic()
            await dispatcher.raise_alert(failed())
            await asyncio.to_thread(there.wait_for, 2)
            # A lower bound holds on any machine.
            assert time.monotonic() - began >= 1.0


async def test_retry_after_is_bounded(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=503, headers={"Retry-After": "86400"})]
        policy = replace(QUICK, most_retry_after_s=0.05)
        async with dispatching(feed, hook(there.url), policy=policy) as dispatcher:
            await dispatcher.raise_alert(failed())
        assert len(there.received) == 2


async def test_after_the_last_attempt_the_delivery_is_a_dead_letter_that_can_be_redriven(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=500, body="no room")] * 3
        async with dispatching(feed, hook(there.url)) as dispatcher:
            alert = await dispatcher.raise_alert(failed())
            assert await dispatcher.drain(20)
            [letter] = await feed.dead_letters()
            assert (letter.channel, letter.attempts, letter.error) == ("hook", 3, "HTTP 500: no room")
            assert letter.alert.alert_id == alert.alert_id and letter.action is DeliveryAction.TRIGGER
            assert (await feed.get(alert.alert_id)).deliveries[0].state is DeliveryState.DEAD
            await dispatcher.redrive(alert.alert_id, "hook")
            assert await dispatcher.drain(20)
            assert await feed.dead_letters() == []
            with pytest.raises(NotFound, match="dead letter"):
                await dispatcher.redrive(alert.alert_id, "hook")
        assert len(there.received) == 4
    assert (await feed.get(alert.alert_id)).deliveries[0].state is DeliveryState.DELIVERED


async def test_a_delivery_that_another_process_put_back_is_taken_up_by_the_dispatcher_that_runs(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=410)]
        async with dispatching(feed, hook(there.url)) as dispatcher:
            alert = await dispatcher.raise_alert(failed())
            assert await dispatcher.drain(20)
            [letter] = await feed.dead_letters()
            await feed.redrive(letter)
            await asyncio.to_thread(there.wait_for, 2)
        assert await feed.dead_letters() == []
    assert (await feed.get(alert.alert_id)).deliveries[0].state is DeliveryState.DELIVERED


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 410])
async def test_a_final_refusal_is_not_repeated(feed: Feed, status: int) -> None:
    with receiver(lambda _: Said(status=status)) as there:
        async with dispatching(feed, hook(there.url)) as dispatcher:
            await dispatcher.raise_alert(failed())
        assert len(there.received) == 1
    [letter] = await feed.dead_letters()
    assert letter.attempts == 1


async def test_a_channel_that_hangs_blocks_neither_the_caller_nor_the_others(feed: Feed) -> None:
    free = threading.Event()
    with receiver(lambda _: Said(after=free)) as stuck, receiver() as fine:
        async with dispatching(feed, hook(stuck.url, "stuck"), hook(fine.url, "fine")) as dispatcher:
            for number in range(10):
                await dispatcher.raise_alert(failed(run_id=f"r{number}"))
            await asyncio.to_thread(fine.wait_for, 10)
            states = {one.state for alert in await recorded(feed) for one in alert.deliveries if one.channel == "stuck"}
            assert states == {DeliveryState.PENDING}
            free.set()
        assert len(stuck.received) == 10


async def test_a_silent_receiver_is_given_up_after_its_time(feed: Feed) -> None:
    free = threading.Event()
    with receiver(lambda _: Said(after=free)) as there:
        async with dispatching(feed, hook(there.url), policy=replace(QUICK, timeout_s=0.1)) as dispatcher:
            await dispatcher.raise_alert(failed())
        free.set()
    [letter] = await feed.dead_letters()
    assert letter.error == "not delivered within 0.1 s" and letter.attempts == 3


class Defective:
    """A channel with a defect of its own."""

    name = "defective"

    async def send(self, alert: Alert) -> None:
        raise KeyError(alert.alert_id)

    async def resolve(self, alert: Alert) -> None:
        raise DeliveryFailed("never", is_final=True)


async def test_a_defect_of_one_channel_ends_as_its_dead_letter(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, Channel(notifier=Defective()), hook(there.url)) as dispatcher:
            await dispatcher.raise_alert(failed())
        assert len(there.received) == 1
    [letter] = await feed.dead_letters()
    assert (letter.channel, letter.error) == ("defective", "KeyError in the channel")


async def test_what_is_below_a_channels_severity_does_not_go_there(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url, min_severity=Severity.ERROR)) as dispatcher:
            await dispatcher.raise_alert(new_alert(AlertKind.STAGE_SLOW, "slow", command="turnmill status"))
            await dispatcher.raise_alert(failed())
        assert [got.json["alert"]["kind"] for got in there.received] == ["run_failed"]
    assert [alert.deliveries == () for alert in await recorded(feed)] == [True, False]


def told_of(there: Receiver) -> int:
    """Alerts that came one by one or were counted in a summary."""
    alerts = [got.json["alert"] for got in there.received]
    return sum(int(one["summary"].split()[0]) if one["kind"] == "alerts_held" else 1 for one in alerts)


async def test_what_is_over_a_channels_rate_is_summed_up(feed: Feed) -> None:
    with receiver() as tight, receiver() as wide:
        async with dispatching(feed, hook(tight.url, "tight", max_alerts=3, per_s=0.5), hook(wide.url, "wide")) as it:
            await asyncio.gather(*[it.raise_alert(failed(run_id=f"r{number}")) for number in range(20)])
            await asyncio.to_thread(tight.wait_until, lambda: told_of(tight) == 20)
        assert len(wide.received) == 20
        told = [got.json["alert"] for got in tight.received]
    sent = [one for one in told if one["kind"] == "run_failed"]
    summaries = [one for one in told if one["kind"] == "alerts_held"]
    # A slow machine may have room for more than three of them.
    assert 3 <= len(sent) < 20
    assert "run_failed" in summaries[0]["summary"] and summaries[0]["severity"] == "error"
    states = {one.state for alert in await recorded(feed) for one in alert.deliveries}
    assert states == {DeliveryState.DELIVERED, DeliveryState.SUMMED}


async def test_what_is_held_outlives_the_process(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url, max_alerts=1, per_s=3600)) as dispatcher:
            for number in range(4):
                await dispatcher.raise_alert(failed(run_id=f"r{number}"))
        # The next process knows what went out within the window.
        async with dispatching(feed, hook(there.url, max_alerts=1, per_s=3600)) as dispatcher:
            await dispatcher.raise_alert(failed(run_id="r5"))
        assert len(there.received) == 1
        async with dispatching(feed, hook(there.url, max_alerts=2, per_s=3600)):
            await asyncio.to_thread(there.wait_for, 2)
    assert there.received[1].json["alert"]["summary"].startswith("4 alerts were not sent")


def test_a_limiter_forgets_what_is_past_and_what_a_clock_set_back_put_into_the_future() -> None:
    limiter = Limiter(Channel(notifier=Defective(), max_alerts=2, per_s=10))
    assert limiter.take(100) and limiter.take(101) and not limiter.take(102)
    assert limiter.free_in_s(102) == 8 and limiter.take(110) and not limiter.take(110.5)
    assert limiter.take(50) and limiter.free_in_s(50) == 0


async def test_what_is_over_is_resolved_after_it_was_raised(feed: Feed) -> None:
    free = threading.Event()
    with receiver(pagerduty) as there:
        there.answers = [Said(status=202, after=free)]
        channel = Channel(notifier=PagerDutyChannel(name="pager", routing_key="a" * 32, url=there.url))
        async with dispatching(feed, channel) as dispatcher:
            await dispatcher.raise_alert(failed())
            assert await dispatcher.resolve(AlertKind.RUN_STALLED, run_id="r1") is None
            resolved = await dispatcher.resolve(AlertKind.RUN_FAILED, run_id="r1", stage="Train")
            assert resolved is not None and resolved.resolved_at is not None
            assert await dispatcher.resolve(AlertKind.RUN_FAILED, run_id="r1", stage="Train") is None
            free.set()
            assert await dispatcher.drain(20)
            await dispatcher.raise_alert(failed())
        events = [(got.json["event_action"], got.json["dedup_key"]) for got in there.received]
    assert events == [(action, "turnmill/run_failed/r1/Train") for action in ("trigger", "resolve", "trigger")]


async def test_a_channel_that_is_no_longer_configured_leaves_a_dead_letter(feed: Feed) -> None:
    with receiver(lambda _: Said(status=500)) as there:
        dispatcher = Dispatcher(feed, [hook(there.url)], policy=replace(QUICK, first_pause_s=60, most_pause_s=60))
        await dispatcher.start()
        await dispatcher.raise_alert(failed())
        await asyncio.to_thread(there.wait_for, 1)
        await dispatcher.close(0)
    async with dispatching(feed):
        pass
    [letter] = await feed.dead_letters()
    assert letter.error == "no channel of this name is configured any more"


def test_names_of_channels_are_unique(feed: Feed) -> None:
    with pytest.raises(InvalidInput, match="same name"):
        Dispatcher(feed, [hook("http://127.0.0.1:9/"), hook("http://127.0.0.1:9/")])


async def test_secrets_reach_neither_record_nor_receiver_nor_log(feed: Feed, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-ant-" + "a1B2" * 6
    with receiver(lambda got: Said(status=400, body=f"bad {key} {SECRET} {there.url}")) as there:
        alert = new_alert(
            AlertKind.RUN_FAILED,
            f"failed with Authorization: Bearer {key}",
            command=f"HF_TOKEN={key} turnmill doctor",
            error=f"POST {there.url}: {SECRET}",
            log_lines=[f"api_key='{key}'", "postgres://user:hunter22@db/x", "loss 0.5, token count: 12"],
        )
        async with dispatching(feed, hook(there.url), redactor=Redactor([SECRET, there.url])) as dispatcher:
            await dispatcher.raise_alert(alert)
        sent = there.received[0].body.decode()
    [letter] = await feed.dead_letters()
    everything = sent + repr(await recorded(feed)) + repr(letter) + caplog.text
    for secret in (key, SECRET, "very-secret-path", "hunter22"):
        assert secret not in everything
    assert "loss 0.5, token count: 12" in sent and letter.error.startswith("HTTP 400: bad ***")


@pytest.mark.parametrize(("point", "count"), [("alerts.recorded", 1), ("alerts.sent", 2)])
async def test_a_killed_process_leaves_its_delivery_to_the_next(
    feed: Feed, tmp_path: Path, point: str, count: int
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    (points / point).touch()
    with receiver() as there:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(CHILD),
            str(tmp_path),
            there.url,
            env={**os.environ, failpoints.VARIABLE: str(points)},
            stderr=subprocess.PIPE,
        )
        _, told = await child.communicate()
        assert child.returncode == -signal.SIGKILL, told.decode()
        [alert] = await recorded(feed)
        assert alert.deliveries[0].state is DeliveryState.PENDING
        async with dispatching(feed, hook(there.url)):
            await asyncio.to_thread(there.wait_for, count)
        # A receiver that knows the id drops the second.
        assert [got.json["alert"]["alert_id"] for got in there.received] == [alert.alert_id] * count
    [alert] = await recorded(feed)
    assert alert.deliveries[0].state is DeliveryState.DELIVERED


async def test_evidence_of_any_size_and_encoding_is_recorded_and_cut_after_secrets_are_out(feed: Feed) -> None:
    alert = new_alert(
        AlertKind.CRASH_LOOP,
        "two\nlines \udcff",
        command="x" * 9000,
        error="e" * 7990 + SECRET + "e" * 1_000_000,
        log_lines=[
            "\udcff" * 5000,
            "-----BEGIN RSA PRIVATE KEY-----",
            "MIIEow",
            "-----END RSA PRIVATE KEY-----",
            "end\n",
        ],
    )
    with receiver() as there:
        async with dispatching(feed, hook(there.url), redactor=Redactor([SECRET])) as dispatcher:
            kept = await dispatcher.raise_alert(alert)
        assert there.received[0].json["alert"]["summary"] == "two lines ?"
    assert kept.error is not None and len(kept.error) == 8000 and SECRET[:6] not in kept.error
    assert kept.log_lines == ("?" * 999 + "…", "***", "end") and len(kept.command) == 2000


async def test_old_alerts_are_pruned_but_not_those_that_wait(feed: Feed) -> None:
    async with dispatching(feed) as dispatcher:
        await dispatcher.raise_alert(failed(run_id="old", now=1000.0))
        await dispatcher.raise_alert(failed(run_id="new", now=2000.0))
    waiting = Dispatcher(feed, [hook("http://127.0.0.1:9/")])
    await waiting.raise_alert(failed(run_id="waiting", now=1000.0))
    await waiting.close(0)
    assert await feed.prune(1500.0) == 1
    assert [alert.run_id for alert in await recorded(feed)] == ["waiting", "new"]
    assert await feed.last(failed(run_id="old").dedup_key) is None


async def test_the_feed_lists_by_time_and_run(feed: Feed) -> None:
    async with dispatching(feed) as dispatcher:
        for number in range(5):
            await dispatcher.raise_alert(failed(run_id=f"r{number % 2}", stage=str(number), now=1000.0 + number))
    assert [alert.stage for alert in await recorded(feed)] == list("01234")
    assert [alert.stage async for alert in feed.alerts(since=1002.0)] == list("234")
    assert [alert.stage async for alert in feed.alerts(run_id="r1")] == list("13")
    with pytest.raises(NotFound, match="'none'"):
        await feed.get("none")


SOON = replace(QUICK, look_s=0.02)


async def test_one_that_was_not_started_leaves_its_alerts_to_the_one_that_delivers(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url), policy=SOON) as delivering:
            other = Dispatcher(feed, [hook(there.url)], policy=SOON)
            alert = await other.raise_alert(failed())
            await asyncio.to_thread(there.wait_for, 1)
            await other.resolve(AlertKind.RUN_FAILED, run_id="r1", stage="Train")
            await asyncio.to_thread(there.wait_for, 2)
            await other.close(0)
            assert await delivering.drain(10)
            # What was handed over twice is looked at once more.
            for _ in range(500):
                if not await feed.handed_over():
                    break
                await asyncio.sleep(SOON.look_s)
            assert not await feed.handed_over()
        told = [(got.json["event"], got.json["alert"]["alert_id"]) for got in there.received]
    assert told == [("trigger", alert.alert_id), ("resolve", alert.alert_id)]


async def test_a_dead_letter_that_another_process_redrives_is_delivered_soon(feed: Feed) -> None:
    with receiver() as there:
        there.answers = [Said(status=404)]
        async with dispatching(feed, hook(there.url), policy=SOON) as delivering:
            alert = await delivering.raise_alert(failed())
            assert await delivering.drain(10)
            other = Dispatcher(feed, [], policy=SOON)
            await other.redrive(alert.alert_id, "hook")
            await asyncio.to_thread(there.wait_for, 2)
    assert await feed.dead_letters() == []
    assert (await feed.get(alert.alert_id)).deliveries[0].state is DeliveryState.DELIVERED


async def test_what_a_killed_process_recorded_and_did_not_hand_over_is_found(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url), policy=replace(SOON, search_s=0.05)):
            # As it is between the two writes.
            await feed.add(replace(failed(), deliveries=(Delivery(channel="hook"),)))
            await asyncio.to_thread(there.wait_for, 1)


async def test_alerts_of_others_count_for_the_rate_of_a_channel(feed: Feed) -> None:
    with receiver() as there:
        async with dispatching(feed, hook(there.url, max_alerts=2, per_s=3600.0), policy=SOON) as delivering:
            other = Dispatcher(feed, [hook(there.url)], policy=SOON)
            for number in range(4):
                await other.raise_alert(failed(run_id=f"r{number}"))
            for _ in range(2000):
                if not await feed.handed_over():
                    break
                await asyncio.sleep(0.01)
            assert await delivering.drain(10)
        assert len(there.received) == 2
    assert sorted(alert.deliveries[0].state for alert in await recorded(feed)) == [
        DeliveryState.DELIVERED,
        DeliveryState.DELIVERED,
        DeliveryState.HELD,
        DeliveryState.HELD,
    ]
