"""Who is told when something is wrong, and how: alerts are recorded first, then delivered to each channel.

    new_alert -> Dispatcher.raise_alert -> Feed (the record) -> one task a channel -> LogChannel, WebhookChannel, ...

`turnmill.config.deployment` says which channels there are, `open_channels` opens them.
"""

from turnmill.alerts.build import new_alert
from turnmill.alerts.channels import open_channels, secrets_of
from turnmill.alerts.dispatcher import Dispatcher
from turnmill.alerts.feed import Feed
from turnmill.alerts.policy import Channel, Policy
from turnmill.alerts.redaction import Redactor

__all__ = ["Channel", "Dispatcher", "Feed", "Policy", "Redactor", "new_alert", "open_channels", "secrets_of"]
