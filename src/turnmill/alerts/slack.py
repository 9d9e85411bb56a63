"""Alerts to a Slack channel by an incoming webhook, in Block Kit.

Limits as documented (api.slack.com: reference/block-kit, messaging/webhooks): 50 blocks; a header's text 150
characters, plain; a section's text 3 000, each of its at most 10 fields 2 000; at most 10 elements of a context. `&`,
`<` and `>` are written as entities, and so a text can't mention (`<!channel>`) or link. Success is HTTP 200 with `ok`.
"""

import datetime
from typing import Any

from turnmill.errors import DeliveryFailed
from turnmill.outgoing import check_status, post_json
from turnmill.records import Alert, DeliveryAction, Severity, encode

_MOST_HEADER = 150
_MOST_SECTION = 3000
_MOST_FIELD = 2000
# Slack recommends 4 000 and cuts at 40 000.
_MOST_TEXT = 4000
# Of the text within a code block's fences and under its title.
_MOST_CODE = _MOST_SECTION - 200
_SIGNS = {
    Severity.CRITICAL: ":rotating_light:",
    Severity.ERROR: ":red_circle:",
    Severity.WARNING: ":warning:",
    Severity.INFO: ":information_source:",
}


class SlackChannel:
    """Implements `ports.Notifier`; `url` is the incoming webhook's, and as secret as a password."""

    def __init__(self, *, name: str, url: str, timeout_s: float = 20.0) -> None:
        self._name = name
        self._url = url
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """See `ports.Notifier.name`."""
        return self._name

    async def send(self, alert: Alert) -> None:
        """See `ports.Notifier.send`."""
        await self._post(message(DeliveryAction.TRIGGER, alert))

    async def resolve(self, alert: Alert) -> None:
        """See `ports.Notifier.resolve`."""
        await self._post(message(DeliveryAction.RESOLVE, alert))

    async def _post(self, body: dict[str, Any]) -> None:
        answer = await post_json(self._url, encode(body), timeout_s=self._timeout_s)
        check_status(answer, (200,))
        if answer.body.strip() != "ok":
            raise DeliveryFailed("HTTP 200 without Slack's answer `ok`: is the URL an incoming webhook?", is_final=True)


def message(action: DeliveryAction, alert: Alert) -> dict[str, Any]:
    """The body of the request; `text` is what notifications and screen readers show."""
    is_over = action is DeliveryAction.RESOLVE
    title = f"{'Resolved: ' if is_over else ''}{alert.kind.replace('_', ' ')}"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": fit(title, _MOST_HEADER), "emoji": True}},
        _section(f"{':white_check_mark:' if is_over else _SIGNS[alert.severity]} {fit(alert.summary, 2900)}"),
    ]
    facts = [("Run", alert.run_id), ("Stage", alert.stage), ("Severity", alert.severity.value)]
    facts.append(("Conversation", alert.conversation))
    fields = [f"*{name}*\n{fit(value, _MOST_FIELD - 100)}" for name, value in facts if value]
    blocks.append({"type": "section", "fields": [{"type": "mrkdwn", "text": text} for text in fields]})
    if not is_over:
        if alert.error:
            blocks.append(_section(f"*Error*\n```{_code(fit(_fenceless(alert.error), _MOST_CODE))}```"))
        if alert.log_lines:
            blocks.append(_section(f"*Last log lines*\n```{_code(_last_lines(alert.log_lines))}```"))
        blocks.append(_section(f"*Run next*\n```{_code(fit(_fenceless(alert.command), _MOST_CODE))}```"))
    repeats = f" · {alert.num_earlier} more of the same before it" if alert.num_earlier else ""
    at = datetime.datetime.fromtimestamp(alert.created_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    about = {"type": "mrkdwn", "text": f"{at} · {fit(alert.alert_id, 200)}{repeats}"}
    blocks.append({"type": "context", "elements": [about]})
    return {"text": fit(f"{title}: {alert.summary}", _MOST_TEXT), "blocks": blocks}


def escape(text: str) -> str:
    """`text` as Slack shows it literally, whatever it holds."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fit(text: str, most: int) -> str:
    """The beginning of `text`, escaped, in at most `most` characters: an entity is never cut through."""
    escaped = escape(text)
    if len(escaped) <= most:
        return escaped
    return "".join(_whole(text, most - 1)) + "…"


def _whole(text: str, most: int) -> list[str]:
    """As many escaped characters of the beginning as have room."""
    taken: list[str] = []
    room = most
    for char in text:
        shown = escape(char)
        room -= len(shown)
        if room < 0:
            break
        taken.append(shown)
    return taken


def _last_lines(lines: tuple[str, ...]) -> str:
    """The end of them: what came last is what tells why."""
    text = _fenceless("\n".join(lines))
    escaped = escape(text)
    if len(escaped) <= _MOST_CODE:
        return escaped
    # Backwards, so that the beginning is cut.
    return "…" + "".join(reversed(_whole(text[::-1], _MOST_CODE - 1)))


def _fenceless(text: str) -> str:
    """Without what would end the code block."""
    return text.replace("```", "'''")


def _code(text: str) -> str:
    """Slack refuses an empty text; an empty block says so. A backtick at an edge would join the fence."""
    return (text.strip("`") if text.startswith("`") or text.endswith("`") else text) or " "


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}
