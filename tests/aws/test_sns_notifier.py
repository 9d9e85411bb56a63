"""What is SNS's own about a channel: subject, attributes, sizes, and which refusals pass."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.emulator import REGION, Emulator
from tests.contracts.aws_objects import open_topic
from turnmill.alerts import new_alert
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.notifier import SnsNotifier, body, subject
from turnmill.backends.aws.settings import AwsSettings
from turnmill.errors import DeliveryFailed
from turnmill.records import Alert, AlertKind, DeliveryAction, encode, told


@pytest.fixture
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    opened = AwsClients(emulator.settings("alerts"))
    yield opened
    opened.close()


def alert(summary: str = "r1 stalled", *, error: str | None = None, log_lines: tuple[str, ...] = ()) -> Alert:
    return new_alert(
        AlertKind.RUN_STALLED, summary, command="turnmill doctor r1", run_id="r1", error=error, log_lines=log_lines
    )


async def test_a_subscriber_gets_the_payload_of_webhooks_with_attributes_to_filter_by(
    clients: AwsClients, tmp_path: Path
) -> None:
    topic, inbox = open_topic(clients, tmp_path)
    notifier = SnsNotifier(clients, topic)
    one = alert("größer")
    await notifier.send(one)
    await notifier.resolve(one)
    sent, resolved = inbox.messages()
    assert sent["Message"].encode() == encode(told(DeliveryAction.TRIGGER, one))
    assert json.loads(resolved["Message"])["event"] == "resolve"
    assert (sent["Subject"], resolved["Subject"]) == ("CRITICAL: gr??er", "RESOLVED: gr??er")
    assert {name: item["Value"] for name, item in sent["MessageAttributes"].items()} == {
        "action": "trigger",
        "kind": "run_stalled",
        "severity": "critical",
        "run": "r1",
    }


async def test_a_topic_may_be_given_by_name(clients: AwsClients, tmp_path: Path) -> None:
    topic, inbox = open_topic(clients, tmp_path)
    await SnsNotifier(clients, topic.rpartition(":")[2]).send(alert())
    assert len(inbox.messages()) == 1


async def test_an_alert_of_the_deployment_has_no_run_to_filter_by(clients: AwsClients, tmp_path: Path) -> None:
    topic, inbox = open_topic(clients, tmp_path)
    await SnsNotifier(clients, topic).send(new_alert(AlertKind.IGNORED_UPLOAD, "ignored", command="turnmill doctor"))
    assert set(inbox.messages()[0]["MessageAttributes"]) == {"action", "kind", "severity"}


@pytest.mark.parametrize("summary", ["x" * 500, "é" * 500, "two\nlines\tand \x1b[31mred", ""])
def test_a_subject_is_one_line_of_ascii_within_the_limit(summary: str) -> None:
    line = subject(DeliveryAction.TRIGGER, alert(summary))
    assert len(line) <= 100 and line.isascii() and line.isprintable() and line.startswith("CRITICAL: ")


async def test_what_is_too_long_is_cut_and_says_so(clients: AwsClients, tmp_path: Path) -> None:
    lines = tuple(f"{number} " + "\x00" * 2000 for number in range(50))
    large = alert("é" * 5000, error="\U0001f600" * 20_000, log_lines=lines)
    content = body(DeliveryAction.TRIGGER, large)
    assert len(content) <= 240_000
    shown = json.loads(content)["alert"]
    assert shown["alert_id"] == large.alert_id
    assert shown["error"].endswith("…") and shown["summary"].endswith("…")
    head, *rest = shown["log_lines"]
    assert head == f"… {50 - len(rest)} earlier lines" and rest[-1].startswith("49 ")
    topic, inbox = open_topic(clients, tmp_path)
    await SnsNotifier(clients, topic).send(large)
    assert inbox.messages()[0]["Message"].encode() == content


async def test_a_topic_that_is_not_there_is_a_final_failure(clients: AwsClients) -> None:
    with pytest.raises(DeliveryFailed, match="NotFound") as raised:
        await SnsNotifier(clients, f"arn:aws:sns:{REGION}:000000000000:absent").send(alert())
    assert raised.value.is_final


async def test_a_service_that_can_not_be_reached_is_a_failure_that_passes(emulator: Emulator) -> None:
    away = AwsClients(AwsSettings(region=REGION, endpoint_url="http://127.0.0.1:9"), max_tries=1)
    with pytest.raises(DeliveryFailed, match="AWS sns publish failed") as raised:
        await SnsNotifier(away, f"arn:aws:sns:{REGION}:000000000000:t").send(alert())
    assert not raised.value.is_final
    assert emulator.environ["AWS_SECRET_ACCESS_KEY"] not in str(raised.value)
    away.close()
