"""What every channel for alerts keeps, wherever it leads."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.unit.alerts.receivers import Receiver, Said, pagerduty, receiver, slack
from turnmill.alerts import new_alert
from turnmill.alerts.pagerduty import PagerDutyChannel
from turnmill.alerts.slack import SlackChannel
from turnmill.alerts.webhook import WebhookChannel
from turnmill.errors import DeliveryFailed
from turnmill.ports import Notifier
from turnmill.records import Alert, AlertKind

SECRET = "a-secret-of-the-receiver"
ROUTING_KEY = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A channel and who receives at its end."""

    notifier: Notifier
    there: Receiver


@pytest.fixture(params=["webhook", "slack", "pagerduty"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    rules = {"webhook": lambda _: Said(status=201, body=""), "slack": slack, "pagerduty": pagerduty}
    with receiver(rules[request.param]) as there:
        notifiers: dict[str, Notifier] = {
            "webhook": WebhookChannel(name="n-1", url=there.url, secret=SECRET, timeout_s=5),
            "slack": SlackChannel(name="n-1", url=there.url, timeout_s=5),
            "pagerduty": PagerDutyChannel(name="n-1", routing_key=ROUTING_KEY, url=there.url, timeout_s=5),
        }
        yield Line(notifier=notifiers[request.param], there=there)


def alert() -> Alert:
    return new_alert(AlertKind.RUN_STALLED, "r1 stalled", command="turnmill doctor r1", run_id="r1")


async def test_an_alert_is_sent_and_resolved_in_one_request_each(line: Line) -> None:
    assert line.notifier.name == "n-1"
    one = alert()
    await line.notifier.send(one)
    await line.notifier.resolve(one)
    assert len(line.there.received) == 2


async def test_sending_twice_and_resolving_what_was_never_sent_is_no_error(line: Line) -> None:
    one = alert()
    await line.notifier.send(one)
    await line.notifier.send(one)
    await line.notifier.resolve(alert())
    assert len(line.there.received) == 3


@pytest.mark.parametrize("status", [302, 400, 404, 408, 429, 500, 503])
async def test_a_refusal_is_told_once_with_its_kind_and_no_secret(line: Line, status: int) -> None:
    line.there.answers = [Said(status=status, body="no", headers={"Retry-After": "3"})]
    with pytest.raises(DeliveryFailed, match=f"HTTP {status}: no") as raised:
        await line.notifier.send(alert())
    assert raised.value.is_final is (status in (302, 400, 404)) and raised.value.retry_after_s == 3
    assert len(line.there.received) == 1
    assert not any(secret in str(raised.value) for secret in (SECRET, ROUTING_KEY, "very-secret-path"))
