"""What every channel for alerts keeps, wherever it leads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contracts import aws_objects
from tests.unit.alerts.receivers import Receiver, Said, pagerduty, receiver, slack
from turnmill.alerts import new_alert
from turnmill.alerts.pagerduty import PagerDutyChannel
from turnmill.alerts.slack import SlackChannel
from turnmill.alerts.webhook import WebhookChannel
from turnmill.backends.aws.notifier import SnsNotifier
from turnmill.errors import DeliveryFailed
from turnmill.ports import Notifier
from turnmill.records import Alert, AlertKind

SECRET = "a-secret-of-the-receiver"
ROUTING_KEY = "0123456789abcdef0123456789abcdef"
HTTP = ["webhook", "slack", "pagerduty"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A channel and what has arrived at its end."""

    notifier: Notifier
    received: Callable[[], Sequence[object]]


@dataclass(frozen=True, kw_only=True)
class HttpLine:
    """A channel that leads to an HTTP server."""

    notifier: Notifier
    there: Receiver


@contextmanager
def open_http(kind: str) -> Iterator[HttpLine]:
    rules = {"webhook": lambda _: Said(status=201, body=""), "slack": slack, "pagerduty": pagerduty}
    with receiver(rules[kind]) as there:
        notifiers: dict[str, Notifier] = {
            "webhook": WebhookChannel(name="n-1", url=there.url, secret=SECRET, timeout_s=5),
            "slack": SlackChannel(name="n-1", url=there.url, timeout_s=5),
            "pagerduty": PagerDutyChannel(name="n-1", routing_key=ROUTING_KEY, url=there.url, timeout_s=5),
        }
        yield HttpLine(notifier=notifiers[kind], there=there)


@pytest.fixture(params=HTTP)
def http_line(request: pytest.FixtureRequest) -> Iterator[HttpLine]:
    with open_http(request.param) as opened:
        yield opened


@pytest.fixture(params=[*HTTP, "sns"])
def line(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Line]:
    if request.param == "sns":
        clients = request.getfixturevalue("object_clients")
        topic, inbox = aws_objects.open_topic(clients, tmp_path)
        yield Line(notifier=SnsNotifier(clients, topic, name="n-1"), received=inbox.messages)
        return
    with open_http(request.param) as opened:
        yield Line(notifier=opened.notifier, received=lambda: opened.there.received)


def alert() -> Alert:
    return new_alert(AlertKind.RUN_STALLED, "r1 stalled", command="turnmill doctor r1", run_id="r1")


async def test_an_alert_is_sent_and_resolved_in_one_request_each(line: Line) -> None:
    assert line.notifier.name == "n-1"
    one = alert()
    await line.notifier.send(one)
    await line.notifier.resolve(one)
    assert len(line.received()) == 2


async def test_sending_twice_and_resolving_what_was_never_sent_is_no_error(line: Line) -> None:
    one = alert()
    await line.notifier.send(one)
    await line.notifier.send(one)
    await line.notifier.resolve(alert())
    assert len(line.received()) == 3


@pytest.mark.parametrize("status", [302, 400, 404, 408, 429, 500, 503])
async def test_a_refusal_is_told_once_with_its_kind_and_no_secret(http_line: HttpLine, status: int) -> None:
    http_line.there.answers = [Said(status=status, body="no", headers={"Retry-After": "3"})]
    with pytest.raises(DeliveryFailed, match=f"HTTP {status}: no") as raised:
        await http_line.notifier.send(alert())
    assert raised.value.is_final is (status in (302, 400, 404)) and raised.value.retry_after_s == 3
    assert len(http_line.there.received) == 1
    assert not any(secret in str(raised.value) for secret in (SECRET, ROUTING_KEY, "very-secret-path"))
