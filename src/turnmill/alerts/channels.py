"""The channels of a deployment, as its configuration names them."""

from collections.abc import Callable

from turnmill.alerts.log import LogChannel
from turnmill.alerts.pagerduty import URL as PAGERDUTY_URL
from turnmill.alerts.pagerduty import PagerDutyChannel
from turnmill.alerts.policy import Channel
from turnmill.alerts.slack import SlackChannel
from turnmill.alerts.webhook import WebhookChannel
from turnmill.config.deployment import AlertChannel, AlertChannelType
from turnmill.errors import ConfigError
from turnmill.ports import Notifier
from turnmill.records import Severity

# A channel to the topic of this ARN or name, under the name of the channel.
OpenTopic = Callable[[str, str], Notifier]


def open_channels(
    settings: tuple[AlertChannel, ...], *, open_topic: OpenTopic | None = None, timeout_s: float = 20.0
) -> list[Channel]:
    """The log, which is always told, and one channel each; those to topics need `open_topic`."""
    channels = [Channel(notifier=LogChannel(), max_alerts=1000, per_s=60.0)]
    channels += [
        Channel(
            notifier=_open(one, open_topic, timeout_s),
            min_severity=Severity(one.min_severity),
            max_alerts=one.max_per_hour,
            per_s=3600.0,
        )
        for one in settings
    ]
    return channels


def secrets_of(settings: tuple[AlertChannel, ...]) -> list[str]:
    """What no text may show: URLs (most webhooks' are secret), keys, secrets."""
    return [secret for one in settings for secret in (one.url, one.routing_key, one.secret) if secret]


def _open(settings: AlertChannel, open_topic: OpenTopic | None, timeout_s: float) -> Notifier:
    if settings.type is AlertChannelType.SNS:
        if open_topic is None:
            raise ConfigError(f"alert channel {settings.name}: topics can't be told from here")
        return open_topic(settings.topic, settings.name)
    if settings.type is AlertChannelType.WEBHOOK:
        return WebhookChannel(name=settings.name, url=settings.url, secret=settings.secret, timeout_s=timeout_s)
    if settings.type is AlertChannelType.SLACK:
        return SlackChannel(name=settings.name, url=settings.url, timeout_s=timeout_s)
    return PagerDutyChannel(
        name=settings.name,
        routing_key=settings.routing_key,
        url=settings.url or PAGERDUTY_URL,
        timeout_s=timeout_s,
    )
