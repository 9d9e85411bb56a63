"""Alerts to an SNS topic, as the same JSON that webhooks get.

    subject     ERROR: <summary>                        at most 100 characters, ASCII
    message     {"event": "trigger" | "resolve", "alert": {...}}
    attributes  action, kind, severity, run             for the filter policies of subscriptions

SNS tells an HTTPS endpoint, a queue, a function or a mailbox, and tries again by itself; its receivers drop an
`alert_id` with an `event` that they have seen. A message has at most 256 KB, its attributes included.
"""

from dataclasses import replace
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import BackendUnavailable, DeliveryFailed, InvalidInput
from turnmill.records import Alert, DeliveryAction, encode, told

_MOST_SUBJECT = 100
# Bytes of the message: 262 144 are allowed together with subject and attributes, whose values are bounded below.
_MOST_BODY = 240_000
# Characters; longer texts are cut. A character has at most 6 bytes in JSON, so that everything but the log lines fits.
_MOST_SHORT, _MOST_ERROR, _MOST_LINE = 2000, 8000, 1000
_MOST_ATTRIBUTE = 256
# Refusals that pass.
_PASSING = ("KMSThrottling", "KMSThrottlingException", "Throttled", "ThrottledException")


class SnsNotifier:
    """Implements `ports.Notifier`. Throttling and 5xx are tried again below it (see `clients`), nothing else is."""

    def __init__(self, clients: AwsClients, topic: str, *, name: str = "sns") -> None:
        """`topic` is an ARN, or the name of a topic in the account and region of the credentials."""
        self._clients = clients
        self._topic = topic
        self._name = name

    @property
    def name(self) -> str:
        """See `ports.Notifier.name`."""
        return self._name

    async def send(self, alert: Alert) -> None:
        """See `ports.Notifier.send`."""
        await self._publish(DeliveryAction.TRIGGER, alert)

    async def resolve(self, alert: Alert) -> None:
        """See `ports.Notifier.resolve`."""
        await self._publish(DeliveryAction.RESOLVE, alert)

    async def _publish(self, action: DeliveryAction, alert: Alert) -> None:
        try:
            topic = await self._arn()
            await self._clients.call(
                "sns",
                "publish",
                TopicArn=topic,
                Subject=subject(action, alert),
                Message=body(action, alert).decode(),
                MessageAttributes=_attributes(action, alert),
            )
        except Refused as error:
            raise DeliveryFailed(str(error), is_final=error.code not in _PASSING) from error
        except BackendUnavailable as error:
            raise DeliveryFailed(str(error)) from error
        except InvalidInput as error:
            raise DeliveryFailed(str(error), is_final=True) from error

    async def _arn(self) -> str:
        if not self._topic.startswith("arn:"):
            # Needs no permission, unlike looking for the topic.
            identity = await self._clients.call("sts", "get_caller_identity")
            partition = identity["Arn"].split(":")[1]
            self._topic = f"arn:{partition}:sns:{self._clients.region}:{identity['Account']}:{self._topic}"
        return self._topic


def subject(action: DeliveryAction, alert: Alert) -> str:
    """One line of ASCII, as mailboxes show it; it begins with a letter."""
    head = "RESOLVED" if action is DeliveryAction.RESOLVE else alert.severity.upper()
    text = f"{head}: {' '.join(alert.summary.split())}"
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)
    return plain if len(plain) <= _MOST_SUBJECT else plain[: _MOST_SUBJECT - 3] + "..."


def body(action: DeliveryAction, alert: Alert) -> bytes:
    """The JSON; where it is too long, texts are cut and the oldest log lines are left out, and it says so."""
    content = encode(told(action, alert))
    if len(content) <= _MOST_BODY:
        return content
    short = replace(
        alert,
        summary=_cut(alert.summary, _MOST_SHORT),
        command=_cut(alert.command, _MOST_SHORT),
        error=None if alert.error is None else _cut(alert.error, _MOST_ERROR),
        log_lines=tuple(_cut(line, _MOST_LINE) for line in alert.log_lines),
    )
    lines = short.log_lines
    while len(content := encode(told(action, short))) > _MOST_BODY and lines:
        lines = lines[len(lines) // 2 + 1 :]
        short = replace(short, log_lines=(f"… {len(alert.log_lines) - len(lines)} earlier lines", *lines))
    return content


def _attributes(action: DeliveryAction, alert: Alert) -> dict[str, dict[str, str]]:
    values: dict[str, Any] = {"action": action, "kind": alert.kind, "severity": alert.severity, "run": alert.run_id}
    return {
        name: {"DataType": "String", "StringValue": str(value)[:_MOST_ATTRIBUTE]}
        for name, value in values.items()
        if value
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
