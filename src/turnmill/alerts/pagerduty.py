"""Alerts to PagerDuty by its Events API v2 (developer.pagerduty.com, "Send an alert event").

`routing_key` is the integration's key; `dedup_key` (at most 255 characters) ties an incident's events together;
`payload.summary` holds at most 1 024 characters, an event 512 KB. Success is HTTP 202; 400 is a bad event, 429 is too
many.
"""

import datetime
from typing import Any

from turnmill.alerts.build import cut
from turnmill.outgoing import check_status, post_json
from turnmill.records import Alert, DeliveryAction, encode

URL = "https://events.pagerduty.com/v2/enqueue"
_MOST_SUMMARY = 1024


class PagerDutyChannel:
    """Implements `ports.Notifier`; `url` differs in PagerDuty's European region (events.eu.pagerduty.com)."""

    def __init__(self, *, name: str, routing_key: str, url: str = URL, timeout_s: float = 20.0) -> None:
        self._name = name
        self._routing_key = routing_key
        self._url = url
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """See `ports.Notifier.name`."""
        return self._name

    async def send(self, alert: Alert) -> None:
        """See `ports.Notifier.send`."""
        await self._post(event(DeliveryAction.TRIGGER, alert, self._routing_key))

    async def resolve(self, alert: Alert) -> None:
        """See `ports.Notifier.resolve`."""
        await self._post(event(DeliveryAction.RESOLVE, alert, self._routing_key))

    async def _post(self, body: dict[str, Any]) -> None:
        check_status(await post_json(self._url, encode(body), timeout_s=self._timeout_s), (202,))


def event(action: DeliveryAction, alert: Alert, routing_key: str) -> dict[str, Any]:
    """The body of the request."""
    head: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": action.value,
        "dedup_key": alert.dedup_key,
    }
    if action is DeliveryAction.RESOLVE:
        return head
    details = {
        "alert_id": alert.alert_id,
        "run": alert.run_id,
        "stage": alert.stage,
        "error": alert.error,
        "log_lines": "\n".join(alert.log_lines) or None,
        "conversation": alert.conversation,
        "run_next": alert.command,
        "same_before": alert.num_earlier or None,
    }
    payload: dict[str, Any] = {
        "summary": cut(alert.summary, _MOST_SUMMARY) or alert.kind.value,
        # The affected system: an incident's list shows it.
        "source": f"turnmill/{alert.run_id}" if alert.run_id else "turnmill",
        "severity": alert.severity.value,
        "timestamp": datetime.datetime.fromtimestamp(alert.created_at, datetime.UTC).isoformat(timespec="milliseconds"),
        "class": alert.kind.value,
        "custom_details": {name: value for name, value in details.items() if value is not None},
    }
    if alert.stage:
        payload["component"] = alert.stage
    return {**head, "payload": payload, "client": "Turnmill"}
