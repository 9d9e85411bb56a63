"""Alerts as JSON to an address of the user's, signed so that the receiver knows who sent them, and when.

    POST url
    Content-Type: application/json
    X-Turnmill-Timestamp: 1767225600
    X-Turnmill-Signature: sha256=<hex HMAC-SHA256 of "<timestamp>." and the body>

    {"event": "trigger" | "resolve", "alert": {"alert_id": ..., "kind": ..., ...}}

A receiver refuses a timestamp more than five minutes from its clock (a recording sent again), compares the signature in
constant time (`verify` does both), drops an `alert_id` with an `event` that it has seen, and answers any 2xx.
"""

import hashlib
import hmac
import time

from turnmill.errors import Unauthorized
from turnmill.outgoing import check_status, post_json
from turnmill.records import Alert, DeliveryAction, encode, told

TIMESTAMP_HEADER = "X-Turnmill-Timestamp"
SIGNATURE_HEADER = "X-Turnmill-Signature"
_OK = tuple(range(200, 300))


class WebhookChannel:
    """Implements `ports.Notifier`."""

    def __init__(self, *, name: str, url: str, secret: str, timeout_s: float = 20.0) -> None:
        self._name = name
        self._url = url
        self._secret = secret
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """See `ports.Notifier.name`."""
        return self._name

    async def send(self, alert: Alert) -> None:
        """See `ports.Notifier.send`."""
        await self._post(DeliveryAction.TRIGGER, alert)

    async def resolve(self, alert: Alert) -> None:
        """See `ports.Notifier.resolve`."""
        await self._post(DeliveryAction.RESOLVE, alert)

    async def _post(self, event: DeliveryAction, alert: Alert) -> None:
        body = encode(told(event, alert))
        timestamp = str(int(time.time()))
        signed = {TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature(self._secret, timestamp, body)}
        check_status(await post_json(self._url, body, headers=signed, timeout_s=self._timeout_s), _OK)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """`sha256=` and the hex HMAC over timestamp, dot and body: a body can't be sent again under a newer time."""
    return "sha256=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def verify(
    secret: str, *, timestamp: str, signed: str, body: bytes, now: float | None = None, tolerance_s: float = 300.0
) -> None:
    """What a receiver checks, given both headers; raises `Unauthorized` for another key, body or time."""
    expected = signature(secret, timestamp, body)
    if not hmac.compare_digest(expected.encode(), signed.encode("utf-8", "replace")):
        raise Unauthorized(f"{SIGNATURE_HEADER} does not match the body")
    # The signature held, so that the sender wrote the timestamp: a whole number.
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance_s:
        raise Unauthorized(f"{TIMESTAMP_HEADER} is more than {tolerance_s:g} s from this clock")
