"""Alerts: what somebody should know, with the evidence, and how far its deliveries are."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from turnmill.records.codec import digest_of
from turnmill.records.keys import alert_key, delivery_dead_letter_key


class AlertKind(StrEnum):
    """What an alert is about."""

    RUN_FAILED = "run_failed"
    RUN_STALLED = "run_stalled"
    STAGE_SLOW = "stage_slow"
    BUDGET_BREACH = "budget_breach"
    REWARD_COLLAPSE = "reward_collapse"
    # Of the evaluations while a run trains: the last one that was due could not be played.
    EVALUATION_FAILED = "evaluation_failed"
    # The run has succeeded, and what it trained is not published.
    MODEL_HELD = "model_held"
    CRASH_LOOP = "crash_loop"
    DEAD_LETTERS_GROWING = "dead_letters_growing"
    IGNORED_UPLOAD = "ignored_upload"
    # Of a run whose trainer is somebody else's: nobody else watches it.
    ROLLOUT_FAILED = "rollout_failed"
    # Of the alerts themselves: so many were kept back from a channel by its rate limit.
    ALERTS_HELD = "alerts_held"


class Severity(StrEnum):
    """How bad it is, in PagerDuty's words."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for information, 3 for what is critical."""
        return (Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.CRITICAL).index(self)


class DeliveryState(StrEnum):
    """PENDING -> DELIVERED | DEAD; HELD -> SUMMED."""

    PENDING = "pending"
    DELIVERED = "delivered"
    # Given up; a dead letter holds it.
    DEAD = "dead"
    # Kept back by the channel's rate limit.
    HELD = "held"
    # Kept back, and counted in a summary that was sent in its place.
    SUMMED = "summed"


class DeliveryAction(StrEnum):
    """What a channel is told."""

    TRIGGER = "trigger"
    RESOLVE = "resolve"


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One alert on its way to one channel."""

    channel: str
    action: DeliveryAction = DeliveryAction.TRIGGER
    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    last_error: str | None = None
    delivered_at: float | None = None


def dedup_key(kind: AlertKind, run_id: str | None, stage: str | None, *, held_by: str | None = None) -> str:
    """See `Alert.dedup_key`."""
    about = "/".join(["turnmill", kind, run_id or "", stage or "", held_by or ""]).rstrip("/")
    return about if len(about) <= 255 else f"turnmill/{kind}/{digest_of(about.encode())}"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert, its evidence, and its deliveries: one record, so that no alert is stored without them."""

    # Sorts by time; a receiver that has seen it may drop it.
    alert_id: str
    kind: AlertKind
    severity: Severity
    created_at: float
    # One line.
    summary: str
    # What to run next.
    command: str
    # None where it is about the deployment.
    run_id: str | None = None
    stage: str | None = None
    error: str | None = None
    # The last ones, oldest first.
    log_lines: tuple[str, ...] = ()
    # Key of the record of a conversation that failed.
    conversation: str | None = None
    # The channel whose held alerts it sums up; None for all others.
    held_by: str | None = None
    # How often the same was raised after this alert, and was counted instead of sent.
    num_repeats: int = 0
    # Repeats of the alert before this one, which nobody was told of.
    num_earlier: int = 0
    resolved_at: float | None = None
    deliveries: tuple[Delivery, ...] = ()

    @property
    def key(self) -> str:
        return alert_key(self.alert_id)

    @property
    def dedup_key(self) -> str:
        """What makes two alerts the same one: kind, run and stage; at most 255 characters (PagerDuty's limit)."""
        return dedup_key(self.kind, self.run_id, self.stage, held_by=self.held_by)

    def delivery(self, channel: str, action: DeliveryAction) -> Delivery | None:
        """None where it does not go there."""
        return next((one for one in self.deliveries if (one.channel, one.action) == (channel, action)), None)


def told(action: DeliveryAction, alert: Alert) -> dict[str, Any]:
    """What receivers get as JSON: the alert without its deliveries, which are no receiver's business."""
    shown: dict[str, Any] = msgspec.to_builtins(alert)
    del shown["deliveries"]
    return {"event": action, "alert": shown | {"dedup_key": alert.dedup_key}}


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The last alert of a deduplication key."""

    alert_id: str


@dataclass(frozen=True, kw_only=True)
class DeadDelivery:
    """The dead letter of a delivery: its input, and why and after how many attempts it was given up."""

    alert: Alert
    channel: str
    action: DeliveryAction
    error: str
    attempts: int
    dead_at: float

    @property
    def key(self) -> str:
        return delivery_dead_letter_key(self.alert.alert_id, self.channel, self.action)
