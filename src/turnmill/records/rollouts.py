"""Tasks, what is asked of a worker, what comes back, and the record of a sample."""

from dataclasses import dataclass, field
from typing import Any

from turnmill.records.codec import PROTOCOL_VERSION, digest_of, encode
from turnmill.records.keys import dead_letter_key, occurrence_key, sample_key
from turnmill.records.outcomes import DropReason, FinishReason, InvalidReason, Purpose, SampleState, StopReason

# What a reward may be, both ends included, unless a request says otherwise.
REWARD_RANGE = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the data."""

    id: str
    # The row's `metadata`, passed through as is (prompt, answer?, task?, info?).
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Scheduler -> worker: play one sample (v0 fields first, ours after)."""

    sample_id: str
    # ISO 8601, UTC.
    timestamp: str
    # Most tokens of one conversation, prompt included.
    max_length: int
    # {"range": [low, high]}
    rewards: dict[str, list[float]]
    # The task's metadata.
    data: dict[str, Any]
    version: str = PROTOCOL_VERSION
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN


@dataclass(frozen=True, kw_only=True)
class RolloutResponse:
    """Proxy -> trainer: a sample ended; the sample record holds the truth."""

    sample_id: str
    stop_reason: str
    # {"aggregate_score": float | None}; None only together with `reason`.
    rewards: dict[str, float | None]
    version: str = PROTOCOL_VERSION
    reason: InvalidReason | None = None
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN


@dataclass(frozen=True, kw_only=True)
class ReplyTokens:
    """The tokens of one call, as they are recorded."""

    # The whole prompt: the conversation before it and the new messages.
    prompt_ids: list[int]
    # What was sampled, the end-of-turn token included, and the log-prob of each.
    sampled_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The model's answer to one call, as an environment sees it."""

    # {"role": "assistant", "content": ...}: goes into the conversation as it is.
    message: dict[str, Any]
    finish_reason: FinishReason
    # Token counts by their OpenAI names (prompt_tokens, completion_tokens, total_tokens).
    usage: dict[str, Any] = field(default_factory=dict)
    # None unless they were asked for (`return_token_ids`).
    tokens: ReplyTokens | None = None
    # Of the call, by which its turn is given a reward; "" where whoever answers does not name its calls.
    call_id: str = ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools, in OpenAI's form; [] where there are none."""
        return self.message.get("tool_calls") or []

    @property
    def content(self) -> str:
        """The text of the message, "" where it has none."""
        return self.message.get("content") or ""


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """Runner -> worker -> proxy: how an attempt ended. Either a reward or the reason why there is none."""

    reward: float | None = None
    reason: InvalidReason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # What single calls are worth, by call id, for methods that give credit a turn; their sum need not be the reward.
    turn_rewards: dict[str, float] = field(default_factory=dict)
    # None where the conversation did not come to an end.
    stop_reason: StopReason | None = None
    # Text for people: what went wrong.
    detail: str | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.reason is None):
            raise ValueError("a rollout result has a reward or a reason, and never both")


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One rollout of a task and everything that was decided about it."""

    run_id: str
    purpose: Purpose
    # `<task>_<g>`; g counts up over the whole run and is never reused.
    sample_id: str
    task_id: str
    # Samples whose rewards are compared share it.
    group_id: str
    state: SampleState
    created_at: float
    # What the worker is given.
    request: RolloutRequest
    # The id by which a foreign trainer knows it; several samples may have the same, one after the other. None: the
    # trainer is ours.
    wire_id: str | None = None
    # Unix seconds, for people: about then, when no other sample ends any more, the scheduler ends the sample as
    # INVALID(infra), by a clock that nobody sets; it covers all attempts.
    deadline: float
    # 1 for the first lease; 0 before.
    attempt: int = 0
    # When the attempt was leased; 0 before the first lease.
    leased_at: float = 0.0
    # The last attempt before the sample was redriven; what it and those before it said is not replayed, and they count
    # no more against `max_attempts`. 0: never redriven.
    redriven_after: int = 0
    # SHA-256 hex of the attempt's secrets; None before the first lease.
    chat_secret_hash: str | None = None
    report_secret_hash: str | None = None
    lease_token_hash: str | None = None
    # Opaque receipt of the leased queue message.
    receipt: str | None = None
    # The c of the attempt's first own call; earlier attempts never reuse it. Where the log of a sample's asks is kept,
    # that of the sample's first call.
    first_call: int = 0
    # Every c handed out so far is below it (reserved in ranges, so that a restarted proxy reuses none), but for those
    # in the log of asks, which counts on from here.
    call_bound: int = 0
    # None until REPORTED, and None for INVALID (a foreign trainer is told the low end of the range then).
    reward: float | None = None
    # What the reward functions of its group add, written when the group is complete; None: the environment has none.
    group_reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    # What single calls are worth, by call id; empty: the environment does not say.
    turn_rewards: dict[str, float] = field(default_factory=dict)
    stop_reason: str | None = None
    # Call ids that the reporting attempt consumed, own or replayed, in order of first use.
    calls: tuple[str, ...] = ()
    # Why it has no reward; REQUESTED: why the attempt before had none.
    reason: InvalidReason | None = None
    # Text for people: what went wrong.
    detail: str | None = None
    drop_reason: DropReason | None = None
    # A foreign trainer was told how it ended. It takes what it is told twice for two, so that it is not told again.
    is_told: bool = False
    # Optimizer step that it is batched in.
    step: int | None = None
    # Oldest and newest version that sampled a token which that step trains; None: it is in none, or has no such token.
    versions: tuple[str, str] | None = None
    # Digest over identity, attempt, reward, metrics, calls and `turn_rewards`, written with REPORTED, and anew with
    # `group_reward`.
    report_digest: str | None = None

    @property
    def key(self) -> str:
        return sample_key(self.run_id, self.purpose, self.sample_id)

    @property
    def is_valid(self) -> bool:
        """It was played to an end that the policy caused, and scored."""
        return self.reward is not None

    @property
    def is_truncated(self) -> bool:
        """It ended because it filled `max_length`."""
        return self.stop_reason == StopReason.MAX_LENGTH

    @property
    def trained_reward(self) -> float | None:
        """What training compares: its own reward and what its group adds."""
        return None if self.reward is None else self.reward + (self.group_reward or 0.0)

    def expected_report_digest(self) -> str:
        """What `report_digest` must be; a difference means that the stored record was altered."""
        reported = [self.attempt, self.reward, self.metrics, self.stop_reason, self.calls]
        added = [] if self.group_reward is None else [self.group_reward]
        per_turn = [self.turn_rewards] if self.turn_rewards else []
        return digest_of(self.key.encode(), encode([*reported, *added, *per_turn]))


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """Which sample is, or was last, played under the id of a foreign trainer; the sample record says how it stands."""

    run_id: str
    wire_id: str
    # From 0: how many there were before.
    index: int
    # What the trainer asked for, under the id of the sample.
    request: RolloutRequest

    @property
    def key(self) -> str:
        return occurrence_key(self.run_id, self.wire_id)


@dataclass(frozen=True, kw_only=True)
class DeadSample:
    """A dead letter about a sample: no attempt brought it to an end."""

    run_id: str
    purpose: Purpose
    sample_id: str
    # Leases that were used up.
    num_attempts: int
    # Text for people: what went wrong.
    detail: str
    dead_at: float
    request: RolloutRequest
    # Of the process that gave it up.
    code_version: str = ""

    @property
    def key(self) -> str:
        return dead_letter_key(self.run_id, f"{self.purpose}/{self.sample_id}")
