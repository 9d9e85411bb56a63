"""What may be said about the end of an attempt, checked: from JSON to a typed report."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from turnmill.conversation.bodies import MAX_TEXT, number, parse_object, short, text_at
from turnmill.errors import InvalidRequest
from turnmill.records import InvalidReason


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says about the end of an attempt: a score, or a reason why there is none."""

    sample_id: str
    score: float | None
    metrics: dict[str, float]
    # What single calls are worth, by call id.
    turn_rewards: dict[str, float]
    reason: InvalidReason | None
    stop_reason: str | None
    detail: str | None

    def check_range(self, rewards: dict[str, list[float]]) -> None:
        """Raises `InvalidRequest` for a score outside `rewards["range"]`."""
        low, high = rewards["range"]
        if self.score is not None and not low <= self.score <= high:
            raise InvalidRequest(
                f"aggregate_reward_score {self.score:g} is outside the range {low:g} to {high:g} of the request",
                param="aggregate_reward_score",
            )

    def check_turns(self, consumed: Collection[str]) -> None:
        """Raises `InvalidRequest` for the reward of a call that the attempt did not consume."""
        if unknown := self.turn_rewards.keys() - set(consumed):
            raise InvalidRequest(
                f"turn_rewards: the attempt has no call {short(min(unknown))}; the id of a completion is that of its "
                "call",
                param="turn_rewards",
            )


# More turns have no reward in one report.
MAX_TURN_REWARDS = 10_000
_REPORT_KEYS = ("id", "aggregate_reward_score", "metrics_list")
_REPORT_OPTIONAL = ("turn_rewards", "reason", "stop_reason", "detail")


def parse_report(body: bytes) -> Report:
    """A report body; raises `InvalidRequest` naming the key."""
    raw = parse_object(body)
    for key in _REPORT_KEYS:
        if key not in raw:
            raise InvalidRequest(f"a report needs {', '.join(_REPORT_KEYS)}; {key} is missing", param=key)
    for key in raw:
        if key not in _REPORT_KEYS + _REPORT_OPTIONAL:
            raise InvalidRequest(f"unknown key {key!r}", param=key)
    score = raw["aggregate_reward_score"]
    if score is not None:
        score = number(score, "aggregate_reward_score")
    reason = text_at(raw, "reason")
    if reason is not None and reason not in [*InvalidReason]:
        raise InvalidRequest(f"reason {reason!r} is none of {', '.join(InvalidReason)}", param="reason")
    if (score is None) != (reason is not None):
        raise InvalidRequest(
            "a report has either a score or a reason: null as aggregate_reward_score needs a reason "
            f"({', '.join(InvalidReason)}), and a score excludes one",
            param="reason",
        )
    turn_rewards = _turn_rewards(raw.get("turn_rewards"))
    if turn_rewards and score is None:
        raise InvalidRequest("a report without a score has no turn_rewards either", param="turn_rewards")
    sample_id, detail = text_at(raw, "id"), raw.get("detail")
    if detail is not None and not isinstance(detail, str):
        raise InvalidRequest("detail must be a text", param="detail")
    if not sample_id:
        raise InvalidRequest("id must be the id of the sample", param="id")
    return Report(
        sample_id=sample_id,
        score=score,
        metrics=_metrics(raw["metrics_list"]),
        turn_rewards=turn_rewards,
        reason=InvalidReason(reason) if reason is not None else None,
        stop_reason=text_at(raw, "stop_reason"),
        # For people only, so its beginning is better than a refused report.
        detail=detail[:MAX_TEXT] if detail else None,
    )


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, list):
        raise InvalidRequest("metrics_list must be a list", param="metrics_list")
    metrics: dict[str, float] = {}
    for index, item in enumerate(value):
        where = f"metrics_list[{index}]"
        if not isinstance(item, dict) or item.keys() != {"name", "value", "type"}:
            raise InvalidRequest(f"{where} must have name, value and type", param=where)
        if not isinstance(item["name"], str) or not item["name"]:
            raise InvalidRequest(f"{where}.name must be a text", param=f"{where}.name")
        if item["type"] not in ("Reward", "Metric"):
            raise InvalidRequest(f"{where}.type must be Reward or Metric", param=f"{where}.type")
        if item["name"] in metrics:
            raise InvalidRequest(f"{where}.name {item['name']!r} is there twice", param=f"{where}.name")
        metrics[item["name"]] = number(item["value"], f"{where}.value")
    return metrics


def _turn_rewards(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("turn_rewards must be an object: a number for the id of a call", param="turn_rewards")
    if len(value) > MAX_TURN_REWARDS:
        raise InvalidRequest(
            f"turn_rewards has {len(value)} numbers; at most {MAX_TURN_REWARDS} are taken", param="turn_rewards"
        )
    return {call_id: number(worth, f"turn_rewards[{short(call_id)}]") for call_id, worth in value.items()}
