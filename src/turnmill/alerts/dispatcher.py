"""Alerts on their way: recorded first, then delivered to each channel by a task of its own.

    raise_alert -> the same again? counted : recorded with a delivery per channel -> PENDING -> DELIVERED | DEAD
                                             over the channel's rate:             -> HELD    -> SUMMED (in a summary)

At least once: a process that is killed after the record, or after a delivery and before its record, leaves a PENDING
delivery, which the next one takes up; a receiver knows it by the alert's id.

One dispatcher at a time delivers for a deployment: the one that was started. Any other one records, and hands over to
it: it looks for that every two seconds. With two of them nothing is lost, but much comes twice.
"""

import asyncio
import contextlib
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
# Alerts of so long ago are looked through from time to time.
_SEARCHED_S = 86_400.0


class Dispatcher:
    """Raises and resolves alerts, and from `start` to `close` delivers in the background, its own and what others left.

    One that was not started records what is raised, for the one that was.
    """

    def __init__(
        self,
        feed: Feed,
        channels: list[Channel],
        *,
        policy: Policy = _DEFAULT,
        redactor: Redactor = _PATTERNS_ONLY,
        command: str = "turnmill alerts",
    ) -> None:
        """`command` lists the alerts of the deployment, wherever it is typed."""
        self._feed = feed
        self._channels = {channel.notifier.name: channel for channel in channels}
        if len(self._channels) != len(channels):
            raise InvalidInput("two alert channels have the same name")
        self._policy = policy
        self._redactor = redactor
        self._sender = Sender(feed, self._channels, policy, redactor)
        self._held = HeldAlerts(feed, self._channels, self._spawn, command)
        # Of two equal alerts at the same time one is counted.
        self._lock = asyncio.Lock()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        # Tasks that have to look once more when they end.
        self._again: set[tuple[str, str]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._delivers = False
        self._is_closed = False

    async def start(self) -> None:
        """Deliver from here on; take up what earlier processes left. Raises `BackendUnavailable`: then again."""
        self._delivers = True
        async for alert in self._feed.alerts():
            self._held.recall(alert)
            for delivery in alert.deliveries:
                if delivery.state is DeliveryState.PENDING:
                    self._spawn(alert.alert_id, delivery.channel)
        self._held.schedule()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="alerts of other processes")
            self._looking.add_done_callback(_tell_of_defect)

    async def open_alerts(self, run_id: str | None, *, since: float = 0.0) -> list[Alert]:
        """Those of the run (None: of none) that are not resolved, oldest first; raises `BackendUnavailable`."""
        return await self._feed.open_alerts(run_id, since=since)

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
                Delivery(channel=name, state=DeliveryState.PENDING if self._admits(name) else DeliveryState.HELD)
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
        await self._set_off(alert)
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
        await self._set_off(alert)
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
        await self._feed.redrive(letters[0])
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
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._held.close()
        await self.drain(grace_s)
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admits(self, channel: str) -> bool:
        """The rates are kept by the one that delivers."""
        return not self._delivers or self._held.admit(channel)

    async def _set_off(self, alert: Alert) -> None:
        """Have what is pending of `alert` delivered, here or by the one that delivers."""
        pending = [delivery.channel for delivery in alert.deliveries if delivery.state is DeliveryState.PENDING]
        if pending and not self._delivers:
            await self._feed.hand_over(alert.alert_id)
            return
        for channel in pending:
            self._spawn(alert.alert_id, channel)

    async def _look(self) -> None:
        """Consumes what others hand over; ends when it is cancelled."""
        searched = time.monotonic()
        while True:
            await asyncio.sleep(self._policy.look_s)
            try:
                for alert_id, note in await self._feed.handed_over():
                    # It may be gone since: then there is nothing to deliver.
                    with contextlib.suppress(NotFound):
                        await self._take_up(await self._feed.get(alert_id))
                    await self._feed.taken_over(note)
                if time.monotonic() - searched >= self._policy.search_s:
                    searched = time.monotonic()
                    async for alert in self._feed.alerts(since=time.time() - _SEARCHED_S):
                        await self._take_up(alert)
            except BackendUnavailable as error:
                logger.warning("alerts of other processes can't be looked for, trying again: %s", error)

    async def _take_up(self, alert: Alert) -> None:
        """Deliver what somebody else left pending, or hold it where that is over the channel's rate."""
        for delivery in alert.deliveries:
            about = (alert.alert_id, delivery.channel)
            if delivery.state is not DeliveryState.PENDING:
                continue
            is_new = delivery.action is DeliveryAction.TRIGGER and not delivery.attempts and about not in self._tasks
            # A channel that nobody knows here has no rate; its delivery becomes a dead letter.
            if is_new and delivery.channel in self._channels and not self._held.admit(delivery.channel):
                held = replace(delivery, state=DeliveryState.HELD)
                self._held.hold(await self._feed.set_delivery(alert.alert_id, held))
            else:
                self._spawn(*about)

    def _spawn(self, alert_id: str, channel: str) -> None:
        """Have all that is pending between this alert and this channel delivered, in order."""
        about = (alert_id, channel)
        if self._is_closed or not self._delivers:
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


def _tell_of_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("alerts of other processes are not looked for any more", exc_info=error)


def _resolved(alert: Alert) -> Alert:
    """With a resolving delivery to each channel to which it went."""
    told = [one.channel for one in alert.deliveries if one.state in (DeliveryState.PENDING, DeliveryState.DELIVERED)]
    # Not before it was raised, whatever the clock says.
    alert = replace(alert, resolved_at=max(time.time(), alert.created_at))
    for channel in told:
        alert = with_delivery(alert, Delivery(channel=channel, action=DeliveryAction.RESOLVE))
    return alert
