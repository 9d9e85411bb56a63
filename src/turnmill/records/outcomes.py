"""Outcomes and states: enums with predicates instead of flags and strings."""

from enum import StrEnum


class Purpose(StrEnum):
    """What a sample is for; only TRAIN is ever batched."""

    TRAIN = "train"
    BASELINE = "baseline"
    EVAL = "eval"


class SampleState(StrEnum):
    """REQUESTED -> LEASED -> REPORTED | INVALID; REPORTED -> BATCHED -> TRAINED; any but INVALID -> DROPPED.

    BATCHED and TRAINED become DROPPED only with their batch, when a run goes on from an earlier step.
    """

    REQUESTED = "requested"
    LEASED = "leased"
    REPORTED = "reported"
    INVALID = "invalid"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def is_open(self) -> bool:
        """A worker may still report it."""
        return self in (SampleState.REQUESTED, SampleState.LEASED)


class DropReason(StrEnum):
    """Why a sample, although played, is not trained."""

    NO_SIGNAL = "no_signal"
    STALE = "stale"
    SURPLUS = "surplus"
    # Its process died, or its batch was given up to go on from an earlier step.
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    # The run's budget was used up before its batch was full.
    BUDGET = "budget"
    # Its group could not be scored.
    UNSCORED = "unscored"
    # No rollout: it was asked to score a group of them, and has.
    GROUP_SCORE = "group_score"

    @property
    def is_of_rollout(self) -> bool:
        """A conversation was played."""
        return self is not DropReason.GROUP_SCORE


class InvalidReason(StrEnum):
    """Why a sample has no reward: never the policy's fault."""

    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    INFRA = "infra"


class StopReason(StrEnum):
    """How a valid conversation ended."""

    END_OF_CONVERSATION = "end_of_conversation"
    MAX_TURNS = "max_turns"
    MAX_LENGTH = "max_length"


class RunStatus(StrEnum):
    """Where a run is."""

    # Made by an upload, and waiting for its turn.
    QUEUED = "queued"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # What it would have trained is trained, or was, by another run.
    DUPLICATE = "duplicate"
    # Never stored: how an active run looks whose control process is gone.
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        return self not in (RunStatus.QUEUED, RunStatus.ACTIVE)


class ErrorClass(StrEnum):
    """What kind of failure ended a stage, or one try of it: who has to act, and whether another try may do better."""

    INVALID_INPUT = "invalid_input"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    ROLE_FAILED = "role_failed"
    STAGE_FAILED = "stage_failed"
    BUDGET = "budget"
    INTEGRITY = "integrity"
    CONFLICT = "conflict"
    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    DEFECT = "defect"

    @property
    def is_permanent(self) -> bool:
        """The same again would end the same: no stage ever tries again after it."""
        return self not in (ErrorClass.INFRASTRUCTURE, ErrorClass.TIMEOUT, ErrorClass.ROLE_FAILED)

    @property
    def meaning(self) -> str:
        """For people, in one sentence."""
        return _MEANINGS[self]


_MEANINGS = {
    ErrorClass.INVALID_INPUT: "What the user gave can't be used.",
    ErrorClass.ENVIRONMENT: "The environment does not do what training needs.",
    ErrorClass.INFRASTRUCTURE: "A store, a queue, the disk or a process could not be had.",
    ErrorClass.TIMEOUT: "The stage did not end in its time.",
    ErrorClass.ROLE_FAILED: "A process of the run ended, and may not be started again.",
    ErrorClass.STAGE_FAILED: "The stage can't come to its end, training for instance; the text is the diagnosis.",
    ErrorClass.BUDGET: "The run has used up the tokens, the dollars or the time that it may use.",
    ErrorClass.INTEGRITY: "What was stored, or computed twice, does not agree.",
    ErrorClass.CONFLICT: "Another process has the run.",
    ErrorClass.DUPLICATE: "Another run trains the same content, or has.",
    ErrorClass.CANCELLED: "The user asked for the end.",
    ErrorClass.DEFECT: "A fault of Turnmill itself; the log has its traceback.",
}


class CheckState(StrEnum):
    """How one check of a report came out."""

    OK = "ok"
    FAILED = "failed"
    # It can be trained on so, and whoever does should know.
    WARNING = "warning"
    # There was nothing to check it by, or an earlier check failed.
    NOT_CHECKED = "not_checked"


class RunKind(StrEnum):
    """Which stages a run has."""

    TRAIN = "train"
    EVAL = "eval"
    # None: a foreign trainer has rollouts played and generates the answers itself.
    EXTERNAL = "external"


class FinishReason(StrEnum):
    """Why a call stopped sampling (OpenAI names)."""

    STOP = "stop"
    LENGTH = "length"
    # The reply calls tools; the model ended it as with STOP.
    TOOL_CALLS = "tool_calls"
