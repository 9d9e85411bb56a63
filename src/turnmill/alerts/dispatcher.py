"""Alerts on their way: recorded first, then delivered to each channel by a task of its own.

    raise_alert -> the same again? counted : recorded with a delivery per channel -> PENDING -> DELIVERED | DEAD
                                             over the channel's rate:             -> HELD    -> SUMMED (in a summary)

At least once: a process that is killed after the record, or after a delivery and before its record, leaves a PENDING
delivery, which the next one takes up; a receiver knows it by the alert's id. One dispatcher at a time delivers for a
deployment: with two nothing is lost, but much comes twice.
"""

import asyncio
import logging
import time
from dataclasses import replace

from turnmill import failpoints
from turnmill.alerts.build import presentable
from turnmill.alerts.feed import Feed, with_delivery
from turnmill.alerts.held import HeldAlerts
from turnmill.alerts.policy import Channel, Policy
from turnmill.alerts.redaction import Redactor
from turnmill.alerts.sending import Sender
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound
from turnmill.records import (
    Alert,
    AlertKind,
    Delivery,
    DeliveryAction,
    DeliveryState,
    dedup_key,
)

logger = logging.getLogger(__name__)
_DEFAULT = Policy()
_PATTERNS_ONLY = Redactor()


class Dispatcher:
    """Raises and resolves alerts, and delivers them in the background; `start` it first, and `close` it at the end."""

    def __init__(
        self,
        feed: Feed,
        channels: list[Channel],
        *,
        policy: Policy = _DEFAULT,
        redactor: Redactor = _PATTERNS_ONLY,
    ) -> None:
        self._feed = feed
        self._channels = {channel.notifier.name: channel for channel in channels}
        if len(self._channels) != len(channels):
            raise InvalidInput("two alert channels have the same name")
        self._policy = policy
        self._redactor = redactor
        self._sender = Sender(feed, self._channels, policy, redactor)
        self._held = HeldAlerts(feed, self._channels, self._spawn)
        # Of two equal alerts at the same time one is counted.
        self._lock = asyncio.Lock()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        # Tasks that have to look once more when they end.
        self._again: set[tuple[str, str]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Take up what earlier processes left; raises `BackendUnavailable`."""
        async for alert in self._feed.alerts():
            self._held.recall(alert)
            for delivery in alert.deliveries:
                if delivery.state is DeliveryState.PENDING:
                    self._spawn(alert.alert_id, delivery.channel)
        self._held.schedule()

    async def raise_alert(self, alert: Alert) -> Alert:
        """Record `alert` and have it delivered; the alert as it is recorded, or the earlier one in which it is counted.

        Waits for the record only. Raises `BackendUnavailable`: then the alert may be recorded or not.
        """
        async with self._lock:
            last = await self._feed.last(alert.dedup_key)
            # Also where the clock was set back, but not for ever.
            if last is not None and abs(alert.created_at - last.created_at) < self._policy.dedup_window_s:
                return await self._feed.update(last.alert_id, lambda it: replace(it, num_repeats=it.num_repeats + 1))
            deliveries = tuple(
                Delivery(channel=name, state=DeliveryState.PENDING if self._held.admit(name) else DeliveryState.HELD)
                for name, channel in self._channels.items()
                if alert.severity.rank >= channel.min_severity.rank
            )
            alert = replace(
                presentable(alert, self._redactor),
                num_earlier=0 if last is None else last.num_repeats,
                deliveries=deliveries,
            )
            await self._feed.add(alert)
        failpoints.hit("alerts.recorded")
        self._held.hold(alert)
        for delivery in deliveries:
            if delivery.state is DeliveryState.PENDING:
                self._spawn(alert.alert_id, delivery.channel)
        return alert

    async def resolve(self, kind: AlertKind, *, run_id: str | None = None, stage: str | None = None) -> Alert | None:
        """Tell the channels that were told of it that it is over; None where there is no such open alert.

        The next one like it is a new one at once. Raises `BackendUnavailable`.
        """
        async with self._lock:
            last = await self._feed.last(dedup_key(kind, run_id, stage))
            if last is None:
                return None
            alert = await self._feed.update(last.alert_id, _resolved)
        for delivery in alert.deliveries:
            if delivery.action is DeliveryAction.RESOLVE:
                self._spawn(alert.alert_id, delivery.channel)
        return alert

    async def redrive(self, alert_id: str, channel: str, action: DeliveryAction = DeliveryAction.TRIGGER) -> None:
        """Deliver once more what was given up; raises `NotFound` where there is no such dead letter."""
        letters = [
            letter
            for letter in await self._feed.dead_letters()
            if (letter.alert.alert_id, letter.channel, letter.action) == (alert_id, channel, action)
        ]
        if not letters:
            raise NotFound(f"no delivery of alert {alert_id!r} to channel {channel!r} is a dead letter")
        await self._feed.set_delivery(alert_id, Delivery(channel=channel, action=action))
        await self._feed.unbury(letters[0])
        self._spawn(alert_id, channel)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every delivery is delivered or dead; whether that was so within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._tasks and (left := deadline - loop.time()) > 0:
            await asyncio.wait(self._tasks.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return not self._tasks

    async def close(self, grace_s: float = 5.0) -> None:
        """Give deliveries `grace_s`, then leave the rest to the next process; idempotent."""
        await self._held.close()
        await self.drain(grace_s)
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, alert_id: str, channel: str) -> None:
        """Have all that is pending between this alert and this channel delivered, in order."""
        about = (alert_id, channel)
        if self._is_closed:
            return
        if about in self._tasks:
            self._again.add(about)
            return
        task = asyncio.create_task(self._deliver(alert_id, channel))
        self._tasks[about] = task
        task.add_done_callback(lambda _: self._ended(about))

    def _ended(self, about: tuple[str, str]) -> None:
        del self._tasks[about]
        if about in self._again:
            self._again.discard(about)
            self._spawn(*about)

    async def _deliver(self, alert_id: str, channel: str) -> None:
        while True:
            try:
                await self._sender.deliver_all(alert_id, channel)
                return
            except BackendUnavailable as error:
                logger.error(
                    "alert deliveries can't be recorded, trying again later: %s", error, extra={"at": alert_id}
                )
                await asyncio.sleep(self._policy.most_pause_s)
            except NotFound as error:
                logger.warning("an alert was removed before it was delivered: %s", error, extra={"at": alert_id})
                return


def _resolved(alert: Alert) -> Alert:
    """With a resolving delivery to each channel to which it went."""
    told = [one.channel for one in alert.deliveries if one.state in (DeliveryState.PENDING, DeliveryState.DELIVERED)]
    # Not before it was raised, whatever the clock says.
    alert = replace(alert, resolved_at=max(time.time(), alert.created_at))
    for channel in told:
        alert = with_delivery(alert, Delivery(channel=channel, action=DeliveryAction.RESOLVE))
    return alert
