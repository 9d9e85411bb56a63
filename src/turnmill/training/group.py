"""A group while it is played: its samples, what they earned, and whether that is something to learn from.

drawn -> samples bound -> samples end -> decided
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from turnmill.records import Task, TaskOutcome


class GroupState(Enum):
    """What is known of a group."""

    UNDECIDED = auto()
    SIGNAL = auto()
    NO_SIGNAL = auto()
    ABANDONED = auto()


@dataclass(kw_only=True)
class Group:
    """One drawn group; which batch it is in, `BatchBuilder` decides."""

    group_id: str
    task: Task
    # In the data.
    position: int
    state: GroupState = GroupState.UNDECIDED
    # Drawn, and not told its sample id yet.
    num_unbound: int = 0
    # Sample ids in the order in which they were drawn; those of replaced samples too.
    sample_ids: list[str] = field(default_factory=list)
    open_ids: set[str] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)
    num_replaced: int = 0
    # Of samples with a reward, where single turns are compared too: what they earned, without zeros at the end.
    turn_rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)
    num_stale: int = 0
    # Of the samples with a reward: what each earned by itself, and how many were cut off at `max_length`.
    own_rewards: list[float] = field(default_factory=list)
    num_truncated: int = 0
    # Of the samples with a reward: those that filled `max_length` and are not trained, or not even compared, for that.
    untrained_ids: set[str] = field(default_factory=set)
    uncompared_ids: set[str] = field(default_factory=set)
    # What it says of its task; None while it is undecided.
    outcome: TaskOutcome | None = None

    @property
    def valid_ids(self) -> tuple[str, ...]:
        return tuple(sample_id for sample_id in self.sample_ids if sample_id in self.rewards)

    @property
    def num_in_flight(self) -> int:
        return self.num_unbound + len(self.open_ids)

    @property
    def is_mixed(self) -> bool:
        """Whether the samples that are compared earned different rewards, and one of them is trained."""
        compared = self.rewards.keys() - self.uncompared_ids
        earned = {(self.rewards[sample_id], self.turn_rewards.get(sample_id)) for sample_id in compared}
        return len(earned) > 1 and not compared <= self.untrained_ids
