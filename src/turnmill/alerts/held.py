"""Alerts kept back by a channel's rate limit, and the one that sums them up when there is room again."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from turnmill.alerts.build import new_alert
from turnmill.alerts.feed import Feed
from turnmill.alerts.policy import Channel, Limiter
from turnmill.errors import BackendUnavailable, NotFound
from turnmill.records import Alert, AlertKind, Delivery, DeliveryAction, DeliveryState

logger = logging.getLogger(__name__)
# Seconds until a summary that could not be recorded is tried again.
_RETRY_S = 30.0


class HeldAlerts:
    """The rate limits of all channels and what they hold; `spawn(alert_id, channel)` has a summary delivered."""

    def __init__(
        self, feed: Feed, channels: Mapping[str, Channel], spawn: Callable[[str, str], None], command: str
    ) -> None:
        """`command` lists alerts."""
        self._feed = feed
        self._command = command
        self._spawn = spawn
        self._limiters = {name: Limiter(channel) for name, channel in channels.items()}
        self._held: dict[str, dict[str, Alert]] = {name: {} for name in channels}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    def admit(self, channel: str) -> bool:
        """Whether one more alert may go there now; it counts if so."""
        # While some are held the room that comes free is their summary's.
        return not self._held[channel] and self._limiters[channel].take(time.time())

    def hold(self, alert: Alert) -> None:
        """Keep what is held of `alert` for the summaries."""
        for delivery in alert.deliveries:
            if delivery.state is DeliveryState.HELD and delivery.channel in self._held:
                self._held[delivery.channel][alert.alert_id] = alert
        self.schedule()

    def recall(self, alert: Alert) -> None:
        """Take over one that an earlier process recorded, oldest first; `schedule` when all are there."""
        for delivery in alert.deliveries:
            if delivery.channel not in self._held or delivery.action is not DeliveryAction.TRIGGER:
                continue
            if delivery.state is DeliveryState.HELD:
                self._held[delivery.channel][alert.alert_id] = alert
            elif delivery.state is not DeliveryState.SUMMED:
                self._limiters[delivery.channel].note(alert.created_at)

    def schedule(self) -> None:
        """Have a summary sent, as soon as there is room, wherever something is held."""
        for channel, held in self._held.items():
            if held and channel not in self._timers and not self._is_closed:
                self._timers[channel] = asyncio.create_task(self._sum_up_later(channel))

    async def close(self) -> None:
        """Leave what is held to the next process; idempotent."""
        self._is_closed = True
        timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)

    async def _sum_up_later(self, channel: str) -> None:
        try:
            while self._held[channel]:
                limiter = self._limiters[channel]
                await asyncio.sleep(limiter.free_in_s(time.time()))
                if not limiter.take(time.time()):
                    continue
                try:
                    await self._sum_up(channel)
                except BackendUnavailable as error:
                    logger.error("a summary of held alerts can't be recorded, trying again later: %s", error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            del self._timers[channel]

    async def _sum_up(self, channel: str) -> None:
        """Record the summary first: killed in between, some are summed up twice, and none is lost."""
        held = dict(self._held[channel])
        counts = Counter(alert.kind for alert in held.values())
        told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        summary = new_alert(
            AlertKind.ALERTS_HELD,
            f"{len(held)} alerts were not sent here one by one, over this channel's rate: {told}",
            command=self._command,
            log_lines=[alert.summary for alert in held.values()],
        )
        worst = max((alert.severity for alert in held.values()), key=lambda severity: severity.rank)
        summary = replace(summary, severity=worst, held_by=channel, deliveries=(Delivery(channel=channel),))
        await self._feed.add(summary)
        try:
            for alert_id in held:
                # What was removed since has nothing left to mark.
                with contextlib.suppress(NotFound):
                    await self._feed.set_delivery(alert_id, Delivery(channel=channel, state=DeliveryState.SUMMED))
                del self._held[channel][alert_id]
        finally:
            self._spawn(summary.alert_id, channel)
