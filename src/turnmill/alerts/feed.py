"""Alerts as they are recorded: what is delivered is read from here, and so is the list that a user sees."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from turnmill.errors import NotFound
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import (
    ALERT_PREFIX,
    DELIVERY_DEAD_LETTER_PREFIX,
    HANDED_OVER_PREFIX,
    Alert,
    DeadDelivery,
    Delivery,
    DeliveryState,
    Sighting,
    alert_key,
    decode,
    encode,
    handed_over_key,
    sighting_key,
)

_PAGE = 500


class Feed:
    """The alerts of a deployment, in its record store. Each method may raise `BackendUnavailable`."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def add(self, alert: Alert, *, after: int | None = None) -> bool:
        """Record it with its deliveries, then as the last one of its deduplication key.

        In this order: killed in between, an alert may come twice, and is never lost. `after`, where several processes
        raise alerts, is the version that came with `last_seen`: False, and nothing recorded, where another alert of the
        key came first.
        """
        await self._records.write([Write(key=alert.key, value=encode(alert), expected=0)])
        sighting = encode(Sighting(alert_id=alert.alert_id))
        claim = Write(key=sighting_key(alert.dedup_key), value=sighting, expected=after)
        [is_last] = await self._records.write([claim])
        if not is_last:
            await self._records.write([Write(key=alert.key, value=None, expected=None)])
        return is_last

    async def get(self, alert_id: str) -> Alert:
        """Raises `NotFound`."""
        [stored] = await self._records.get([alert_key(alert_id)])
        if stored is None:
            raise NotFound(f"there is no alert {alert_id!r}; `turnmill alerts` lists them")
        return decode(stored.value, Alert)

    async def last(self, dedup_key: str) -> Alert | None:
        """The last alert of this key that is not resolved."""
        alert, _ = await self.last_seen(dedup_key)
        return alert

    async def last_seen(self, dedup_key: str) -> tuple[Alert | None, int]:
        """As `last`, with the version by which `add` tells whether another alert came in between."""
        [stored] = await self._records.get([sighting_key(dedup_key)])
        if stored is None:
            return None, 0
        [found] = await self._records.get([alert_key(decode(stored.value, Sighting).alert_id)])
        alert = None if found is None else decode(found.value, Alert)
        return None if alert is None or alert.resolved_at is not None else alert, stored.version

    async def update(self, alert_id: str, change: Callable[[Alert], Alert]) -> Alert:
        """Apply `change` by compare-and-set, again where another write came first; raises `NotFound`."""
        while True:
            [stored] = await self._records.get([alert_key(alert_id)])
            if stored is None:
                raise NotFound(f"there is no alert {alert_id!r}; `turnmill alerts` lists them")
            alert = change(decode(stored.value, Alert))
            [done] = await self._records.write([Write(key=alert.key, value=encode(alert), expected=stored.version)])
            if done:
                return alert

    async def set_delivery(self, alert_id: str, delivery: Delivery) -> Alert:
        """Put `delivery` in the place of the one of its channel and action."""

        def change(alert: Alert) -> Alert:
            return with_delivery(alert, delivery)

        return await self.update(alert_id, change)

    async def alerts(self, *, since: float = 0.0, run_id: str | None = None) -> AsyncIterator[Alert]:
        """Alerts created at or after `since` (Unix seconds), of one run or all, oldest first."""
        after = f"{ALERT_PREFIX}{int(since * 1000):013d}"
        while page := await self._records.scan(ALERT_PREFIX, after=after, limit=_PAGE):
            for stored in page:
                alert = decode(stored.value, Alert)
                if run_id is None or alert.run_id == run_id:
                    yield alert
            after = page[-1].key

    async def prune(self, before: float) -> int:
        """Remove the alerts created before it (Unix seconds) that wait for no delivery; how many."""
        waiting = (DeliveryState.PENDING, DeliveryState.HELD)
        num_removed = 0
        async for alert in self.alerts():
            if alert.created_at < before and not any(one.state in waiting for one in alert.deliveries):
                await self._records.write([Write(key=alert.key, value=None, expected=None)])
                num_removed += 1
        return num_removed

    async def open_alerts(self, run_id: str | None, *, since: float = 0.0) -> list[Alert]:
        """Those of the run (None: of none) that are not resolved, oldest first."""
        return [alert async for alert in self.alerts(since=since) if alert.run_id == run_id and not alert.resolved_at]

    async def hand_over(self, alert_id: str) -> None:
        """Have the process that delivers look at this alert soon; call it after the change that it shall see."""
        note = encode(Sighting(alert_id=alert_id))
        await self._records.write([Write(key=handed_over_key(alert_id), value=note, expected=None)])

    async def handed_over(self) -> list[tuple[str, Stored]]:
        """Ids of alerts to look at, each with what `taken_over` takes."""
        return [(decode(one.value, Sighting).alert_id, one) for one in await self._records.scan(HANDED_OVER_PREFIX)]

    async def taken_over(self, note: Stored) -> None:
        """Remove the note, unless the alert was handed over once more since it was read."""
        await self._records.write([Write(key=note.key, value=None, expected=note.version)])

    async def bury(self, letter: DeadDelivery) -> None:
        """Record a delivery that was given up; idempotent."""
        await self._records.write([Write(key=letter.key, value=encode(letter), expected=None)])

    async def unbury(self, letter: DeadDelivery) -> None:
        """Remove the dead letter; idempotent."""
        await self._records.write([Write(key=letter.key, value=None, expected=None)])

    async def redrive(self, letter: DeadDelivery) -> Alert:
        """Have a delivery that was given up made once more, by the process that delivers; the alert as it is then.

        In this order: killed in between, it is made although its letter is still there.
        """
        delivery = Delivery(channel=letter.channel, action=letter.action)
        alert = await self.set_delivery(letter.alert.alert_id, delivery)
        await self.hand_over(alert.alert_id)
        await self.unbury(letter)
        return alert

    async def dead_letters(self) -> list[DeadDelivery]:
        """All deliveries that were given up, oldest alert first."""
        letters: list[DeadDelivery] = []
        after = ""
        while page := await self._records.scan(DELIVERY_DEAD_LETTER_PREFIX, after=after, limit=_PAGE):
            letters += [decode(stored.value, DeadDelivery) for stored in page]
            after = page[-1].key
        return letters


def with_delivery(alert: Alert, delivery: Delivery) -> Alert:
    """`alert` with `delivery` in the place of the one of its channel and action, or at the end."""
    about = (delivery.channel, delivery.action)
    others = [one for one in alert.deliveries if (one.channel, one.action) != about]
    if len(others) == len(alert.deliveries):
        return replace(alert, deliveries=(*others, delivery))
    kept = [delivery if (one.channel, one.action) == about else one for one in alert.deliveries]
    return replace(alert, deliveries=tuple(kept))
