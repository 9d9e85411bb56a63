"""What is asked of the check of an environment, and its report."""

from dataclasses import dataclass, field

from turnmill.records.environments import EnvironmentChoice
from turnmill.records.outcomes import CheckState
from turnmill.records.rollouts import REWARD_RANGE


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """Pipeline -> preflight process: which environment to play, on what, within which limits."""

    environment: EnvironmentChoice
    # File of the tasks, of which some are played.
    data_path: str
    # Chooses them.
    seed: int
    # Most tokens of one conversation.
    max_length: int
    # Seconds of one conversation.
    play_s: float
    # Seconds after which no further conversation is begun.
    total_s: float
    reward_range: tuple[float, float] = REWARD_RANGE
    # Whether rewards per group are asked for; None: by nobody, as nothing is trained.
    group_rewards: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of a report."""

    name: str
    state: CheckState
    # Text for people.
    detail: str


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """Preflight process -> pipeline: what was found."""

    checks: tuple[Check, ...]
    # Ids of those that were played.
    tasks: tuple[str, ...] = ()
    num_turns: int = 0
    # Further rows that were looked at and not played.
    num_validated: int = 0
    # What the environment itself takes, without a model: the mean with what is around a conversation, and the median
    # and the longest time between a reply and what comes of it. None where no turn was played.
    seconds_per_turn: float | None = None
    median_turn_s: float | None = None
    longest_turn_s: float | None = None
    # Mean rewards by script, such as gold.
    mean_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.state is CheckState.FAILED)

    @property
    def warnings(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.state is CheckState.WARNING)
