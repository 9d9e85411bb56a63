"""What receivers get, from real servers that are as strict as the documentation."""

import asyncio
import logging
import threading
import time
from dataclasses import replace

import pytest

from tests.unit.alerts.receivers import Received, Said, pagerduty, receiver, slack
from turnmill.alerts import new_alert
from turnmill.alerts.build import SEVERITIES, presentable
from turnmill.alerts.log import LogChannel
from turnmill.alerts.pagerduty import PagerDutyChannel
from turnmill.alerts.slack import SlackChannel
from turnmill.alerts.webhook import SIGNATURE_HEADER, TIMESTAMP_HEADER, WebhookChannel, signature, verify
from turnmill.errors import DeliveryFailed, Unauthorized
from turnmill.ports import Notifier
from turnmill.records import Alert, AlertKind

SECRET = "a-secret-of-the-receiver"
ROUTING_KEY = "0123456789abcdefABCDEF0123456789"
NASTY = "<!channel> a < b && c > d ```fence``` `"


def failed(**changes: object) -> Alert:
    alert = new_alert(
        AlertKind.RUN_FAILED,
        "run r1 failed in Train: <!channel> loss & reward are NaN",
        command="turnmill doctor r1",
        run_id="r1",
        stage="Train",
        error="ValueError: loss is <nan> & void",
        log_lines=["step 3 <loss>", "step 4 loss=nan"],
        conversation="samples/r1/train/7_2",
    )
    return replace(alert, **changes)  # type: ignore[arg-type]


def huge() -> Alert:
    """As large as an alert gets, most characters of it entities."""
    alert = new_alert(
        AlertKind.CRASH_LOOP,
        "&" * 5000,
        command="<" * 9000,
        run_id="r" * 128,
        stage="s" * 300,
        error=(NASTY * 1000),
        log_lines=[f"{number} " + ">" * 2000 for number in range(500)],
        conversation="<" * 2500,
    )
    return presentable(alert, lambda text: text)


def bare() -> Alert:
    return new_alert(AlertKind.IGNORED_UPLOAD, "ignored notes.txt", command="turnmill upload FILE.jsonl")


def awkward() -> list[Alert]:
    texts = ["", " ", "`", "```", "&", "&amp;", "\x00\x1b[31m", "é" * 4000, "\n\n", NASTY]
    return [failed(summary=text or "x", error=text, log_lines=(text,), command=text or "x") for text in texts]


def every_alert() -> list[Alert]:
    return [failed(), huge(), bare(), *awkward()]


def of_kind(kind: AlertKind) -> list[Alert]:
    """Without evidence, and with all of it."""
    few = new_alert(kind, f"{kind}", command="turnmill runs", run_id="r1")
    return [few, failed(kind=kind, severity=few.severity)]


async def test_a_webhook_is_signed_over_time_and_body() -> None:
    def checked(got: Received) -> Said:
        verify(
            SECRET,
            timestamp=got.headers[TIMESTAMP_HEADER.lower()],
            signed=got.headers[SIGNATURE_HEADER.lower()],
            body=got.body,
        )
        return Said(status=204, body="")

    alert = failed()
    with receiver(checked) as there:
        channel = WebhookChannel(name="hook", url=there.url, secret=SECRET)
        await channel.send(alert)
        await channel.resolve(alert)
    first, second = there.received
    assert first.headers["content-type"] == "application/json"
    assert (first.json["event"], second.json["event"]) == ("trigger", "resolve")
    told = first.json["alert"]
    assert told["alert_id"] == alert.alert_id and told["kind"] == "run_failed" and told["severity"] == "error"
    assert (told["run_id"], told["stage"], told["error"]) == ("r1", "Train", "ValueError: loss is <nan> & void")
    assert told["log_lines"] == ["step 3 <loss>", "step 4 loss=nan"]
    assert (told["conversation"], told["command"]) == ("samples/r1/train/7_2", "turnmill doctor r1")
    assert told["dedup_key"] == "turnmill/run_failed/r1/Train" and "deliveries" not in told


def test_a_receiver_refuses_another_key_another_body_and_another_time() -> None:
    now = 1_767_225_600.0
    good = signature(SECRET, "1767225600", b"{}")
    verify(SECRET, timestamp="1767225600", signed=good, body=b"{}", now=now + 299)
    for arguments in (
        {"timestamp": "1767225600", "signed": good, "body": b"{ }"},
        {"timestamp": "1767225601", "signed": good, "body": b"{}"},
        {"timestamp": "1767225600", "signed": good.removeprefix("sha256="), "body": b"{}"},
        {"timestamp": "1767225600", "signed": "é", "body": b"{}"},
        {"timestamp": "x", "signed": good, "body": b"{}"},
    ):
        with pytest.raises(Unauthorized, match="does not match"):
            verify(SECRET, **arguments, now=now)  # type: ignore[arg-type]
    with pytest.raises(Unauthorized, match="does not match"):
        verify("another", timestamp="1767225600", signed=good, body=b"{}", now=now)
    for late in (now + 301, now - 301):
        with pytest.raises(Unauthorized, match="300 s from this clock"):
            verify(SECRET, timestamp="1767225600", signed=good, body=b"{}", now=late)


def test_the_signature_is_the_hmac_that_any_receiver_computes() -> None:
    # printf '1767225600.{}' | openssl dgst -sha256 -hmac a-secret-of-the-receiver
    assert signature(SECRET, "1767225600", b"{}") == EXPECTED


EXPECTED = "sha256=782e060f1eebf97d77829b39f941333038c926bd98545bc8b0d354d9eef41ff7"


async def test_slack_takes_every_message() -> None:
    with receiver(slack) as there:
        channel = SlackChannel(name="slack", url=there.url)
        for alert in every_alert():
            await channel.send(alert)
            await channel.resolve(alert)
    text = there.received[0].body.decode()
    for shown in ("turnmill doctor r1", "samples/r1/train/7_2", "loss is &lt;nan&gt; &amp; void", "step 4 loss=nan"):
        assert shown in text
    assert "<!channel>" not in text
    assert there.received[1].json["text"].startswith("Resolved: run failed")


@pytest.mark.parametrize("kind", AlertKind)
async def test_every_kind_is_valid_in_every_channel(kind: AlertKind) -> None:
    with receiver(slack) as one, receiver(pagerduty) as two, receiver() as three:
        channels: list[Notifier] = [
            LogChannel(),
            SlackChannel(name="slack", url=one.url),
            PagerDutyChannel(name="pager", routing_key=ROUTING_KEY, url=two.url),
            WebhookChannel(name="hook", url=three.url, secret=SECRET),
        ]
        for channel in channels:
            for alert in of_kind(kind):
                await channel.send(alert)
                await channel.resolve(alert)
        assert [len(there.received) for there in (one, two, three)] == [4, 4, 4]
        assert three.received[0].json["alert"]["kind"] == kind and str(kind) in two.received[0].body.decode()


async def test_slack_is_shown_the_last_log_lines() -> None:
    with receiver(slack) as there:
        lines = tuple(f"line {number} " + "x" * 100 for number in range(50))
        await SlackChannel(name="slack", url=there.url).send(failed(log_lines=lines))
    [block] = [block for block in there.received[0].json["blocks"] if "Last log lines" in str(block)]
    shown = block["text"]["text"]
    assert "…" in shown and "line 49 " in shown and "line 0 " not in shown


async def test_pagerduty_takes_every_event() -> None:
    with receiver(pagerduty) as there:
        channel = PagerDutyChannel(name="pager", routing_key=ROUTING_KEY, url=there.url)
        for alert in every_alert():
            await channel.send(alert)
            await channel.resolve(alert)
    trigger, resolve = there.received[0].json, there.received[1].json
    assert trigger["dedup_key"] == resolve["dedup_key"] == "turnmill/run_failed/r1/Train"
    payload = trigger["payload"]
    assert (payload["source"], payload["severity"], payload["component"]) == ("turnmill/r1", "error", "Train")
    assert payload["custom_details"]["run_next"] == "turnmill doctor r1"
    assert payload["custom_details"]["log_lines"] == "step 3 <loss>\nstep 4 loss=nan"


async def test_the_stand_ins_refuse_what_is_not_allowed() -> None:
    def said(rule: object, body: bytes) -> int:
        return rule(Received(headers={}, body=body)).status  # type: ignore[no-any-return, operator]

    section = b'{"text":"x","blocks":[{"type":"section","text":{"type":"mrkdwn","text":"%s"}}]}'
    assert said(slack, section % b"fine") == 200
    for bad in (
        b"{",
        b"{}",
        section % b"<x>",
        section % b"",
        section % (b"x" * 3001),
        section.replace(b"section", b"s"),
    ):
        assert said(slack, bad) == 400
    event = b'{"routing_key":"%s","event_action":"%s","dedup_key":"%s"}'
    key = ROUTING_KEY.encode()
    assert said(pagerduty, event % (key, b"resolve", b"x")) == 202
    for bad in (event % (b"x", b"resolve", b"x"), event % (key, b"end", b"x"), event % (key, b"resolve", b"x" * 256)):
        assert said(pagerduty, bad) == 400


@pytest.mark.parametrize(
    ("status", "is_final"), [(400, True), (403, True), (404, True), (410, True), (408, False), (429, False)]
)
async def test_a_status_says_whether_another_attempt_may_do_better(status: int, is_final: bool) -> None:
    for notifier_of in (slack_at, pager_at, hook_at):
        with (
            receiver(lambda _: Said(status=status, body="channel_is_archived")) as there,
            pytest.raises(DeliveryFailed, match=f"HTTP {status}: channel_is_archived") as raised,
        ):
            await notifier_of(there.url).send(failed())
        assert raised.value.is_final is is_final and "very-secret-path" not in str(raised.value)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_server_that_fails_may_recover(status: int) -> None:
    with receiver(lambda _: Said(status=status)) as there, pytest.raises(DeliveryFailed) as raised:
        await hook_at(there.url).send(failed())
    assert not raised.value.is_final


async def test_a_redirect_is_not_followed() -> None:
    with (
        receiver() as elsewhere,
        receiver(lambda _: Said(status=307, headers={"Location": elsewhere.url})) as there,
        pytest.raises(DeliveryFailed, match="HTTP 307") as raised,
    ):
        await hook_at(there.url).send(failed())
    assert raised.value.is_final and elsewhere.received == []


async def test_success_is_what_the_documentation_calls_so() -> None:
    with receiver(lambda _: Said(body="<html>a login page</html>")) as there:
        with pytest.raises(DeliveryFailed, match="incoming webhook") as raised:
            await slack_at(there.url).send(failed())
        assert raised.value.is_final
        with pytest.raises(DeliveryFailed, match="HTTP 200"):
            await pager_at(there.url).send(failed())


async def test_retry_after_is_a_number_or_a_date() -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600))
    seconds = {"7": 7.0, date: pytest.approx(3600, abs=60), "Thu, 01 Jan 1970 00:00:00 GMT": 0.0}
    for text, expected in {**seconds, "soon": None, "-1": None, "": None}.items():
        with receiver() as there, pytest.raises(DeliveryFailed) as raised:
            there.answers = [Said(status=429, headers={"Retry-After": text})]
            await slack_at(there.url).send(failed())
        assert raised.value.retry_after_s == expected, text


async def test_a_server_that_is_away_or_silent_is_a_failure_that_may_pass() -> None:
    with receiver() as gone:
        pass
    with pytest.raises(DeliveryFailed, match="can't be reached") as raised:
        await hook_at(gone.url).send(failed())
    assert not raised.value.is_final and "very-secret-path" not in str(raised.value)
    free = threading.Event()
    with receiver(lambda _: Said(after=free)) as there:
        with pytest.raises(DeliveryFailed, match=r"no answer|broke off|can't be reached") as raised:
            await WebhookChannel(name="hook", url=there.url, secret=SECRET, timeout_s=0.2).send(failed())
        free.set()
    assert not raised.value.is_final


async def test_a_server_that_trickles_is_left_alone() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Each byte comes before a time-out of the socket alone would end the wait.
        for _ in range(40):
            writer.write(b"H")
            await asyncio.sleep(0.02)
        writer.close()
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(DeliveryFailed, match=r"no answer within 0\.3 s"):
        await WebhookChannel(name="h", url=f"http://127.0.0.1:{port}/", secret=SECRET, timeout_s=0.3).send(failed())
    await over.wait()
    server.close()


async def test_the_log_is_told_by_severity(caplog: pytest.LogCaptureFixture) -> None:
    channel = LogChannel()
    with caplog.at_level(logging.INFO):
        await channel.send(failed())
        await channel.send(bare())
        await channel.resolve(bare())
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "INFO"]
    assert "next: turnmill doctor r1" in caplog.text and "is over" in caplog.text


def test_evidence_is_bounded_and_keeps_the_last_lines() -> None:
    alert = huge()
    assert len(alert.summary) <= 500 and alert.error is not None and len(alert.error) <= 8000
    assert len(alert.log_lines) == 50 and alert.log_lines[-1].startswith("499 ") and len(alert.log_lines[-1]) <= 1000
    assert len(alert.dedup_key) <= 255 and failed().dedup_key != bare().dedup_key
    assert set(SEVERITIES) == set(AlertKind)


def slack_at(url: str) -> Notifier:
    return SlackChannel(name="slack", url=url)


def pager_at(url: str) -> Notifier:
    return PagerDutyChannel(name="pager", routing_key=ROUTING_KEY, url=url)


def hook_at(url: str) -> Notifier:
    return WebhookChannel(name="hook", url=url, secret=SECRET)
