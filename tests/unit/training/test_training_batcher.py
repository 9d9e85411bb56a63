"""The batch builder on a table of cases by hand, and a random simulation that checks what must always hold."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from turnmill.config import Config
from turnmill.records import DropReason, Task
from turnmill.training.batcher import BatchBuilder, Closed, Draw, Drop

Rewards = Callable[[str, int], float | None]


class Table:
    """Plays a builder's draws by a rule and keeps the books."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        self.config = config
        self.builder = BatchBuilder(config, tasks, prefix="1.")
        self.draws: list[Draw] = []
        self.open: list[str] = []
        self.task_of: dict[str, str] = {}
        self.group_of: dict[str, str] = {}
        self.rewards: dict[str, float | None] = {}
        self.fate: dict[str, DropReason] = {}
        self.drawn_by_batch: list[list[str]] = []
        self._next: Counter[str] = Counter()

    def request(self) -> list[str]:
        """Bind what the builder draws now; the new ids."""
        draws = self.builder.draw()
        ids = []
        for draw in draws:
            ids.append(f"{draw.task.id}_{self._next[draw.task.id]}")
            self._next[draw.task.id] += 1
            self.task_of[ids[-1]] = draw.task.id
            self.group_of[ids[-1]] = draw.group_id
        self.builder.bind(draws, ids)
        self.draws += draws
        self.open += ids
        assert self.builder.num_in_flight == len(self.open) <= self.config.global_batch_size
        return ids

    def end(self, sample_id: str, reward: float | None, *, stale: bool = False, is_truncated: bool = False) -> None:
        self.rewards[sample_id] = reward
        self.open.remove(sample_id)
        if sample_id in self.builder.leaving:
            self.book(self.builder.leave(sample_id, reward))
        else:
            self.book(self.builder.end(sample_id, reward, stale=stale, is_truncated=is_truncated))

    def book(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            assert drop.sample_id not in self.fate, "dropped twice"
            assert drop.is_open == (drop.sample_id in self.open)
            self.fate[drop.sample_id] = drop.reason
            if drop.is_open:
                self.open.remove(drop.sample_id)

    def play(self, rule: Rewards, order: random.Random | None = None) -> Closed:
        """Play to the end of a batch, first requested first (or in random order), and let the rest leave."""

        def end_one() -> None:
            sample_id = self.open[order.randrange(len(self.open)) if order else 0]
            self.end(sample_id, rule(self.task_of[sample_id], int(sample_id.rpartition("_")[2])))

        num_before = len(self.draws)
        while True:
            self.request()
            certain = self.builder.certain
            if self.builder.is_closed:
                break
            end_one()
            assert self.builder.certain[: len(certain)] == certain
        closed = self.builder.close()
        assert list(closed.groups) == certain
        self.book(closed.drops)
        assert set(self.open) == self.builder.leaving
        while self.builder.leaving:
            end_one()
        self.drawn_by_batch.append(list(dict.fromkeys(draw.group_id for draw in self.draws[num_before:])))
        return closed


def first_of_four(task: str, g: int) -> float:
    return float(g % 4 == 0)


@pytest.fixture
def table(small_config: Config, tasks: list[Task]) -> Table:
    return Table(small_config, tasks)


def test_the_first_draw_fills_the_slots_in_data_order(table: Table) -> None:
    assert table.request() == [f"t{i}_{g}" for i in range(2) for g in range(4)]
    assert table.builder.num_in_flight == 8
    assert table.builder.draw() == []


def test_groups_with_signal_make_the_batch_in_the_order_drawn(table: Table) -> None:
    ids = table.request()
    for sample_id in reversed(ids):
        table.end(sample_id, first_of_four("", int(sample_id[-1])))
    assert table.builder.is_closed
    closed = table.builder.close()
    assert closed.groups == (tuple(ids[:4]), tuple(ids[4:]))
    assert closed.drops == ()


def test_a_group_is_certain_once_it_has_signal_and_all_before_it_are_decided(table: Table) -> None:
    ids = table.request()
    for sample_id in ids[4:]:
        table.end(sample_id, first_of_four("", int(sample_id[-1])))
    assert table.builder.certain == []
    for sample_id in ids[:4]:
        table.end(sample_id, 0.0)
    assert table.builder.certain == [tuple(ids[4:])]
    closed = table.play(first_of_four)
    assert closed.groups[0] == tuple(ids[4:]) and len(closed.groups) == 2
    assert table.builder.certain == []


def test_a_group_without_signal_is_dropped_and_the_next_task_takes_its_place(table: Table) -> None:
    closed = table.play(lambda task, g: 0.5 if task == "t0" else first_of_four(task, g))
    assert [group[0] for group in closed.groups] == ["t1_0", "t2_0"]
    assert {s for s, reason in table.fate.items() if reason is DropReason.NO_SIGNAL} == {f"t0_{g}" for g in range(4)}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([(), (0.0,), (0.0, 0.0), ()], DropReason.NO_SIGNAL),
        ([(0.0, 1.0), (0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 1.0)], DropReason.NO_SIGNAL),
        ([(0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0)], None),
    ],
)
def test_rewards_of_turns_that_differ_are_signal_too(
    table: Table, turns: list[tuple[float, ...]], expected: DropReason | None
) -> None:
    first = table.request()[:4]
    for sample_id, rewards in zip(first, turns, strict=True):
        table.builder.tell_turns(sample_id, rewards)
        table.end(sample_id, 0.5)
    assert {table.fate.get(sample_id) for sample_id in first} == {expected}


@pytest.mark.parametrize(
    ("overlong", "rewards", "cut_off", "expected"),
    [
        # All that are trained earned the same, or nothing is left of the group.
        ("drop", [1.0, 0.0, 0.0, 0.0], [0], DropReason.NO_SIGNAL),
        ("drop", [1.0, 0.0, 0.0, 0.0], [1, 2, 3], DropReason.NO_SIGNAL),
        ("drop", [1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3], DropReason.NO_SIGNAL),
        ("drop", [1.0, 0.0, 0.0, 0.0], [3], None),
        # Compared with them, the others were better.
        ("mask", [1.0, 0.0, 0.0, 0.0], [1, 2, 3], None),
        ("mask", [1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3], DropReason.NO_SIGNAL),
        ("score", [1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3], None),
    ],
)
def test_what_is_not_trained_because_it_filled_its_length_is_no_signal(
    small_config: Config,
    tasks: list[Task],
    overlong: str,
    rewards: list[float],
    cut_off: list[int],
    expected: DropReason | None,
) -> None:
    table = Table(replace(small_config, overlong=overlong), tasks)
    first = table.request()[:4]
    for g, (sample_id, reward) in enumerate(zip(first, rewards, strict=True)):
        table.end(sample_id, reward, is_truncated=g in cut_off)
    assert {table.fate.get(sample_id) for sample_id in first} == {expected}


def test_an_invalid_sample_is_replaced_in_its_group(table: Table) -> None:
    closed = table.play(lambda task, g: None if (task, g) == ("t0", 1) else first_of_four(task, g))
    assert closed.groups[0] == ("t0_0", "t0_2", "t0_3", "t0_4")
    assert "t0_1" not in table.fate


def test_a_stale_sample_is_dropped_so_and_replaced(table: Table) -> None:
    table.request()
    table.end("t0_1", 1.0, stale=True)
    closed = table.play(first_of_four)
    assert closed.groups[0] == ("t0_0", "t0_2", "t0_3", "t0_4")
    assert table.fate["t0_1"] is DropReason.STALE


def test_a_group_is_abandoned_after_as_many_replacements_as_it_has_samples(table: Table) -> None:
    table.request()
    table.end("t0_0", 1.0)
    for _ in range(5):
        victim = next(s for s in table.open if s.startswith("t0_"))
        table.end(victim, None)
        table.request()
    assert {s for s in table.open if s.startswith("t0_")} == table.builder.leaving == {"t0_6", "t0_7"}
    assert table.fate == {"t0_0": DropReason.SURPLUS}
    closed = table.play(first_of_four)
    assert table.fate["t0_6"] is table.fate["t0_7"] is DropReason.SURPLUS, "played to their end, and counted"
    assert [group[0] for group in closed.groups] == ["t1_0", "t2_0"]


def test_a_batch_waits_for_every_group_drawn_before_the_last_one_taken(table: Table) -> None:
    table.request()
    for g in range(4):
        table.end(f"t1_{g}", first_of_four("t1", g))
    table.end("t0_0", 0.0)
    table.request()
    for sample_id in [s for s in table.open if s.startswith("t2")]:
        table.end(sample_id, float(sample_id.endswith("0")))
    table.request()
    while any(s.startswith("t2") for s in table.open):
        sample_id = next(s for s in table.open if s.startswith("t2"))
        table.end(sample_id, float(sample_id.endswith("0")))
        table.request()
    assert not table.builder.is_closed, "t0 is still being played and was drawn first"
    for g in (1, 2, 3):
        table.end(f"t0_{g}", 1.0)
    assert table.builder.is_closed
    closed = table.builder.close()
    table.book(closed.drops)
    assert [group[0] for group in closed.groups] == ["t0_0", "t1_0"]
    assert {reason for s, reason in table.fate.items() if s.startswith("t2")} == {DropReason.SURPLUS}
    assert table.open == []


def test_what_is_still_played_when_the_batch_closes_is_played_to_its_end_and_surplus(table: Table) -> None:
    closed = table.play(first_of_four)
    assert len(closed.groups) == 2
    assert table.open == []
    assert set(table.fate.values()) <= {DropReason.SURPLUS}


def test_the_next_batch_goes_on_after_the_last_group_taken(table: Table) -> None:
    table.play(first_of_four)
    assert table.builder.position == 2
    assert [group[0].split("_")[0] for group in table.play(first_of_four).groups] == ["t2", "t3"]


def test_at_the_refill_limit_the_step_runs_on_what_there_is(table: Table) -> None:
    closed = table.play(lambda task, g: first_of_four(task, g) if task == "t3" else 0.0)
    assert closed.groups == (("t3_0", "t3_1", "t3_2", "t3_3"),)
    assert len({draw.group_id for draw in table.draws}) == 2 * (1 + 2)
    assert table.builder.position == 6


def test_without_any_signal_the_batch_is_empty_and_the_data_moves_on(table: Table) -> None:
    assert table.play(lambda task, g: 0.0).groups == ()
    assert len(table.fate) == 24
    assert table.request()[0] == "t6_0"


def test_without_refills_the_first_groups_decide(small_config: Config, tasks: list[Task]) -> None:
    table = Table(replace(small_config, max_refill_rounds=0), tasks)
    assert len(table.play(lambda task, g: float(task == "t0" and g == 0)).groups) == 1


def test_replacements_are_drawn_before_they_are_known_to_be_needed(small_config: Config, tasks: list[Task]) -> None:
    table = Table(replace(small_config, global_batch_size=32), tasks)
    table.request()
    for sample_id in ["t0_0", "t0_1", "t0_2"]:
        table.end(sample_id, 0.0)
    assert [s.split("_")[0] for s in table.request()] == ["t8"] * 3


def test_no_replacement_is_drawn_for_groups_that_have_their_signal_already(table: Table) -> None:
    table.request()
    for task in ("t0", "t1"):
        table.end(f"{task}_0", 1.0)
        table.end(f"{task}_1", 0.0)
    assert table.request() == []


def test_cancelling_drops_everything_that_is_not_dropped_yet(table: Table) -> None:
    table.request()
    table.end("t0_0", 1.0)
    table.end("t1_3", None)
    table.book(table.builder.cancel())
    assert set(table.fate.values()) == {DropReason.CANCELLED}
    assert set(table.fate) == {f"t{i}_{g}" for i in range(2) for g in range(4)} - {"t1_3"}
    assert table.builder.num_in_flight == 0
    assert table.builder.position == 0


def test_cancelling_drops_open_samples_those_that_are_leaving_included(table: Table) -> None:
    table.request()
    for _ in range(5):
        table.end(next(s for s in table.open if s.startswith("t0_")), None)
        table.request()
    leaving, others = set(table.builder.leaving), set(table.open) - table.builder.leaving
    assert leaving and others
    table.book(table.builder.cancel())
    assert table.open == [] and table.builder.num_in_flight == 0
    assert {s for s, reason in table.fate.items() if reason is DropReason.CANCELLED} == leaving | others


def test_an_open_batch_can_not_be_closed(table: Table) -> None:
    table.request()
    with pytest.raises(RuntimeError, match="still open"):
        table.builder.close()


def simulate(seed: int) -> tuple[Table, list[Closed]]:
    """Five batches of a random configuration, tasks of random difficulty, ends in random order."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4, 8])
    config = Config(
        number_generation=size,
        global_batch_size=size * rng.randint(1, 6),
        max_refill_rounds=rng.randint(0, 4),
        shuffle=rng.random() < 0.5,
        seed=seed,
    )
    tasks = [Task(id=f"t{i}", metadata={}) for i in range(rng.randint(1, 12))]
    chance = {task.id: rng.choice([0.0, 0.05, 0.5, 0.9, 1.0]) for task in tasks}
    broken = rng.choice([0.0, 0.1, 0.6])
    table = Table(config, tasks)

    def rule(task: str, g: int) -> float | None:
        return None if rng.random() < broken else float(rng.random() < chance[task])

    return table, [table.play(rule, rng) for _ in range(5)]


@pytest.mark.parametrize("seed", range(60))
def test_invariants_hold_in_a_random_simulation(seed: int) -> None:
    table, batches = simulate(seed)
    config = table.config
    drawn = list(dict.fromkeys(draw.group_id for draw in table.draws))
    members = {group_id: [s for s, g in table.group_of.items() if g == group_id] for group_id in drawn}
    trained: set[str] = set()
    for closed, drawn_here in zip(batches, table.drawn_by_batch, strict=True):
        assert len(closed.groups) <= config.groups_per_batch
        for group in closed.groups:
            assert len(group) == config.number_generation, "never trained smaller"
            assert len({table.rewards[s] for s in group}) > 1, "only with signal"
            assert None not in {table.rewards[s] for s in group}
            assert len({table.group_of[s] for s in group}) == 1
            trained |= set(group)
        taken = [table.group_of[group[0]] for group in closed.groups]
        considered = (
            drawn_here[: drawn_here.index(taken[-1]) + 1] if len(taken) == config.groups_per_batch else drawn_here
        )
        for group_id in considered:
            valid = [r for s in members[group_id] if (r := table.rewards.get(s)) is not None]
            has_signal = len(valid) == config.number_generation and len(set(valid)) > 1
            assert (group_id in taken) == has_signal, "earliest with signal, in order"
        assert len(considered) <= config.groups_per_batch * (1 + config.max_refill_rounds)
        if len(taken) < config.groups_per_batch:
            assert len(considered) == config.groups_per_batch * (1 + config.max_refill_rounds), "only at the limit"
    for sample_id in table.task_of:
        fates = [sample_id in trained, sample_id in table.fate, table.rewards.get(sample_id, 0.0) is None]
        assert sum(fates) == 1, f"{sample_id} is trained, dropped or invalid, and only one of these: {fates}"
    assert all(len(members[group_id]) <= 2 * config.number_generation for group_id in drawn), "replacements end"
    assert table.open == []


@pytest.mark.parametrize("seed", range(5))
def test_the_same_ends_give_the_same_batches(seed: int) -> None:
    (one, batches), (two, again) = simulate(seed), simulate(seed)
    assert batches == again
    assert one.draws == two.draws and one.fate == two.fate
