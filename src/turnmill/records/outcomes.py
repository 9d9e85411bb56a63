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


class RunKind(StrEnum):
    """Which stages a run has."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why a call stopped sampling (OpenAI names)."""

    STOP = "stop"
    LENGTH = "length"
