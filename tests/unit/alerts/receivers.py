"""Servers on 127.0.0.1 in the place of those who receive alerts; they refuse what is not documented."""

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request; header names in lower case."""

    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Said:
    """One answer."""

    status: int = 200
    body: str = "ok"
    headers: dict[str, str] = field(default_factory=dict)
    # Answer only when this is set.
    after: threading.Event | None = None


@dataclass(kw_only=True)
class Receiver:
    url: str
    received: list[Received] = field(default_factory=list)
    # Given in order, before those of the server's own rule.
    answers: list[Said] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, count: int) -> None:
        self.wait_until(lambda: len(self.received) >= count)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(holds, timeout=30), self.received


@contextmanager
def receiver(rule: Callable[[Received], Said] = lambda _: Said()) -> Iterator[Receiver]:
    """A server that answers by `rule`."""
    state = Receiver(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got = Received(headers={name.lower(): value for name, value in self.headers.items()}, body=body)
            with state.arrived:
                state.received.append(got)
                state.arrived.notify_all()
                said = state.answers.pop(0) if state.answers else rule(got)
            if said.after is not None:
                said.after.wait(30)
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(said.body.encode())))
            self.end_headers()
            self.wfile.write(said.body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Of clients that went away."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    state.url = f"http://127.0.0.1:{server.server_address[1]}/hook/very-secret-path"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---------------------------------------------------------------- Slack

_ENTITY = re.compile(r"&(amp|lt|gt);")


def slack(got: Received) -> Said:
    """An incoming webhook: 200 `ok`, or 400 with the name of the error."""
    try:
        body = got.json
    except ValueError:
        return Said(status=400, body="invalid_payload")
    try:
        _only(body, {"text", "blocks"}, {"text", "blocks"})
        _slack_text(body["text"], 40_000)
        assert 1 <= len(body["blocks"]) <= 50, "blocks"
        for block in body["blocks"]:
            _SLACK_BLOCKS[block["type"]](block)
    except (AssertionError, KeyError, TypeError) as error:
        return Said(status=400, body=f"invalid_blocks {error!r}")
    return Said()


def _slack_header(block: dict[str, Any]) -> None:
    _only(block, {"type", "text"}, {"block_id"})
    assert block["text"]["type"] == "plain_text", "a header is plain"
    _only(block["text"], {"type", "text"}, {"emoji"})
    _slack_text(block["text"]["text"], 150)


def _slack_section(block: dict[str, Any]) -> None:
    _only(block, {"type"}, {"text", "fields", "block_id"})
    assert "text" in block or "fields" in block, "text or fields"
    if "text" in block:
        _slack_object(block["text"], 3000)
    if "fields" in block:
        assert 1 <= len(block["fields"]) <= 10, "fields"
        for one in block["fields"]:
            _slack_object(one, 2000)


def _slack_context(block: dict[str, Any]) -> None:
    _only(block, {"type", "elements"}, {"block_id"})
    assert 1 <= len(block["elements"]) <= 10, "elements"
    for one in block["elements"]:
        _slack_object(one, 3000)


_SLACK_BLOCKS = {"header": _slack_header, "section": _slack_section, "context": _slack_context}


def _slack_object(one: dict[str, Any], most: int) -> None:
    assert one["type"] in ("mrkdwn", "plain_text"), "type of a text"
    _only(one, {"type", "text"}, {"emoji"} if one["type"] == "plain_text" else {"verbatim"})
    _slack_text(one["text"], most)


def _slack_text(text: str, most: int) -> None:
    assert isinstance(text, str) and 1 <= len(text) <= most, f"{len(text)} characters of {most}"
    assert not re.search(r"[<>]|&", _ENTITY.sub("", text)), f"not escaped: {text}"


# ---------------------------------------------------------------- PagerDuty


def pagerduty(got: Received) -> Said:
    """The Events API v2: 202, or 400 with what is wrong."""
    try:
        assert len(got.body) <= 512 * 1024, "event size"
        body = got.json
        assert re.fullmatch(r"[A-Za-z0-9]{32}", body["routing_key"]), "routing_key"
        assert body["event_action"] in ("trigger", "acknowledge", "resolve"), "event_action"
        if body["event_action"] == "trigger":
            _only(
                body,
                {"routing_key", "event_action", "payload"},
                {"dedup_key", "client", "client_url", "links", "images"},
            )
            _pagerduty_payload(body["payload"])
        else:
            _only(body, {"routing_key", "event_action", "dedup_key"}, set())
        assert 1 <= len(body.get("dedup_key", "x")) <= 255, "dedup_key"
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        said = {"status": "invalid event", "message": "Event object is invalid", "errors": [repr(error)]}
        return Said(status=400, body=json.dumps(said))
    said = {"status": "success", "message": "Event processed", "dedup_key": body.get("dedup_key", "made")}
    return Said(status=202, body=json.dumps(said))


def _pagerduty_payload(payload: dict[str, Any]) -> None:
    optional = {"timestamp", "component", "group", "class", "custom_details"}
    _only(payload, {"summary", "source", "severity"}, optional)
    assert 1 <= len(payload["summary"]) <= 1024, "summary"
    assert payload["source"] and isinstance(payload["source"], str), "source"
    assert payload["severity"] in ("critical", "error", "warning", "info"), "severity"
    assert datetime.datetime.fromisoformat(payload["timestamp"]).tzinfo is not None, "timestamp"
    assert isinstance(payload["custom_details"], dict), "custom_details"
    for name in ("component", "group", "class"):
        assert payload.get(name, "x") and isinstance(payload.get(name, "x"), str), name


def _only(given: dict[str, Any], required: set[str], optional: set[str]) -> None:
    assert required <= set(given) <= required | optional, f"keys {sorted(given)}"
