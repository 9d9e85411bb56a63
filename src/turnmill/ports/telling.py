"""Where figures and alerts go."""

from typing import Protocol

from turnmill.records import Alert, Metric


class MetricSink(Protocol):
    """Numbers per optimizer step."""

    async def write(self, metric: Metric) -> None:
        """Append; a step written twice counts once (the last one wins)."""
        ...

    async def read(self, run_id: str) -> list[Metric]:
        """All metrics of a run by step."""
        ...


class Notifier(Protocol):
    """A channel to people: a log, a webhook, a chat, a pager. It tries once; whoever calls it is the retry owner.

    Not idempotent: a call that failed, or whose caller was killed, may have been delivered, and comes again. Its
    receiver drops what it knows by the alert's id. What a channel has no room for (long errors, early log lines) is
    cut and marked as such; the alert's record holds all of it.
    """

    @property
    def name(self) -> str:
        """Unique in the deployment; letters, digits, `_` and `-`."""
        ...

    async def send(self, alert: Alert) -> None:
        """Tell of it; raises `DeliveryFailed`, whose text holds no secret."""
        ...

    async def resolve(self, alert: Alert) -> None:
        """Tell that it is over; raises `DeliveryFailed`. Resolving what was never sent is no error."""
        ...
