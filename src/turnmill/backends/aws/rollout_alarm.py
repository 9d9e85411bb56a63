"""Rollouts of an external run that nobody could play to an end: somebody is told, by SNS.

    sample, all attempts used up -> the same alert within the hour? counted : recorded with its delivery -> SNS

No control process watches an external run, so the proxy that gives a rollout up tells of it; of several that do so at
once the first one. Alerts are recorded where all others of the deployment are (`turnmill alerts`). One whose delivery
fails, or whose process dies meanwhile, stays pending, and is tried with the next rollout that is given up.
"""

import logging
import time
from dataclasses import replace

from turnmill.alerts.build import new_alert, presentable
from turnmill.alerts.feed import Feed
from turnmill.errors import BackendUnavailable, DeliveryFailed, NotFound
from turnmill.ports import Notifier, RecordStore
from turnmill.records import Alert, AlertKind, Delivery, DeliveryAction, DeliveryState, SampleRecord
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)
# The same alert within it is counted instead of sent: an environment that always fails gives up thousands of rollouts.
DEDUP_WINDOW_S = 3600.0
# A delivery that nobody has tried is left to whoever recorded it for so long.
_DELIVERING_S = 60.0


class RolloutAlarm:
    """Tells of samples that were given up; never raises, as the sample has ended whether or not somebody is told."""

    def __init__(self, records: RecordStore, notifier: Notifier) -> None:
        """`records` are the deployment's."""
        self._feed = Feed(records)
        self._notifier = notifier

    async def tell(self, sample: SampleRecord) -> None:
        """Record an alert about `sample`, or count it in the one before, and have it delivered."""
        try:
            alert = await self._recorded(_alert_of(sample))
            await self._deliver(alert)
        except (BackendUnavailable, NotFound) as error:
            logger.error("nobody could be told of a rollout that was given up: %s", error, extra={"at": sample.key})

    async def _recorded(self, alert: Alert) -> Alert:
        while True:
            last, version = await self._feed.last_seen(alert.dedup_key)
            if last is not None and abs(alert.created_at - last.created_at) < DEDUP_WINDOW_S:
                return await self._feed.update(last.alert_id, lambda it: replace(it, num_repeats=it.num_repeats + 1))
            told = replace(
                presentable(alert, redact),
                num_earlier=0 if last is None else last.num_repeats,
                deliveries=(Delivery(channel=self._notifier.name, state=DeliveryState.PENDING),),
            )
            if await self._feed.add(told, after=version):
                return told

    async def _deliver(self, alert: Alert) -> None:
        delivery = alert.delivery(self._notifier.name, DeliveryAction.TRIGGER)
        if delivery is None or delivery.state is not DeliveryState.PENDING:
            return
        if alert.num_repeats and not delivery.attempts and time.time() - alert.created_at < _DELIVERING_S:
            # The process that recorded it is about to send it.
            return
        tried = replace(delivery, attempts=delivery.attempts + 1)
        try:
            await self._notifier.send(alert)
            tried = replace(tried, state=DeliveryState.DELIVERED, last_error=None, delivered_at=time.time())
        except DeliveryFailed as error:
            logger.error("an alert could not be delivered: %s", error, extra={"at": alert.alert_id})
            tried = replace(tried, last_error=str(error))
        await self._feed.set_delivery(alert.alert_id, tried)


def _alert_of(sample: SampleRecord) -> Alert:
    name = sample.wire_id or sample.sample_id
    return new_alert(
        AlertKind.ROLLOUT_FAILED,
        f"rollout {name} of run {sample.run_id} was given up after {sample.attempt} attempts: {sample.reason}",
        command=f"turnmill dlq list --run {sample.run_id}",
        run_id=sample.run_id,
        error=sample.detail,
        conversation=sample.key,
    )
