"""Which samples to play next and which of them make the batch: pure logic, no I/O, no clock.

    draw -> bind -> end ... end -> is_closed -> close -> leave ... leave -> draw of the next batch

The batch takes the earliest drawn groups with signal and closes once every group drawn before the last taken is
decided, so a short conversation is never favoured. Everything else follows from that:

- A group is complete with `number_generation` valid samples. An invalid (or stale) sample is replaced, at most
  `number_generation` times a group; then the group is abandoned and its samples are dropped as surplus: they were
  played well, but no batch has a place for an incomplete group.
- A group whose rewards are all equal (those of single turns too, where they are compared) has no signal: it is dropped
  and the next task in data order takes its place, at most `max_refill_rounds` times the groups of a batch. What counts
  are the rewards that advantages come from: with `overlong` conversations that filled `max_length` may be left out of
  them, and a group of which none is trained has no signal either.
- On policy, at most `global_batch_size` samples are in flight. Free slots draw replacements before they are known to be
  needed, as many as the share of groups with signal so far lets expect. (Drawing fewer or more than expected was slower
  in simulations of easy, mixed and hard tasks: the former waits longer, the latter plays more surplus.)
- When the batch closes, every played sample outside it is dropped as surplus. Those still being played are leaving:
  they are dropped when they end, so that the numbers of a step cover everything generated in it, long conversations
  included. The next batch goes on in data order right after the last group taken: a surplus task is drawn again and
  every task is either trained or decided to have no signal. (A curriculum may pass over tasks: see `task_order`.)
- Off policy the groups drawn beyond a batch that closes are the head of the next one, and nothing is surplus but what
  belongs to abandoned groups. How far beyond it they are drawn is bounded by a budget of slots: see `slots`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from turnmill.config import Config
from turnmill.records import DropReason, Progress, Task, TaskOutcome
from turnmill.training.group import Group, GroupState
from turnmill.training.slots import latest_steps
from turnmill.training.task_order import order_of
from turnmill.training.task_statistics import TaskTable, outcome_of
from turnmill.training.useless import UselessGroups

# Groups that the running share of groups with signal remembers, roughly.
_MEMORY_GROUPS = 64
# Before anything is known: this many of `_PRIOR_GROUPS` groups had signal.
_PRIOR_SIGNAL = 2.0
_PRIOR_GROUPS = 4.0
_BEGINNING = Progress()


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A sample to request now."""

    task: Task
    group_id: str


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A sample that is not going to be trained."""

    sample_id: str
    reason: DropReason
    # It has not ended: a worker may still be playing it (only when everything is cancelled).
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The end of a batch."""

    # Optimizer step that it makes.
    step: int
    # Sample ids group by group, in the order in which they were drawn; empty when no group had signal.
    groups: tuple[tuple[str, ...], ...]
    drops: tuple[Drop, ...]


class BatchBuilder:
    """Collects one batch after another; the same ends in the same order give the same draws, drops and batches."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        *,
        prefix: str,
        progress: Progress = _BEGINNING,
        step: int = 1,
        table: TaskTable | None = None,
    ) -> None:
        """`prefix` makes group ids unique over the trainers of a run; the others are where to begin."""
        self._size = config.number_generation
        self._groups_wanted = config.groups_per_batch
        self._is_async = config.is_async
        self._num_slots = config.global_batch_size * (config.max_staleness + 1)
        self._max_groups = self._groups_wanted * (1 + config.max_refill_rounds)
        self._threshold = config.success_threshold
        self._is_masking, self._is_dropping = config.overlong == "mask", config.overlong == "drop"
        self._table = table or TaskTable()
        self._order = order_of(config, tasks, self._table.statistics)
        self.useless = UselessGroups(config, self._table.statistics)
        self._prefix = prefix
        self._num_drawn = 0
        # Optimizer step that the batch being collected makes.
        self.step = step
        # Off policy: the last step that groups are drawn for.
        self._horizon = step - 1
        # Position in the data from which the batch being collected draws: right behind the last group taken.
        self.position = progress.position
        self._groups: list[Group] = []
        self._group_of: dict[str, Group] = {}
        # Open samples that no batch has a place for any more.
        self.leaving: set[str] = set()
        self._seen_signal = progress.seen_signal
        self._seen_groups = progress.seen_groups

    @property
    def progress(self) -> Progress:
        """Where another builder may go on; right after `close`."""
        return Progress(
            position=self.position,
            seen_signal=self._seen_signal,
            seen_groups=self._seen_groups,
            outcomes=self._table.outcomes,
        )

    # ------------------------------------------------------------ what to play

    @property
    def num_in_flight(self) -> int:
        """Samples that hold a slot."""
        return sum(group.num_in_flight for group in self._groups) + len(self.leaving)

    def draw(self) -> list[Draw]:
        """Samples for the free slots, earliest group first; tell their ids with `bind` before anything else."""
        draws: list[Draw] = []
        free = 0 if self.is_closed else self._num_slots - self.num_in_flight
        index = 0
        while free > 0:
            if index == len(self._groups):
                if not self._wants_group():
                    break
                self._open_group()
            group = self._groups[index]
            if group.state is GroupState.UNDECIDED:
                num = min(free, self._size - len(group.rewards) - group.num_in_flight)
                draws += [Draw(task=group.task, group_id=group.group_id)] * num
                group.num_unbound += num
                free -= num
            index += 1
        return draws

    def bind(self, draws: Sequence[Draw], sample_ids: Sequence[str]) -> None:
        """The ids that the drawn samples got, in order."""
        by_id = {group.group_id: group for group in self._groups}
        for draw, sample_id in zip(draws, sample_ids, strict=True):
            group = by_id[draw.group_id]
            group.num_unbound -= 1
            group.sample_ids.append(sample_id)
            group.open_ids.add(sample_id)
            self._group_of[sample_id] = group

    def _open_group(self) -> None:
        turn = self._order.turn(self._groups[-1].position + 1 if self._groups else self.position)
        group_id = f"{self._prefix}{self._num_drawn}"
        self._groups.append(Group(group_id=group_id, task=turn.task, position=turn.position))
        self._num_drawn += 1

    def _wants_group(self) -> bool:
        """Off policy, whether there are slots for one; on policy, whether those drawn are likely to fall short."""
        if self._is_async:
            return self._latest_steps()[-1] <= self._horizon
        num_signal = sum(group.state is GroupState.SIGNAL for group in self._groups)
        expected = sum(self._chance(group) for group in self._groups if group.state is GroupState.UNDECIDED)
        return len(self._groups) < self._max_groups and num_signal + expected < self._groups_wanted

    # ------------------------------------------------------------ which step

    @property
    def group_ids(self) -> set[str]:
        """Groups that were drawn and are in no batch yet."""
        return {group.group_id for group in self._groups}

    @property
    def horizon(self) -> int:
        """The last step that groups are drawn for, off policy."""
        return self._horizon

    def extend(self, horizon: int) -> None:
        """Slots came back: groups may be drawn up to step `horizon`. It never shrinks: what is drawn is drawn."""
        self._horizon = max(self._horizon, horizon)

    @property
    def is_waiting(self) -> bool:
        """Off policy: the next group has no slots yet."""
        return self._is_async and self._latest_steps()[-1] > self._horizon

    def latest_step(self, sample_id: str) -> int:
        """The last step that can be made with an owned sample."""
        group_id = self._group_of[sample_id].group_id
        steps = zip(self._latest_steps(), self._groups, strict=False)
        return next(step for step, group in steps if group.group_id == group_id)

    def _latest_steps(self) -> list[int]:
        """Of each group, and of the one to be drawn next, the last step that it can be in."""
        if not self._is_async:
            # A batch that closes leaves none behind.
            return [self.step] * (len(self._groups) + 1)
        may_have_signal = [group.state in (GroupState.UNDECIDED, GroupState.SIGNAL) for group in self._groups]
        return latest_steps(may_have_signal, step=self.step, wanted=self._groups_wanted, most=self._max_groups)

    def _chance(self, group: Group) -> float:
        """Chance that an undecided group has signal; certain once two rewards differ, fading while all are equal."""
        if group.is_mixed:
            return 1.0
        share = (self._seen_signal + _PRIOR_SIGNAL) / (self._seen_groups + _PRIOR_GROUPS)
        return share * (1 - len(group.rewards) / self._size)

    # ------------------------------------------------------------ what was played

    def owns(self, sample_id: str) -> bool:
        """It belongs to this batch and is neither dropped nor ended."""
        group = self._group_of.get(sample_id)
        return group is not None and sample_id in group.open_ids

    def tell_turns(self, sample_id: str, rewards: Sequence[float]) -> None:
        """What the turns of an owned sample earned, before it ends: a group in which they differ has signal."""
        last = max((turn for turn, reward in enumerate(rewards) if reward), default=-1)
        self._group_of[sample_id].turn_rewards[sample_id] = tuple(rewards[: last + 1])

    def end(
        self,
        sample_id: str,
        reward: float | None,
        *,
        stale: bool = False,
        own_reward: float | None = None,
        is_truncated: bool = False,
    ) -> list[Drop]:
        """An owned sample ended with a reward, or without one (invalid); a stale one is dropped and replaced.

        `own_reward` is without what its group added; None where that is nothing.
        """
        group = self._group_of[sample_id]
        group.open_ids.remove(sample_id)
        drops: list[Drop] = []
        if stale:
            drops.append(Drop(sample_id=sample_id, reason=DropReason.STALE))
        if stale or reward is None:
            group.num_stale += stale
            group.num_replaced += 1
            if group.num_replaced > self._size:
                drops += self._decide(group, GroupState.ABANDONED)
            return drops
        group.rewards[sample_id] = reward
        group.own_rewards.append(reward if own_reward is None else own_reward)
        group.num_truncated += is_truncated
        if is_truncated and (self._is_masking or self._is_dropping):
            group.untrained_ids.add(sample_id)
        if is_truncated and self._is_dropping:
            group.uncompared_ids.add(sample_id)
        if len(group.rewards) == self._size:
            drops += self._decide(group, GroupState.SIGNAL if group.is_mixed else GroupState.NO_SIGNAL)
        return drops

    def leave(self, sample_id: str, reward: float | None) -> list[Drop]:
        """A leaving sample ended: surplus, or invalid and accounted for already."""
        self.leaving.remove(sample_id)
        return [] if reward is None else [Drop(sample_id=sample_id, reason=DropReason.SURPLUS)]

    def _decide(self, group: Group, state: GroupState) -> list[Drop]:
        group.state = state
        group.outcome = self._outcome(group)
        self.useless.count(group.outcome)
        if state is not GroupState.ABANDONED:
            forget = 1 - 1 / _MEMORY_GROUPS
            self._seen_signal = self._seen_signal * forget + (state is GroupState.SIGNAL)
            self._seen_groups = self._seen_groups * forget + 1
        if state is GroupState.SIGNAL:
            return []
        reason = DropReason.NO_SIGNAL if state is GroupState.NO_SIGNAL else DropReason.SURPLUS
        return self._release(group, reason)

    def _outcome(self, group: Group) -> TaskOutcome:
        """What a decided group says of its task."""
        return outcome_of(
            group.task.id,
            group.position,
            group.own_rewards,
            num_invalid=group.num_replaced - group.num_stale,
            num_truncated=group.num_truncated,
            threshold=self._threshold,
            has_signal=None if group.state is GroupState.ABANDONED else group.state is GroupState.SIGNAL,
        )

    def _release(self, group: Group, reason: DropReason) -> list[Drop]:
        """Drop the group's valid samples and let the open ones leave; invalid and stale ones are accounted for."""
        self.leaving |= group.open_ids
        group.open_ids.clear()
        return [Drop(sample_id=sample_id, reason=reason) for sample_id in group.valid_ids]

    # ------------------------------------------------------------ the batch

    @property
    def is_closed(self) -> bool:
        """The batch is decided: full, or no group is undecided and none may be drawn any more."""
        return self._num_considered() is not None

    def _num_considered(self) -> int | None:
        """How many groups, in order, it takes to decide the batch; None while it is open."""
        num_signal = 0
        for index, group in enumerate(self._groups[: self._max_groups]):
            if group.state is GroupState.UNDECIDED:
                return None
            num_signal += group.state is GroupState.SIGNAL
            if num_signal == self._groups_wanted:
                return index + 1
        return self._max_groups if len(self._groups) >= self._max_groups else None

    @property
    def certain(self) -> list[tuple[str, ...]]:
        """The groups that will be in the batch whatever comes: with signal, and all drawn before them decided."""
        found: list[tuple[str, ...]] = []
        for group in self._groups[: self._max_groups]:
            if group.state is GroupState.UNDECIDED or len(found) == self._groups_wanted:
                break
            if group.state is GroupState.SIGNAL:
                found.append(group.valid_ids)
        return found

    def close(self) -> Closed:
        """Take the batch and begin the next one; off policy, with the groups that were drawn beyond it."""
        num_considered = self._num_considered()
        if num_considered is None:
            raise RuntimeError("the batch is still open")
        considered, rest = self._groups[:num_considered], self._groups[num_considered:]
        given_up, self._groups = ([], rest) if self._is_async else (rest, [])
        closed = Closed(
            step=self.step,
            groups=tuple(group.valid_ids for group in considered if group.state is GroupState.SIGNAL),
            drops=tuple(drop for group in given_up for drop in self._give_up(group, DropReason.SURPLUS)),
        )
        self.position = considered[-1].position + 1
        self.step += bool(closed.groups)
        self._group_of = {i: self._group_of[i] for group in self._groups for i in group.sample_ids}
        # Those that go on into the next batch count there, whenever they were decided.
        outcomes = [group.outcome for group in (*considered, *given_up) if group.outcome is not None]
        self._table.close(outcomes, has_batch=bool(closed.groups))
        return closed

    def cancel(self, reason: DropReason = DropReason.CANCELLED) -> list[Drop]:
        """Give up the batch being collected: everything that is not dropped yet, for that reason."""
        drops = [drop for group in self._groups for drop in self._give_up(group, reason)]
        drops += [Drop(sample_id=i, reason=reason, is_open=True) for i in sorted(self.leaving)]
        self._groups = []
        self._group_of = {}
        self.leaving = set()
        return drops

    def _give_up(self, group: Group, reason: DropReason) -> list[Drop]:
        """Drops of a group outside the batch; without signal or abandoned, they were dropped when it was decided."""
        if group.state in (GroupState.UNDECIDED, GroupState.SIGNAL):
            return self._release(group, reason)
        return []
