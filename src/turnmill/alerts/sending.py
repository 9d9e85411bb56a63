"""One delivery: attempts with pauses between them, each recorded; and what was given up becomes a dead letter."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from turnmill import failpoints
from turnmill.alerts.build import cut
from turnmill.alerts.feed import Feed
from turnmill.alerts.policy import Channel, Pause, Policy, may_pass
from turnmill.alerts.redaction import Redactor
from turnmill.errors import DeliveryFailed
from turnmill.ports import Notifier
from turnmill.records import Alert, DeadDelivery, Delivery, DeliveryAction, DeliveryState

logger = logging.getLogger(__name__)
# Attempts to one channel at the same time: one that answers slowly shall not be flooded.
_MOST_AT_ONCE = 4
# Characters.
_MOST_ERROR = 500


class Sender:
    """The retry owner of all channels."""

    def __init__(self, feed: Feed, channels: Mapping[str, Channel], policy: Policy, redactor: Redactor) -> None:
        self._feed = feed
        self._notifiers = {name: channel.notifier for name, channel in channels.items()}
        self._gates = {name: asyncio.Semaphore(_MOST_AT_ONCE) for name in channels}
        self._policy = policy
        self._redactor = redactor

    async def deliver_all(self, alert_id: str, channel: str) -> None:
        """Deliver, one after the other, what is pending of this alert to this channel: to resolve comes last.

        Raises `BackendUnavailable` and `NotFound` of the record; a channel's failure is recorded instead.
        """
        while True:
            alert = await self._feed.get(alert_id)
            pending = [one for one in alert.deliveries if one.channel == channel and one.state is DeliveryState.PENDING]
            if not pending:
                return
            await self._deliver(alert, pending[0])

    async def _deliver(self, alert: Alert, delivery: Delivery) -> None:
        notifier = self._notifiers.get(delivery.channel)
        if notifier is None:
            await self._bury(alert, replace(delivery, last_error="no channel of this name is configured any more"))
            return
        retrying = AsyncRetrying(
            stop=stop_after_attempt(max(1, self._policy.max_attempts - delivery.attempts)),
            wait=Pause(self._policy, delivery.attempts),
            retry=retry_if_exception(may_pass),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    delivery = replace(delivery, attempts=delivery.attempts + 1)
                    try:
                        await self._attempt(notifier, alert, delivery.action)
                    except DeliveryFailed as error:
                        delivery = replace(delivery, last_error=cut(self._redactor(str(error)), _MOST_ERROR))
                        await self._feed.set_delivery(alert.alert_id, delivery)
                        raise
        except DeliveryFailed:
            await self._bury(alert, delivery)
            return
        failpoints.hit("alerts.sent")
        delivered = replace(delivery, state=DeliveryState.DELIVERED, delivered_at=time.time())
        await self._feed.set_delivery(alert.alert_id, delivered)

    async def _attempt(self, notifier: Notifier, alert: Alert, action: DeliveryAction) -> None:
        """Raises nothing but `DeliveryFailed`."""
        tell = notifier.send if action is DeliveryAction.TRIGGER else notifier.resolve
        async with self._gates[notifier.name]:
            try:
                async with asyncio.timeout(self._policy.timeout_s):
                    await tell(alert)
            except DeliveryFailed:
                raise
            except TimeoutError:
                raise DeliveryFailed(f"not delivered within {self._policy.timeout_s:g} s") from None
            except Exception as error:
                # A defect of the channel: it ends as a dead letter, and no other channel hears of it.
                logger.exception("alert channel %s failed", notifier.name, extra={"at": alert.alert_id})
                raise DeliveryFailed(f"{type(error).__name__} in the channel", is_final=True) from error

    async def _bury(self, alert: Alert, delivery: Delivery) -> None:
        error = delivery.last_error or "unknown"
        logger.error(
            "alert %s was not delivered to %s after %d attempts: %s",
            alert.kind,
            delivery.channel,
            delivery.attempts,
            error,
            extra={"at": alert.alert_id},
        )
        # The letter first: killed in between, the delivery is tried and buried again.
        await self._feed.bury(
            DeadDelivery(
                alert=alert,
                channel=delivery.channel,
                action=delivery.action,
                error=error,
                attempts=delivery.attempts,
                dead_at=time.time(),
            )
        )
        await self._feed.set_delivery(alert.alert_id, replace(delivery, state=DeliveryState.DEAD))
